"""A matrix, stretch by stretch of its rows, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

STRETCH = 2**18  # elements: fit into a core's cache


def by_rows(
    function: Callable[[np.ndarray], tuple[np.ndarray, ...]], array: np.ndarray
) -> tuple[np.ndarray, ...]:
    """What `function` makes of stretches of rows, joined: arrays with a row for each of `array`'s.

    In threads: numpy computes beside other threads, unlike ml_dtypes, whose casts do not.
    """
    rows = max(1, STRETCH // array[0].size)
    stretches = [array[i : i + rows] for i in range(0, len(array), rows)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a lasting one would not outlive a fork
        parts = list(pool.map(function, stretches))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))
