"""The point to ship: the best measured one that keeps deadline and power limit, with its confidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from farm.errors import UsageError
from farm.points.values import Estimate, Goal, Objective
from farm.sweep.fit.analysis import Analysis, Combined, MeasuredPoint

# Draws behind a confidence; its own error is then below 2 %.
_DRAWS = 1000
_SEED = 0
MAX_RUNNERS_UP = 3


@dataclasses.dataclass(frozen=True)
class PickedPoint:
    """A measured point that keeps the goal's limits with its whole interval.

    `figures` are its visits joined with the fit, which decide, and `objective` is the goal's from these, in its SI
    unit. Compared with the fastest point measured, `slower` is how much longer an inference takes, `saves` how much
    less energy it needs; both are relative, `saves` is None without energy.
    """

    point: MeasuredPoint
    figures: Combined
    objective: Estimate
    slower: float
    saves: float | None


@dataclasses.dataclass(frozen=True)
class Pick:
    """The point to ship, or why there is none.

    `confidence` is the probability that `best` has the least objective of all points measured that keep the limits, and
    `close` the probability that none is better by more than 3 %. `best` is None where no point keeps the limits;
    `reason` then names the nearest to each.
    """

    best: PickedPoint | None
    runners_up: tuple[PickedPoint, ...]
    confidence: float
    close: float
    reason: str


CLOSE = 0.03


def pick_point(analysis: Analysis, goal: Goal) -> Pick:
    """Choose among the points measured; predictions are never chosen. Raises UsageError without what the goal needs."""
    points = list(analysis.measured.values())
    if not points:
        raise UsageError("nothing is measured yet, so nothing can be picked", hint="resume the sweep")
    require_power(analysis.has_power, goal)
    # One estimate decides everything, and is the one shown: otherwise a pick may seem to be faster than the fastest.
    combined = analysis.combine()
    fastest = min(points, key=lambda point: combined[point.key].latency.value)
    fits = [point for point in points if keeps_limits(point, combined[point.key], goal)]
    if not fits:
        return Pick(None, (), 0.0, 0.0, _explain(combined, goal))
    choices = (_choose(point, combined[point.key], combined[fastest.key], goal) for point in fits)
    ordered = sorted(choices, key=lambda choice: choice.objective.value)
    values = np.array([choice.objective.log for choice in ordered])
    sds = np.array([choice.objective.log_sd for choice in ordered])
    drawn = values + sds * np.random.default_rng(_SEED).standard_normal((_DRAWS, len(ordered)))
    lowest = drawn.min(axis=1)
    confidence = float((drawn.argmin(axis=1) == 0).mean())
    close = float((drawn[:, 0] <= lowest + np.log1p(CLOSE)).mean())
    return Pick(ordered[0], tuple(ordered[1 : 1 + MAX_RUNNERS_UP]), confidence, close, "")


def require_power(has_power: bool, goal: Goal) -> None:
    """Refuse a goal that a board without a power sensor cannot serve. Raises UsageError."""
    if goal.needs_power and not has_power:
        asked = f"--objective {goal.objective}" if goal.objective != "latency" else "--max-power"
        raise UsageError(
            f"{asked} needs power, and this board has no sensor for its total", hint="use --objective latency"
        )


def keeps_limits(point: MeasuredPoint, figures: Combined, goal: Goal) -> bool:
    """Whether the upper ends of its intervals keep deadline and power limit."""
    if goal.deadline_s is not None:
        latest = figures.latency.high
        if goal.deadline_on_p95:
            latest *= (point.latency_p95_s or point.latency.value) / point.latency.value
        if latest > goal.deadline_s:
            return False
    return goal.max_power_w is None or (figures.power is not None and figures.power.high <= goal.max_power_w)


def _choose(point: MeasuredPoint, combined: Combined, fastest: Combined, goal: Goal) -> PickedPoint:
    latency, power, energy = combined.latency, combined.power, combined.energy
    objective: Estimate
    if goal.objective is Objective.LATENCY or power is None or energy is None:
        objective = latency
    elif goal.objective is Objective.EDP:
        spread = float(np.hypot(energy.log_sd, latency.log_sd))
        objective = Estimate.of_log(energy.log + latency.log, spread)
    else:
        objective = power if goal.objective is Objective.POWER else energy
    saves = 1 - energy.value / fastest.energy.value if energy and fastest.energy else None
    return PickedPoint(point, combined, objective, latency.value / fastest.latency.value - 1, saves)


def _explain(combined: Mapping[str, Combined], goal: Goal) -> str:
    """Name the limits that no point keeps, and the nearest point to each."""
    limits, nearest = [], []
    if goal.deadline_s is not None:
        what = "p95 " if goal.deadline_on_p95 else ""
        limits.append(f"a {what}latency of at most {goal.deadline_s * 1e3:.4g} ms")
        key = min(combined, key=lambda key: combined[key].latency.value)
        nearest.append(f"the fastest takes {combined[key].latency.value * 1e3:.4g} ms ({key})")
    if goal.max_power_w is not None:
        limits.append(f"at most {goal.max_power_w:.4g} W")
        watts = {key: point.power.value for key, point in combined.items() if point.power}
        if watts:
            key = min(watts, key=watts.__getitem__)
            nearest.append(f"the most frugal draws {watts[key]:.4g} W ({key})")
    return f"no point measured keeps {' and '.join(limits)} with its whole interval; {', '.join(nearest)}"
