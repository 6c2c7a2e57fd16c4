"""From a trace to a sensor's updates, and from updates to an integral with the half width of its 95 % interval.

A value is taken as the mean of, or one sample from, the update period before it was refreshed. Quantisation, and what
makes a window good enough, are in `energy.py`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from device_agent.power.trace import Array, RailTrace

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


Mask = NDArray[np.bool_]

# A pause between updates longer than this many periods is one in which updates were missed.
_LONG = 1.5


@dataclasses.dataclass(frozen=True)
class Series:
    """A rail's updates: `values_w[i]` stands for the `period_s` before `ends_s[i]`."""

    ends_s: Array
    values_w: Array
    period_s: float

    @property
    def centres_s(self) -> Array:
        return self.ends_s - self.period_s / 2


def reconstruct(rail: RailTrace, period_s: float, alive: bool) -> Series:
    """The updates behind a trace: those that changed the value, and those in between that did not.

    Of a rail whose chip showed no change at all only its one value counts: it may be stale.
    """
    new = rail.changed.copy()
    new[0] = True
    times, values = rail.times_s[new], rail.values_w[new]
    # Reads see an update late, by up to their spacing.
    seen_late_s = np.where(rail.changed[new], times - rail.since_s[new], period_s)
    ends = times - np.minimum(seen_late_s, period_s) / 2
    if not alive:
        return Series(ends, values, period_s)
    # Where reads are further apart than updates, each read is its own update.
    spacing_s = max(period_s, rail.spacing_s)
    last_s = max(float(rail.times_s[-1]), float(ends[-1]))
    gaps = np.diff(np.append(ends, last_s))
    times_seen = np.maximum(1, np.round(gaps / spacing_s).astype(int))
    times_seen[-1] = 1 + int(gaps[-1] / spacing_s)
    step = gaps / times_seen
    step[-1] = spacing_s
    index = np.repeat(np.arange(ends.size), times_seen)
    nth = np.arange(index.size) - np.repeat(np.cumsum(times_seen) - times_seen, times_seen)
    all_ends = ends[index] + nth * step[index]
    keep = np.ones(all_ends.size, dtype=bool)
    holes = np.flatnonzero(rail.times_s - rail.since_s > _LONG * spacing_s)
    for hole in holes:  # nobody looked: what the updates were is not known
        keep &= ~((nth > 0) & (all_ends > rail.since_s[hole]) & (all_ends < rail.times_s[hole] - spacing_s))
    return Series(all_ends[keep], values[index][keep], period_s)


def estimate(series: Series, inside: Mask, low_s: float, high_s: float) -> tuple[float, float]:
    """The integral in J between two moments, and half its 95 % interval without quantisation.

    Only updates that lie in the window as a whole are used, the first and last of them out to its edges; those that
    straddle an edge belong partly to what was outside, and bound what the edge may hide.
    """
    length_s = high_s - low_s
    if not inside.any():
        points = np.unique(np.concatenate([[low_s, high_s], np.clip(series.centres_s, low_s, high_s)]))
        levels = np.interp(points, series.centres_s, series.values_w)
        near = (series.ends_s > low_s) & (series.ends_s - series.period_s < high_s)
        seen = series.values_w[near] if near.any() else levels
        return float(np.trapezoid(levels, points)), float(np.ptp(seen)) * length_s
    centres, values = series.centres_s[inside], series.values_w[inside]
    energy_j = float(
        np.trapezoid(values, centres) + values[0] * (centres[0] - low_s) + values[-1] * (high_s - centres[-1])
    )
    edges_j = (
        _edge(series, series.ends_s - series.period_s < low_s, low_s, values[0], centres[0] - low_s, -1),
        _edge(series, series.ends_s > high_s, high_s, values[-1], high_s - centres[-1], 0),
    )
    pauses = np.diff(centres)
    long = pauses > _LONG * series.period_s
    missed_j = float(((pauses - series.period_s)[long] * np.abs(np.diff(values)[long])).sum()) / 2
    varied_j = 0.0
    if values.size > 1:
        varied_j = half_width_95(values) * (length_s * max(series.period_s, length_s / values.size)) ** 0.5
    return energy_j, float((varied_j**2 + edges_j[0] ** 2 + edges_j[1] ** 2) ** 0.5) + missed_j


def _edge(series: Series, outside: Mask, edge_s: float, value_w: float, zone_s: float, nearest: int) -> float:
    """What may be wrong in J about an edge: the stretch up to the first whole update, times how much the update that
    straddles the edge differs from it (0 where none does).
    """
    distance_s = np.abs(series.centres_s - edge_s)
    straddling = outside & (distance_s <= series.period_s)
    if not straddling.any():
        return 0.0
    differing = np.abs(series.values_w[straddling] - value_w)
    return float(zone_s * differing[nearest])
