"""What a board answers: how a trial ended and whose fault that is; its clocks and the point held; power and energy."""

from __future__ import annotations

import dataclasses
from typing import Any

from device_agent.protocol.messages import Message, ProtocolError, StrEnum, require_positive


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


EVERY_CLUSTER = "*"


@dataclasses.dataclass(frozen=True)
class OperatingPoint(Message):
    """Clocks to hold a board at. Null or empty values leave a clock as it is.

    `cpu_freq_hz` maps a cluster's name, or `EVERY_CLUSTER`, to Hz. `cores_online` lists all CPUs to be online. A power
    mode is applied first; one that needs a reboot is refused unless `allow_reboot`.
    """

    power_mode: str | None = None
    cores_online: tuple[int, ...] | None = None
    cpu_freq_hz: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpu_freq_hz: int | None = None
    memory_freq_hz: int | None = None
    allow_reboot: bool = False

    def __post_init__(self) -> None:
        for name, value in {**self.cpu_freq_hz, "gpu": self.gpu_freq_hz, "memory": self.memory_freq_hz}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
                raise ProtocolError(f"OperatingPoint: frequency of {name} must be a whole number of Hz, not {value!r}")
        if self.cores_online is not None and (not self.cores_online or min(self.cores_online) < 0):
            raise ProtocolError("OperatingPoint.cores_online must name at least one CPU")

    @property
    def is_empty(self) -> bool:
        """Whether the point sets nothing."""
        return self == OperatingPoint(allow_reboot=self.allow_reboot)


@dataclasses.dataclass(frozen=True)
class DomainClocks(Message):
    """One clock: a CPU cluster's, the GPU's or the memory's. Null: unreadable.

    `cpus` and `online` are empty except for CPU clusters. `available_hz` is empty without a table. The memory's
    `governor` is `locked` while its clock is held.
    """

    name: str
    min_hz: int | None = None
    max_hz: int | None = None
    current_hz: int | None = None
    governor: str | None = None
    available_hz: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    online: tuple[int, ...] = ()
    isolated: bool = False


@dataclasses.dataclass(frozen=True)
class Clocks(Message):
    """All clocks of a board, their holder, and whether they can be trusted.

    `unsafe` says why clocks could not be restored, empty if all is well. `notes` list what this board lacks or what
    looks wrong (clocks locked by another process, a table that differs from the board type's).
    """

    clusters: tuple[DomainClocks, ...] = ()
    gpu: DomainClocks | None = None
    memory: DomainClocks | None = None
    power_mode: str | None = None
    power_modes: tuple[str, ...] = ()
    holder: str = ""
    unsafe: str = ""
    notes: tuple[str, ...] = ()


class PinStatus(StrEnum):
    """How a `pin` or `unpin` ended."""

    OK = "ok"
    REFUSED = "refused"  # the board does not have what was asked for; the message names what it has
    BUSY = "busy"  # another client holds the clocks
    UNAVAILABLE = "unavailable"  # no clock helper answers, so nothing can be written
    FAILED = "failed"  # a write did not take; everything was restored
    UNSAFE = "unsafe"  # clocks could not be restored; an operator must look


@dataclasses.dataclass(frozen=True)
class PinReport(Message):
    """The result of a `pin` or `unpin`: the point reached, read back, and all clocks afterwards."""

    status: PinStatus
    message: str = ""
    reached: OperatingPoint | None = None
    clocks: Clocks | None = None
    notes: tuple[str, ...] = ()  # what was rounded, capped or raised, and by what
    took_s: float = 0.0


class FaultSide(StrEnum):
    """Who is to blame for a failed trial. Only `CANDIDATE` faults may reach the cost model."""

    CANDIDATE = "candidate"  # counts as a bad schedule
    BOARD = "board"  # re-run elsewhere; the board's health suffers
    FARM = "farm"  # re-run; neither candidate nor board is blamed
    SAMPLE = "sample"  # measure again


class Status(StrEnum):
    """How a trial ended."""

    OK = "ok"
    BUILD_FAILED = "build_failed"  # the compiler refused the candidate
    BUILD_TIMEOUT = "build_timeout"  # the compiler did not finish within its deadline
    LOAD_FAILED = "load_failed"  # the board could not load the library or lacks its entry function
    CRASHED = "crashed"  # the worker died from a signal; `signal` says which
    RUN_TIMEOUT = "run_timeout"  # the worker did not finish within its deadline
    OUT_OF_MEMORY = "out_of_memory"  # the worker hit its address-space limit
    WRONG_RESULT = "wrong_result"  # the output differs from the reference
    NOISY = "noisy"  # the samples spread too far
    CLOCK_DRIFTED = "clock_drifted"  # clocks after differ from clocks before
    THROTTLED = "throttled"  # the board throttled during the trial
    BOARD_LOST = "board_lost"  # the connection to the board ended before an answer came
    FARM_ERROR = "farm_error"  # the farm itself failed

    @property
    def fault_side(self) -> FaultSide | None:
        """The side to blame, or None for `OK`."""
        return _FAULT_SIDE.get(self)


_FAULT_SIDE = {
    Status.BUILD_FAILED: FaultSide.CANDIDATE,
    Status.BUILD_TIMEOUT: FaultSide.CANDIDATE,
    Status.LOAD_FAILED: FaultSide.CANDIDATE,
    Status.CRASHED: FaultSide.CANDIDATE,
    Status.RUN_TIMEOUT: FaultSide.CANDIDATE,
    Status.OUT_OF_MEMORY: FaultSide.CANDIDATE,
    Status.WRONG_RESULT: FaultSide.CANDIDATE,
    Status.NOISY: FaultSide.SAMPLE,
    Status.CLOCK_DRIFTED: FaultSide.SAMPLE,
    Status.THROTTLED: FaultSide.SAMPLE,
    Status.BOARD_LOST: FaultSide.BOARD,
    Status.FARM_ERROR: FaultSide.FARM,
}


@dataclasses.dataclass(frozen=True)
class Layer(Message):
    """One function of a model in one inference, over all its `calls`."""

    name: str
    calls: int
    latency_s: float


@dataclasses.dataclass(frozen=True)
class RunDetails(Message):
    """Details of a model's run.

    `first_s` is the first inference after loading, which warm-up drops; null for emulated code, which has no first-time
    costs. `peak_memory_bytes` is the worker's peak, interpreter and runtime included; null if it is not the board's
    memory. `layers`, if requested, are in the order of their first run, measured by instrumented runs after the timed
    ones. `others_s` are the median latencies of the instances beside the first one. `output` is the first and the last
    kilobyte that the last run of a `Command` wrote; `windows` are the times on the board's clock in s between which its
    energy counts; a virtual board took `stretch` times as long for it as the machine that ran it, as its output has it.
    """

    first_s: float | None
    peak_memory_bytes: int | None = None
    layers: tuple[Layer, ...] = ()
    others_s: tuple[float, ...] = ()
    output: str = ""
    windows: tuple[tuple[float, float], ...] = ()
    stretch: float = 1.0


@dataclasses.dataclass(frozen=True)
class Outcome(Message):
    """How one `measure` or `run_model` call ended, with its evidence.

    `latency_s` has one entry per sample, in order, without warm-up. `timing_s` is the worker's time for timing, warm-up
    included, which separates the farm's overhead. `power` covers the timing, `energy` the requested measurement; both
    are null without a sensor. `point` is the operating point held, null for none. `details` are a model's.
    """

    status: Status
    message: str = ""
    latency_s: tuple[float, ...] = ()
    calls_per_sample: int = 0
    timing_s: float = 0.0
    signal: str | None = None
    before: Evidence | None = None
    after: Evidence | None = None
    other_load: float | None = None  # cores' worth of CPU time that other processes used meanwhile
    point: OperatingPoint | None = None
    power: PowerWindow | None = None
    energy: Energy | None = None
    board: str = ""
    agent_version: str = ""
    simulated: bool = False
    started_at: float = 0.0  # seconds since the epoch, the board's own clock
    details: RunDetails | None = None
