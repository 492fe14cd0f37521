"""Intervals against the normal approximation, and verdicts on differences."""

import numpy as np
import pytest

from quality.intervals import mean_with_interval, paired_difference


def test_the_interval_is_that_of_the_normal_approximation():
    values = np.random.default_rng(0).normal(0.5, 0.1, 400)
    found = mean_with_interval(values.tolist())
    half = 1.96 * values.std(ddof=1) / 20
    assert found["score"] == pytest.approx(values.mean())
    assert found["low"] == pytest.approx(values.mean() - half, abs=0.001)
    assert found["high"] == pytest.approx(values.mean() + half, abs=0.001)
    assert found["count"] == 400


def test_few_and_equal_values():
    assert mean_with_interval([0.3]) == {"score": 0.3, "low": None, "high": None, "count": 1}
    found = mean_with_interval([1.0] * 20)
    assert (found["low"], found["high"]) == (1.0, 1.0)


def test_the_same_values_are_not_worse():
    found = paired_difference([1.0, 0.2, 0.9] * 20, [1.0, 0.2, 0.9] * 20, 0.01)
    assert found["difference"] == 0.0
    assert found["p_value"] == 1.0
    assert not found["worse"]


def test_a_steady_loss_is_worse_and_a_gain_is_not():
    first = np.random.default_rng(0).uniform(0.5, 1.0, 60)
    loss = np.random.default_rng(1).uniform(0.0, 0.04, 60)
    assert paired_difference(first.tolist(), (first - loss).tolist(), 0.01)["worse"]
    assert not paired_difference(first.tolist(), (first + loss).tolist(), 0.01)["worse"]


def test_chance_is_called_worse_as_often_as_the_significance_says():
    rng = np.random.default_rng(0)
    worse = 0
    for _ in range(100):
        first = rng.uniform(0, 1, 50)
        second = first + rng.normal(0, 0.2, 50)
        worse += paired_difference(first.tolist(), second.tolist(), 0.05)["worse"]
    assert worse <= 12  # 5 expected; more than 12 of 100 have a probability of 0.1 %
