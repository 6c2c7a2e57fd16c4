"""Fronts of latency and energy: dominance, its confidence, and the hypervolume of a front."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from farm.points.values import Estimate
from farm.sweep.fit.terms import Floats

# Draws behind a confidence, whose own error is then below 3 %; a fixed seed, so that equal data give equal answers.
_DRAWS = 400
_SEED = 0
# Contenders below this confidence are dropped.
_LEAST = 0.05


@dataclasses.dataclass(frozen=True)
class FrontCandidate:
    """A point with its two costs: latency in s and energy in J (or another cost)."""

    key: str
    latency: Estimate
    cost: Estimate


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """A point that may be on the front. `confidence` is the probability that none of the others is better in both.

    `on_front` is by the values; a point with it false and some confidence is a contender that the measurements cannot
    distinguish from the front.
    """

    key: str
    on_front: bool
    confidence: float


def find_front(candidates: Sequence[FrontCandidate]) -> tuple[FrontPoint, ...]:
    """Return the front and its contenders, fastest first. Errors of different points are taken as independent."""
    if not candidates:
        return ()
    latency = np.array([candidate.latency.value for candidate in candidates])
    cost = np.array([candidate.cost.value for candidate in candidates])
    noise = np.random.default_rng(_SEED).standard_normal((2, _DRAWS, len(candidates)))
    times = latency * np.exp(noise[0] * np.array([candidate.latency.log_sd for candidate in candidates]))
    costs = cost * np.exp(noise[1] * np.array([candidate.cost.log_sd for candidate in candidates]))
    counts = np.zeros(len(candidates))
    for draw in range(_DRAWS):
        counts[front_rows(times[draw], costs[draw])] += 1
    chosen = set(front_rows(latency, cost))
    rows = [row for row in range(len(candidates)) if row in chosen or counts[row] >= _LEAST * _DRAWS]
    return tuple(
        FrontPoint(candidates[row].key, row in chosen, float(counts[row] / _DRAWS))
        for row in sorted(rows, key=lambda row: (latency[row], cost[row]))
    )


def front_rows(latency: Floats, cost: Floats) -> list[int]:
    """Return the rows that no other dominates, fastest first; of equal ones the first."""
    order = np.lexsort((cost, latency))
    lowest = np.minimum.accumulate(np.concatenate([[np.inf], cost[order]]))[:-1]
    return [int(row) for row in order[cost[order] < lowest]]


def reference_point(latency: Floats, cost: Floats) -> tuple[float, float]:
    """Return the reference corner of the hypervolume: a tenth of the front's extent beyond its worst values.

    A front of one point, or nearly so, has no extent: then it is 5 % beyond. (Ishibuchi et al. 2018, How to specify a
    reference point in hypervolume calculation.)
    """
    rows = front_rows(latency, cost)
    corner = []
    for values in (latency[rows], cost[rows]):
        extent = max(0.1 * float(np.ptp(values)), 0.05 * float(values.min()))
        corner.append(float(values.max()) + extent)
    return corner[0], corner[1]


def hypervolume(latency: Floats, cost: Floats, reference: tuple[float, float]) -> float:
    """Return the area that points dominate up to `reference`, in s J; 0 where none does."""
    inside = (latency < reference[0]) & (cost < reference[1])
    latency, cost = latency[inside], cost[inside]
    if not latency.size:
        return 0.0
    rows = front_rows(latency, cost)
    widths = np.diff(np.append(latency[rows], reference[0]))
    return float(widths @ (reference[1] - cost[rows]))


def improvements(
    latency: Floats, cost: Floats, measured_latency: Floats, measured_cost: Floats, reference: tuple[float, float]
) -> Floats:
    """Return each point's own gain in hypervolume over the measured ones."""
    inside = (measured_latency < reference[0]) & (measured_cost < reference[1])
    times, costs = measured_latency[inside], measured_cost[inside]
    rows = front_rows(times, costs) if times.size else []
    # Between two neighbours of the front the height to beat is the left one's cost.
    edges = np.concatenate([[-np.inf], times[rows], [reference[0]]])
    ceilings = np.concatenate([[reference[1]], costs[rows]])
    left = np.maximum(edges[None, :-1], latency[:, None])
    width = np.maximum(0.0, edges[None, 1:] - left)
    height = np.maximum(0.0, ceilings[None] - cost[:, None])
    return np.asarray((width * height).sum(axis=1))
