"""The types of a sweep: a grid point, its measurement, its prediction, the user's goal.

Measurements and predictions are different types, so that neither can be taken for the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from device_agent.protocol import OperatingPoint, Outcome, StrEnum, format_mhz
from farm import units
from farm.errors import UsageError
from farm.programs.metrics import LATENCY, Limit, ProgramMetric

# Before an objective's name: its watts are those of an external meter.
WALL = "wall-"
# Half the width of a 95 % interval of a normal distribution, in standard deviations.
Z95 = 1.959964


def format_threads(threads: int) -> str:
    """Format a count: `1 thread`, `4 threads`."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


def format_conditions(threads: int, clocks: str, point: str) -> str:
    """Format threads and clocks; without readable clocks, the requested `point`."""
    return f"{format_threads(threads)}, {clocks or f'clocks: {point}'}"


def format_clocks(outcome: Outcome, clusters: Mapping[str, Collection[int]], *, on_gpu: bool = False) -> str:
    """Format the clocks of the clusters (names and cores) in a run; "" where the board does not report any.

    A pinned clock is shown as requested, because readings jitter. One that follows the load, and is low again after the
    run, is shown by its limit: `a57 up to 1479MHz`.
    """
    seen = outcome.after or outcome.before
    if seen is None:
        return ""
    held = outcome.point or OperatingPoint()
    limits = {int(core): hz for core, hz in (seen.cpu_max_hz or seen.cpu_freq_hz).items()}
    # A machine without a description of its cores has one cluster.
    words = []
    for name, cores in (clusters or {"cpu": tuple(limits)}).items():
        if name in held.cpu_freq_hz:
            words.append(f"{name}={format_mhz(held.cpu_freq_hz[name])}MHz")
        elif known := [limits[core] for core in cores if core in limits]:
            words.append(f"{name} up to {format_mhz(max(known))}MHz")
    if on_gpu and held.gpu_freq_hz:
        words.append(f"gpu={format_mhz(held.gpu_freq_hz)}MHz")
    return ", ".join(words)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A positive quantity with its 95 % interval, in SI units. Raises ValueError unless 0 <= low <= value <= high."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (0 <= self.low <= self.value <= self.high < math.inf and self.value > 0):
            raise ValueError(f"not an estimate of a positive quantity: {self.value} in [{self.low}, {self.high}]")

    @classmethod
    def of_log(cls, mean: float, sd: float) -> Estimate:
        """Make it from the mean and the standard deviation of the logarithm."""
        return cls(math.exp(mean), math.exp(mean - Z95 * sd), math.exp(mean + Z95 * sd))

    @property
    def log(self) -> float:
        return math.log(self.value)

    @property
    def log_sd(self) -> float:
        """The standard deviation of the logarithm: half of the interval, relative to the value, over 1.96."""
        return (self.high - self.low) / (2 * Z95 * self.value)

    def contains(self, value: float) -> bool:
        """Whether `value` lies in the interval."""
        return self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class DomainSetting:
    """One clock of the board at a grid point. `units` counts what it drives: cores online, 1 for GPU and memory.

    `freq_hz` is the pinned clock; with `held` false, the clock under load as far as known (a power mode's cap, the
    memory's floor), else None.
    """

    name: str
    freq_hz: int | None
    units: int = 1
    held: bool = True


@dataclasses.dataclass(frozen=True)
class GridPoint:
    """One operating point of a grid. `point` is the request, `key` its text, unique within the grid.

    `domains` has one entry per clock of the board, in the same order at every point. `variant` names what clocks do not
    show (a power mode that gates parts of the GPU); "" where there is nothing.
    """

    key: str
    point: OperatingPoint
    domains: tuple[DomainSetting, ...]
    variant: str = ""


@dataclasses.dataclass(frozen=True)
class Merge:
    """Operating points left out of the grid, because on the board they equal `kept`."""

    kept: str
    dropped: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class Grid:
    """All points of a sweep in a fixed order, and the merged ones."""

    points: tuple[GridPoint, ...]
    merged: tuple[Merge, ...] = ()

    def __len__(self) -> int:
        return len(self.points)

    def find(self, key: str) -> GridPoint | None:
        return next((point for point in self.points if point.key == key), None)


@dataclasses.dataclass(frozen=True)
class PointMeasurement:
    """One visit to a grid point. `at_s` is seconds since the sweep began; a simulated board counts those it measured.

    Power and energy are null without a sensor: `power` the total in W, `energy` J per inference, `energy_above_idle`
    the same without `idle_power` (W, the total at these clocks), `rail_power_w` W by rail. `invalid` says why the visit
    does not count (throttled, clocks moved by another client), "" where it does; `retry` whether another may help.
    Repeated visits of one point are separate entries. Of a program, `latency` is the objective's metric in s, an
    inference what that counts, and `metrics` the medians of all its metrics, in their own units.
    """

    key: str
    latency: Estimate
    at_s: float
    latency_p95_s: float | None = None
    power: Estimate | None = None
    energy: Estimate | None = None
    energy_above_idle: Estimate | None = None
    rail_power_w: Mapping[str, float] = dataclasses.field(default_factory=dict)
    temperature_c: float | None = None
    throttled: bool = False
    invalid: str = ""
    retry: bool = False
    board: str = ""
    simulated: bool = False
    idle_power: Estimate | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    predicted: ClassVar[bool] = False

    @property
    def is_valid(self) -> bool:
        """Whether it speaks of its point. A throttled visit never does."""
        return not self.invalid and not self.throttled


@dataclasses.dataclass(frozen=True)
class PointPrediction:
    """The fit's expectation for a point without a measurement. Always to be shown as a prediction."""

    key: str
    latency: Estimate
    power: Estimate | None = None
    energy: Estimate | None = None
    idle: Estimate | None = None
    predicted: ClassVar[bool] = True


class Objective(StrEnum):
    """What the pick minimises."""

    ENERGY = "energy"  # J per inference
    LATENCY = "latency"  # s per inference
    POWER = "power"  # W while it runs
    EDP = "edp"  # energy times latency, J s
    PERIOD = "period"  # mean W of a period: one inference, then idle

    def of(self, latency_s: Any, power_w: Any, energy_j: Any, idle_w: Any = None, period_s: Any = None) -> Any:
        """Return the objective's value; numbers, or arrays of them. What it does not need may be anything.

        At one operating point energy above idle decides a period: without `idle_w` that is the `energy_j`.
        """
        match self:
            case Objective.PERIOD:
                return energy_j if idle_w is None else (energy_j + idle_w * (period_s - latency_s)) / period_s
            case Objective.ENERGY:
                return energy_j
            case Objective.POWER:
                return power_w
            case Objective.EDP:
                return energy_j * latency_s
        return latency_s


@dataclasses.dataclass(frozen=True)
class Goal:
    """The user's goal: the least `objective`, within a deadline and a limit of power where given.

    The deadline is for the median latency, or with `deadline_on_p95` for the 95th percentile. With the objective
    `period`, and only then, an inference begins every `period_s`, and has to end before the next. With `wall`, watts
    are those of an external meter. Of a program, `metric` is the latency, and `limits` are those on other metrics.
    Raises UsageError for limits that contradict each other.
    """

    objective: Objective = Objective.ENERGY
    deadline_s: float | None = None
    max_power_w: float | None = None
    deadline_on_p95: bool = False
    period_s: float | None = None
    wall: bool = False
    metric: ProgramMetric = LATENCY
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        if (self.period_s is None) == (self.objective is Objective.PERIOD):
            raise UsageError(
                f"a period is an objective of its own, and needs its length; the objective is {self.objective}",
                "Say --period 33ms, or --period 30fps.",
            )
        if self.period_s is not None and (self.deadline_s or 0.0) > self.period_s:
            late, every = (units.format_latency(each or 0.0) for each in (self.deadline_s, self.period_s))
            raise UsageError(
                f"a deadline of {late} is longer than the period of {every}: the next inference would have to wait",
                "Drop the deadline (--deadline none): an inference has to end within its period anyway.",
            )

    @property
    def aim(self) -> str:
        """The objective as it is named: `energy`, `wall-energy`."""
        return WALL * self.wall + self.objective

    def settle(
        self, named: str, deadline_s: float | None, max_power_w: float | None, period_s: float | None, asked: bool
    ) -> Goal:
        """Return the goal after this one, with these limits; an objective may be `named` and a period `asked` for.

        A period means the objective period; another objective drops a period from before. Raises UsageError.
        """
        word = named.removeprefix(WALL)
        if named and word not in list(Objective):
            known = ", ".join(Objective)
            raise UsageError(f"--objective {named[:40]!r} is unknown", f"Known: {known}; at a meter {WALL}energy, ….")
        objective = Objective(word) if named else Objective.PERIOD if period_s is not None else self.objective
        if objective is not Objective.PERIOD and not asked:
            period_s = None
        if objective is Objective.PERIOD and not named and period_s is None:
            objective = Objective.ENERGY
        wall = named.startswith(WALL) if named else self.wall
        asked_for = (objective, deadline_s, max_power_w, self.deadline_on_p95, period_s, wall)
        return Goal(*asked_for, self.metric, self.limits)

    @property
    def latest_s(self) -> float | None:
        """The longest latency: the deadline, or the period."""
        return self.period_s if self.deadline_s is None else self.deadline_s

    def of_batch(self, batch: int) -> Goal:
        """Return the goal for this many inputs at once: that many periods pass between two such inferences."""
        return self if self.period_s is None else dataclasses.replace(self, period_s=batch * self.period_s)

    def weigh(self, latency_s: Any, power_w: Any, energy_j: Any, idle_w: Any) -> Any:
        """Return the objective's value, as `Objective.of`."""
        return self.objective.of(latency_s, power_w, energy_j, idle_w, self.period_s)

    @property
    def needs_power(self) -> bool:
        """Whether it needs a power sensor."""
        return self.objective is not Objective.LATENCY or self.max_power_w is not None
