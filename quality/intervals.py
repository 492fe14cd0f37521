"""Means with their uncertainty, and whether a difference is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

RESAMPLES = 9999
SEED = 0  # the same scores give the same interval


def mean_with_interval(values: Sequence[float]) -> dict[str, Any]:
    """{"score", "low", "high", "count"}: the mean and its 95 % bootstrap interval.

    The interval is None for fewer than two values, and no wider than they are.
    """
    low = high = None
    if len(values) > 1:
        interval = stats.bootstrap(
            (np.asarray(values, float),),
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=0.95,
            method="percentile",
            rng=np.random.default_rng(SEED),
        ).confidence_interval
        low, high = float(interval.low) + 0.0, float(interval.high) + 0.0
    # Adding 0 makes a positive zero of a negative one.
    return {"score": float(np.mean(values)) + 0.0, "low": low, "high": high, "count": len(values)}


def paired_difference(
    first: Sequence[float], second: Sequence[float], significance: float
) -> dict[str, Any]:
    """Whether values for which more is better are lower in `second`, prompt by prompt.

    "p_value": how often a mean difference as low as this, or lower, comes about when the sign of
    every prompt's difference is drawn at random. "worse": it is below `significance`; "decidable":
    there are enough prompts for that at all.
    """
    differences = np.asarray(second, float) - np.asarray(first, float)
    interval = mean_with_interval(differences.tolist())
    p_value = float(
        stats.permutation_test(
            (differences,),
            _mean,
            permutation_type="samples",
            alternative="less",
            n_resamples=RESAMPLES,
            vectorized=True,
            rng=np.random.default_rng(SEED),
        ).pvalue
    )
    return {
        "first": float(np.mean(first)),
        "second": float(np.mean(second)),
        "difference": interval["score"],
        "low": interval["low"],
        "high": interval["high"],
        "p_value": p_value,
        "significance": significance,
        "decidable": 0.5 ** len(differences) < significance,
        "worse": p_value < significance,
    }


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    return np.mean(values, axis=axis)
