"""Score unmeasured points: how much a measurement may still change the front or the pick. Draws are seeded."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

from farm.points.values import Goal
from farm.sweep.fit import pick
from farm.sweep.fit.analysis import Analysis
from farm.sweep.fit.terms import Floats, Indices

Flags = np.ndarray[Any, np.dtype[np.bool_]]
# Joint draws of unmeasured points. More cost time and change few decisions.
_DRAWS = 48
# How many unmeasured points are scored: those with the best optimistic values.
_CONTENDERS = 160
# An optimistic value is this many standard deviations better than expected.
_HOPE = 1.5
# A point is picked only if its whole interval keeps the deadline; this is about the half width of a measured one.
_MARGIN = 0.004


@dataclasses.dataclass(frozen=True)
class Worth:
    """Which unmeasured points are worth most: `rows` are grid rows, best first by the sum of a point's possible gains.

    `front_share` is the expected share of the grid's hypervolume that the measured points have; `pick_gain` by how much
    of the objective the best unmeasured point is expected to beat the best measured one. `front_doubt` is the standard
    deviation of the whole grid's hypervolume, relative to its mean: how well the front is known without more points.
    """

    rows: tuple[int, ...]
    front_share: float
    pick_gain: float
    front_doubt: float


@dataclasses.dataclass(frozen=True)
class _Values:
    """Latency in s, power and idle power in W, energy in J, of points in one shape. Without a sensor powers are 1."""

    latency: Floats
    power: Floats
    idle: Floats

    @property
    def energy(self) -> Floats:
        return self.latency * self.power

    @classmethod
    def of(cls, wall: pick.Wall | None, latency: Floats, power: Floats | None, idle: Floats | None) -> _Values:
        """Make them from logarithms; powers are at the meter where one is meant."""
        watts = (np.ones_like(latency) if each is None else np.exp(each) for each in (power, idle))
        return cls(np.exp(latency), *(each if wall is None else wall.slope * each + wall.offset for each in watts))

    def weigh(self, goal: Goal) -> Floats:
        """Return the objective's values."""
        return np.asarray(goal.weigh(self.latency, self.power, self.energy, self.idle))


def weigh(analysis: Analysis, goal: Goal, excluded: Collection[str], wants: tuple[float, float], seed: int) -> Worth:
    """Score every point that is neither measured nor excluded.

    `wants` scales front and pick against each other: each gain counts 1 where it equals its value in `wants`.
    `analysis` must have a model.
    """
    model = analysis.model
    assert model is not None  # the caller asks only after a fit
    rng = np.random.default_rng(seed)
    keys = [point.key for point in analysis.grid.points]
    done = np.array([row for row, key in enumerate(keys) if key in analysis.measured], dtype=np.int64)
    left = np.array([r for r, k in enumerate(keys) if k not in analysis.measured and k not in excluded], dtype=np.int64)
    # The fit knows more of a measured point than its own visit does: its neighbours.
    idle = analysis.idle if goal.period_s is not None else None
    wall = next(iter(pick.find_walls(analysis).values()), None) if goal.wall else None
    expected = _Values.of(wall, model.latency.mean, *(each.mean if each else None for each in (model.power, idle)))
    known = _Values(expected.latency[done], expected.power[done], expected.idle[done])
    if not left.size:
        return Worth((), 1.0, 0.0, 0.0)
    # The ratio of the 95th percentile to the median at a typical measured point.
    tails = [p.latency_p95_s / p.latency.value for p in analysis.measured.values() if p.latency_p95_s]
    p95 = float(np.median(tails)) if tails else 1.0
    rows = _find_contenders(analysis, goal, known, left, p95, wall)
    latency = model.latency.draw(rows, _DRAWS, rng)
    drawn = _Values.of(wall, latency, *(each.draw(rows, _DRAWS, rng) if each else None for each in (model.power, idle)))
    front, share, doubt = _weigh_front(drawn, known, pick.reference_point(expected.latency, expected.energy))
    keeps = np.array([pick.keeps_metrics(analysis.measured[keys[row]], goal) for row in done])
    picks, gain = _weigh_pick(goal, drawn, known, keeps, p95)
    scores = front / wants[0] + picks / wants[1]
    return Worth(tuple(int(rows[i]) for i in np.argsort(-scores, kind="stable")), share, gain, doubt)


def _meets(goal: Goal, values: _Values, p95: float, margin: float) -> Flags:
    meets = np.ones(values.latency.shape, dtype=bool)
    if goal.latest_s is not None:
        meets &= values.latency * (p95 if goal.deadline_on_p95 else 1.0) * margin <= goal.latest_s
    if goal.max_power_w is not None:
        meets &= values.power * margin <= goal.max_power_w
    return meets


def _find_contenders(
    analysis: Analysis, goal: Goal, known: _Values, left: Indices, p95: float, wall: pick.Wall | None
) -> Indices:
    """Return the rows with the best optimistic values; half of them for the front, half for the pick."""
    model = analysis.model
    assert model is not None
    if left.size <= _CONTENDERS:
        return left
    idle = analysis.idle if goal.period_s is not None else None
    lows = [each.mean[left] - _HOPE * each.sd[left] if each else None for each in (model.power, idle)]
    hoped = _Values.of(wall, model.latency.mean[left] - _HOPE * model.latency.sd[left], *lows)
    reference = pick.reference_point(
        np.concatenate([known.latency, hoped.latency]), np.concatenate([known.energy, hoped.energy])
    )
    worth = pick.improvements(hoped.latency, hoped.energy, known.latency, known.energy, reference)
    objective = hoped.weigh(goal)
    objective = np.where(
        _meets(goal, hoped, p95, 1.0), objective, objective.max() + hoped.latency / hoped.latency.max()
    )
    half = _CONTENDERS // 2
    chosen = set(np.argsort(-worth, kind="stable")[:half]) | set(np.argsort(objective, kind="stable")[:half])
    return np.asarray(left[sorted(int(row) for row in chosen)])


def _weigh_front(drawn: _Values, known: _Values, reference: tuple[float, float]) -> tuple[Floats, float, float]:
    """Return each point's expected gain in hypervolume, the measured points' share, and the whole's relative sd."""
    now = pick.hypervolume(known.latency, known.energy, reference)
    gains, shares, wholes = np.zeros(drawn.latency.shape[1]), [], []
    for latency, energy in zip(drawn.latency, drawn.energy, strict=True):
        whole = pick.hypervolume(
            np.concatenate([known.latency, latency]), np.concatenate([known.energy, energy]), reference
        )
        gains += pick.improvements(latency, energy, known.latency, known.energy, reference) / max(whole, 1e-300)
        shares.append(now / whole if whole else 1.0)
        wholes.append(whole)
    doubt = float(np.std(wholes) / max(float(np.mean(wholes)), 1e-300))
    return gains / len(shares), float(np.mean(shares)), doubt


def _weigh_pick(goal: Goal, drawn: _Values, known: _Values, keeps: Flags, p95: float) -> tuple[Floats, float]:
    """Return the pick's expected gain by each point, and by the best one. `keeps`: other metrics keep their limits."""
    margin = 1 + _MARGIN
    fits = keeps & _meets(goal, known, p95, margin)
    may = _meets(goal, drawn, p95, margin)
    objective = drawn.weigh(goal)
    if fits.any():
        best = float(known.weigh(goal)[fits].min())
        better = np.where(may, np.maximum(0.0, best - objective) / best, 0.0)
        return better.mean(axis=0), float(better.max(axis=1).mean())
    if may.any():
        # A point that meets the limits beats all that do not.
        return may.mean(axis=0), 1.0
    # None does: what is left is to know how close one gets.
    short = drawn.latency if goal.latest_s is not None else drawn.power
    best = float((known.latency if goal.latest_s is not None else known.power).min())
    closer = np.maximum(0.0, best - short) / best
    return closer.mean(axis=0), float(closer.max(axis=1).mean())
