"""The point to ship: the best measured one that keeps deadline and power limit, with its confidence; and fronts of
latency and energy: dominance, its confidence, and the hypervolume of a front.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from farm.errors import UsageError
from farm.points.values import Estimate, Goal, Objective, PointPrediction
from farm.sweep.fit.analysis import Analysis, Combined, MeasuredPoint
from farm.sweep.fit.terms import Floats

# Draws behind a confidence; its own error is then below 2 %.
_DRAWS = 1000
_SEED = 0
MAX_RUNNERS_UP = 3
CLOSE = 0.03
# Draws behind a confidence, whose own error is then below 3 %; a fixed seed, so that equal data give equal answers.
_FRONT_DRAWS = 400
# Contenders below this confidence are dropped.
_LEAST = 0.05


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


def pick_point(analysis: Analysis, goal: Goal, idle: Estimate | None = None) -> Pick:
    """Choose among the points measured; predictions are never chosen. Raises UsageError without what the goal needs.

    `idle` stands for the idle power at every point, as where clocks are released between inferences.
    """
    points = list(analysis.measured.values())
    if not points:
        raise UsageError("nothing is measured yet, so nothing can be picked", hint="resume the sweep")
    require_power(analysis.has_power, goal, analysis.has_idle)
    # One estimate decides everything, and is the one shown: otherwise a pick may seem to be faster than the fastest.
    combined = analysis.combine()
    if idle is not None:
        combined = {key: dataclasses.replace(figures, idle=idle) for key, figures in combined.items()}
    fastest = min(points, key=lambda point: combined[point.key].latency.value)
    fits = [point for point in points if keeps_limits(point, combined[point.key], goal)]
    if goal.period_s is not None:
        fits = [point for point in fits if combined[point.key].idle]
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


def require_power(has_power: bool, goal: Goal, has_idle: bool = True, why: str = "") -> None:
    """Refuse a goal that a board without a power sensor, or visits without idle power, cannot serve: UsageError."""
    if goal.needs_power and not has_power:
        asked = f"--objective {goal.objective}" if goal.objective != "latency" else "--max-power"
        asked = "--period" if goal.period_s is not None else asked
        raise UsageError(
            f"{asked} needs power, and this board has no sensor for its total{f' ({why})' if why else ''}",
            hint="use --objective latency",
        )
    if goal.objective is Objective.PERIOD and not has_idle:
        raise UsageError(
            "--period needs the idle power at each point, which these visits do not have", hint="Begin a new sweep."
        )


def find_mean_power(figures: Combined | PointPrediction, idle: Estimate | None, period_s: float) -> Estimate | None:
    """Return the mean power of a period: an inference, then `idle` power; None without power or idle power."""
    latency, power, energy = figures.latency, figures.power, figures.energy
    if power is None or energy is None or idle is None:
        return None
    mean_w = float(Objective.PERIOD.of(latency.value, power.value, energy.value, idle.value, period_s))
    # Energy is latency times power: where an inference takes longer, less of the period is idle.
    parts_j = (
        (energy.value - idle.value * latency.value) * latency.log_sd,
        energy.value * power.log_sd,
        idle.value * (period_s - latency.value) * idle.log_sd,
    )
    return Estimate.of_log(float(np.log(mean_w)), float(np.linalg.norm(parts_j)) / period_s / mean_w)


def keeps_limits(point: MeasuredPoint, figures: Combined, goal: Goal) -> bool:
    """Whether the upper ends of its intervals keep deadline and power limit."""
    if goal.latest_s is not None:
        latest = figures.latency.high
        if goal.deadline_on_p95:
            latest *= (point.latency_p95_s or point.latency.value) / point.latency.value
        if latest > goal.latest_s:
            return False
    return goal.max_power_w is None or (figures.power is not None and figures.power.high <= goal.max_power_w)


def _choose(point: MeasuredPoint, combined: Combined, fastest: Combined, goal: Goal) -> PickedPoint:
    latency, power, energy = combined.latency, combined.power, combined.energy
    objective: Estimate
    if goal.objective is Objective.LATENCY or power is None or energy is None:
        objective = latency
    elif goal.period_s is not None:
        objective = find_mean_power(combined, combined.idle, goal.period_s) or power  # `require_power` saw to both
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
    if goal.latest_s is not None:
        what = "p95 " if goal.deadline_on_p95 else ""
        limits.append(f"a {what}latency of at most {goal.latest_s * 1e3:.4g} ms")
        key = min(combined, key=lambda key: combined[key].latency.value)
        nearest.append(f"the fastest takes {combined[key].latency.value * 1e3:.4g} ms ({key})")
        if goal.period_s is not None and (over_s := combined[key].latency.high - goal.period_s) > 0:
            nearest.append(f"the period is {over_s * 1e3:.3g} ms too short for its interval")
    if goal.max_power_w is not None:
        limits.append(f"at most {goal.max_power_w:.4g} W")
        watts = {key: point.power.value for key, point in combined.items() if point.power}
        if watts:
            key = min(watts, key=watts.__getitem__)
            nearest.append(f"the most frugal draws {watts[key]:.4g} W ({key})")
    return f"no point measured keeps {' and '.join(limits)} with its whole interval; {', '.join(nearest)}"


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
    noise = np.random.default_rng(_SEED).standard_normal((2, _FRONT_DRAWS, len(candidates)))
    times = latency * np.exp(noise[0] * np.array([candidate.latency.log_sd for candidate in candidates]))
    costs = cost * np.exp(noise[1] * np.array([candidate.cost.log_sd for candidate in candidates]))
    counts = np.zeros(len(candidates))
    for draw in range(_FRONT_DRAWS):
        counts[front_rows(times[draw], costs[draw])] += 1
    chosen = set(front_rows(latency, cost))
    rows = [row for row in range(len(candidates)) if row in chosen or counts[row] >= _LEAST * _FRONT_DRAWS]
    return tuple(
        FrontPoint(candidates[row].key, row in chosen, float(counts[row] / _FRONT_DRAWS))
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
