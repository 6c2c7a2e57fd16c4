"""Messages about conditions and power: evidence, sensors, windows over them, energy per call."""

from __future__ import annotations

import dataclasses

from device_agent.protocol.messages import Message, ProtocolError, require_positive


@dataclasses.dataclass(frozen=True)
class Evidence(Message):
    """Conditions at one moment. An unreadable value is missing or null, never zero."""

    cpu_freq_hz: dict[str, int] = dataclasses.field(default_factory=dict)  # core number -> Hz
    cpu_max_hz: dict[str, int] = dataclasses.field(default_factory=dict)  # core number -> upper limit in force, Hz
    gpu_freq_hz: int | None = None
    memory_freq_hz: int | None = None
    temperature_c: dict[str, float] = dataclasses.field(default_factory=dict)  # thermal zone -> degrees Celsius
    cooling: dict[str, int] = dataclasses.field(default_factory=dict)  # cooling device that slows clocks -> its state
    alarms: dict[str, int] = dataclasses.field(default_factory=dict)  # over-current alarm -> how often, or 0 and 1
    load_1min: float | None = None
    busy_s: float | None = None  # CPU time used since boot, over all cores and processes
    gpu_load: float | None = None  # share of the time that the GPU was busy of late, by its driver


@dataclasses.dataclass(frozen=True)
class SensorInfo(Message):
    """One power sensor as measured at the agent's start. Null: too few changes."""

    rail: str
    driver: str  # ina3221-iio, ina3221-hwmon, rapl
    update_period_s: float | None = None
    step_w: float | None = None
    note: str = ""  # e.g. that its name was taken from its place, since it may not be read


@dataclasses.dataclass(frozen=True)
class EnergySpec(Message):
    """How to measure energy: repeat the kernel until the slowest sensor has `min_updates` values.

    `limit_s` bounds the repetition; `idle_s` is the length of the idle baseline before it at the same clocks (0: none).
    """

    min_updates: int = 10
    limit_s: float = 10.0
    idle_s: float = 2.0

    def __post_init__(self) -> None:
        require_positive(self, "min_updates", "limit_s")
        if self.idle_s < 0:
            raise ProtocolError("EnergySpec.idle_s must be >= 0")


@dataclasses.dataclass(frozen=True)
class RailPower(Message):
    """Power of one rail, or of the total, over one window. Intervals are 95 %.

    `reads` counts values, `updates` new ones, `gaps` missed updates, `bad_reads` errors and impossible values.
    `energy_j` is the time integral of power (trapezoid) over the window.
    """

    rail: str
    power_w: float
    power_ci_w: tuple[float, float]
    energy_j: float
    energy_ci_j: tuple[float, float]
    reads: int
    updates: int
    gaps: int = 0
    bad_reads: int = 0


@dataclasses.dataclass(frozen=True)
class PowerWindow(Message):
    """Power over a window of the board's own clock. `total` is null if no rail is, or sums to, the board's total.

    `enough`: every rail of the total (without one: every rail) gave the requested number of independent updates; `note`
    says why not. `calls` counts the kernel's calls in the window, 0 for plain sampling.
    """

    started_s: float  # the board's monotonic clock
    window_s: float
    rails: tuple[RailPower, ...]
    total: RailPower | None
    total_scope: str = ""  # what the total covers: board, module; with a sum, of what
    calls: int = 0
    enough: bool = True
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Energy(Message):
    """Energy of one kernel call or inference, from `busy`'s total and the idle baseline at the same clocks.

    `above_idle_j` excludes idle power. Intervals are 95 %. Null without a total or a baseline.
    """

    busy: PowerWindow
    idle: PowerWindow | None = None
    per_call_j: float | None = None
    per_call_ci_j: tuple[float, float] | None = None
    above_idle_j: float | None = None
    above_idle_ci_j: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class PowerSpec(Message):
    """A request to sample power for `seconds`, at up to `rate_hz` reads a second."""

    seconds: float = 1.0
    rate_hz: float = 100.0

    def __post_init__(self) -> None:
        require_positive(self, "seconds", "rate_hz")
        if self.seconds > 3600 or self.rate_hz > 10_000:
            raise ProtocolError("PowerSpec: at most 3600 seconds and 10000 reads a second")


@dataclasses.dataclass(frozen=True)
class PowerTrace(Message):
    """Answer of `device_agent.power`. `samples` maps a rail to [seconds since the window's start, W], new values only.

    `window` is null without a sensor.
    """

    window: PowerWindow | None
    samples: dict[str, tuple[tuple[float, float], ...]] = dataclasses.field(default_factory=dict)
    before: Evidence | None = None
    after: Evidence | None = None
    board: str = ""
    simulated: bool = False
