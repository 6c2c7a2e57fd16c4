"""How far the mean of a sensor's updates may lie from the mean of what it measures: plain statistics of a series."""

from __future__ import annotations

import math

import numpy as np

from device_agent.power.trace import Array

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
# Batches longer than one update tell slow beats between sensor and load; fewer batches than this say too little.
_BATCH_SIZES, _MIN_BATCHES = (2, 4, 8), 16


def t_95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t; `degrees` of freedom >= 1. Right to 0.5 %."""
    return _T_95[degrees - 1] if degrees <= len(_T_95) else 1.96 + 2.6 / degrees


def scatter(values: Array) -> float:
    """Standard deviation of one value around the local level, for `values` in order of time; needs two or more.

    From differences of neighbours (von Neumann), so that a slow change, which an integral over time follows, does not
    count; the same over batches, so that neighbours that resemble each other do not hide what there is.
    """
    worst = float(np.mean(np.diff(values) ** 2)) / 2
    for size in _BATCH_SIZES:
        batches = values.size // size
        if batches < _MIN_BATCHES:
            break
        means = values[: batches * size].reshape(batches, size).mean(axis=1)
        worst = max(worst, size * float(np.mean(np.diff(means) ** 2)) / 2)
    return math.sqrt(worst)


def half_width_95(values: Array) -> float:
    """Half the 95 % interval that one value's scatter makes, Student's t for as many `values` (two or more)."""
    # Differences share their values: two thirds of the usual degrees of freedom (von Neumann's estimator).
    return t_95(max(1, 2 * (values.size - 1) // 3)) * scatter(values)
