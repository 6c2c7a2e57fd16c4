"""The point to ship: the best measured one that keeps deadline and power limit, with its confidence; and fronts of
latency and energy: dominance, and the hypervolume of a front.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from farm.errors import UsageError
from farm.points.values import Z95, Estimate, Goal, Objective
from farm.sweep.fit.analysis import Analysis, Combined, MeasuredPoint
from farm.sweep.fit.terms import Floats

# Draws behind a confidence; its own error is then below 2 %.
_DRAWS = 1000
_SEED = 0
MAX_RUNNERS_UP = 3
CLOSE = 0.03
# The rail of an external meter (`device_agent/power/meter.py`), and the fewest visits that tell it from the rails.
METER, _LEAST_VISITS = "meter", 4


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
    wall = next(iter(find_walls(analysis).values()), None) if goal.wall else None
    if goal.wall and wall is None:
        why = f"--objective {goal.aim} needs an external meter beside the rails (`meter:` in the fleet file), and "
        return Pick(None, (), 0.0, 0.0, f"{why}{_LEAST_VISITS} visits or more with it")
    # One estimate decides everything, and is the one shown: otherwise a pick may seem to be faster than the fastest.
    combined = analysis.combine()
    if idle is not None:
        combined = {key: dataclasses.replace(figures, idle=idle) for key, figures in combined.items()}
    if wall is not None:
        combined = {key: wall.convert(figures) for key, figures in combined.items()}
    fastest = min(points, key=lambda point: combined[point.key].latency.value)
    choices = [
        _choose(point, combined[point.key], objective, combined[fastest.key])
        for point in points
        if keeps_limits(point, combined[point.key], goal)
        and (objective := estimate_objective(combined[point.key], goal)) is not None
    ]
    if not choices:
        return Pick(None, (), 0.0, 0.0, _explain(combined, goal, points))
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


@dataclasses.dataclass(frozen=True)
class Wall:
    """Power at an external meter: `slope` times the rails' total, and `offset` W; with their covariance."""

    slope: float
    offset: float
    covariance: Floats
    visits: int

    def convert(self, figures: Any) -> Any:
        """Return the figures, `Combined` or a prediction, with power, energy and idle power at the meter."""
        latency, power, energy, idle = figures.latency, figures.power, figures.energy, figures.idle
        if power is None or energy is None:
            return figures
        there = self._convert(power)
        joule = Estimate.of_log(energy.log + there.log - power.log, float(np.hypot(latency.log_sd, there.log_sd)))
        return dataclasses.replace(figures, power=there, energy=joule, idle=self._convert(idle) if idle else None)

    def _convert(self, power: Estimate) -> Estimate:
        at, own_w = np.array([power.value, 1.0]), self.slope * power.value * power.log_sd
        value = max(self.slope * power.value + self.offset, 1e-3)
        return Estimate.of_log(float(np.log(value)), float(np.sqrt(at @ self.covariance @ at + own_w**2)) / value)

    def to_dict(self) -> dict[str, float]:
        """Return both numbers, with half of their 95 % intervals."""
        halves = Z95 * np.sqrt(np.diag(self.covariance))
        return {
            "slope": self.slope,
            "slope_half": float(halves[0]),
            "offset_w": self.offset,
            "offset_half_w": float(halves[1]),
            "visits": self.visits,
        }


def find_walls(analysis: Analysis) -> dict[str, Wall]:
    """Fit each board's meter to its rails by least squares, where enough visits have both."""
    both: dict[str, list[tuple[float, float]]] = {}
    for visit in (visit for point in analysis.measured.values() for visit in point.visits):
        if visit.power and METER in visit.rail_power_w:
            both.setdefault(visit.board, []).append((visit.power.value, visit.rail_power_w[METER]))
    walls = {}
    for board, pairs in both.items():
        total, metered = np.transpose(pairs)
        if len(pairs) < _LEAST_VISITS or not np.ptp(total) or np.allclose(total, metered):  # it is the total itself
            continue
        columns = np.stack([total, np.ones_like(total)], axis=1)
        (slope, offset), rest, *_ = np.linalg.lstsq(columns, metered, rcond=None)
        covariance = float(rest[0]) / (total.size - 2) * np.linalg.inv(columns.T @ columns)
        walls[board] = Wall(float(slope), float(offset), covariance, total.size)
    return walls


def estimate_objective(figures: Any, goal: Goal) -> Estimate | None:
    """Return the goal's objective of a point's figures, with the errors of latency, power and idle power in it.

    `figures` are `Combined` or a prediction; None without what the objective needs.
    """
    latency, power, energy, idle = figures.latency, figures.power, figures.energy, figures.idle
    if goal.objective in (Objective.LATENCY, Objective.ENERGY) or power is None or energy is None:
        found: Estimate | None = latency if goal.objective is Objective.LATENCY else energy
        return found
    if goal.period_s is not None and idle is None:
        return None
    idle = idle or power

    def weigh(longer: float = 0.0, higher: float = 0.0, idler: float = 0.0) -> float:
        # Energy is latency times power.
        logs = (latency.log + longer, power.log + higher, energy.log + longer + higher, idle.log + idler)
        return float(np.log(goal.weigh(*np.exp(logs))))

    middle = weigh()
    # One sensor and one drift: the errors of power and idle power add.
    moved = (weigh(longer=latency.log_sd), weigh(higher=power.log_sd, idler=idle.log_sd))
    return Estimate.of_log(middle, float(np.linalg.norm(np.array(moved) - middle)))


def keeps_metrics(point: MeasuredPoint, goal: Goal) -> bool:
    """Whether a program's other metrics keep their limits."""
    return all(limit.keeps(point.metrics.get(limit.metric)) for limit in goal.limits)


def keeps_limits(point: MeasuredPoint, figures: Combined, goal: Goal) -> bool:
    """Whether the upper ends of its intervals keep deadline and power limit, and other metrics theirs."""
    if not keeps_metrics(point, goal):
        return False
    if goal.latest_s is not None:
        latest = figures.latency.high
        if goal.deadline_on_p95:
            latest *= (point.latency_p95_s or point.latency.value) / point.latency.value
        if latest > goal.latest_s:
            return False
    return goal.max_power_w is None or (figures.power is not None and figures.power.high <= goal.max_power_w)


def _choose(point: MeasuredPoint, combined: Combined, objective: Estimate, fastest: Combined) -> PickedPoint:
    energy = combined.energy
    saves = 1 - energy.value / fastest.energy.value if energy and fastest.energy else None
    return PickedPoint(point, combined, objective, combined.latency.value / fastest.latency.value - 1, saves)


def _explain(combined: Mapping[str, Combined], goal: Goal, points: Sequence[MeasuredPoint] = ()) -> str:
    """Name the limits that no point keeps, and the nearest point to each."""
    limits, nearest = [], []
    if goal.latest_s is not None:
        what = "p95 " if goal.deadline_on_p95 else ""
        shown = goal.metric
        limits.append(f"a {what}{shown.name} of {shown.at_most} {shown.format(goal.latest_s)}")
        key = min(combined, key=lambda key: combined[key].latency.value)
        nearest.append(f"the fastest takes {shown.format(combined[key].latency.value)} ({key})")
        if goal.period_s is not None and (over_s := combined[key].latency.high - goal.period_s) > 0:
            nearest.append(f"the period is {over_s * 1e3:.3g} ms too short for its interval")
    if goal.max_power_w is not None:
        limits.append(f"at most {goal.max_power_w:.4g} W")
        watts = {key: point.power.value for key, point in combined.items() if point.power}
        if watts:
            key = min(watts, key=watts.__getitem__)
            nearest.append(f"the most frugal draws {watts[key]:.4g} W ({key})")
    for limit in goal.limits:
        limits.append(f"a {limit}")
        known = {point.key: value for point in points if (value := point.metrics.get(limit.metric))}
        if known:
            key = (max if limit.at_least else min)(known, key=known.__getitem__)
            nearest.append(f"the nearest {limit.metric} is {known[key]:.4g} {limit.unit} ({key})")
    return f"no point measured keeps {' and '.join(limits)} with its whole interval; {', '.join(nearest)}"


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
