"""Messages between the coordinator and an agent: statuses, specs, outcomes, the frame for big payloads.

Standard library only; the one module that both sides import. It does no I/O and knows no TVM.

Every `device_agent.*` function takes and returns JSON text. Where arrays or libraries travel too they are `bytes`
arguments beside the JSON, or come back in one frame (see `pack_frame`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import struct
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

# Raised whenever a message changes in a way that an older peer would misread.
PROTOCOL_VERSION = 2

# Names under which the agent registers its functions with TVM's RPC server.
DESCRIBE = "device_agent.describe"
MEASURE = "device_agent.measure"
RUN_MODEL = "device_agent.run_model"
PIN = "device_agent.pin"
UNPIN = "device_agent.unpin"
POWER = "device_agent.power"


M = TypeVar("M", bound="Message")


class ProtocolError(ValueError):
    """A message that does not follow this module: unknown key, missing key, wrong type, impossible value."""


class StrEnum(str, enum.Enum):
    """An enum whose members are their own text (Python 3.10 has no enum.StrEnum)."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


class FaultSide(StrEnum):
    """Who is to blame for a trial that is not ok. Only `CANDIDATE` faults may reach the cost model."""

    CANDIDATE = "candidate"  # counts as a bad schedule
    BOARD = "board"  # re-run elsewhere; the board's health suffers
    FARM = "farm"  # re-run, nobody blamed
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
    NOISY = "noisy"  # samples spread too far to mean anything
    CLOCK_DRIFTED = "clock_drifted"  # clocks after differ from clocks before
    THROTTLED = "throttled"  # the board slowed itself down meanwhile
    BOARD_LOST = "board_lost"  # the connection to the board ended before an answer came
    FARM_ERROR = "farm_error"  # our own machinery failed

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


class Message:
    """JSON in and out for frozen dataclasses; unknown and missing keys are refused."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types only."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls: type[M], text: str) -> M:
        """Read a message. Raises ProtocolError on anything that is not one."""
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ProtocolError(f"{cls.__name__} is not JSON: {error}") from error
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls: type[M], value: Any) -> M:
        """Read a message from plain JSON types. Raises ProtocolError on anything that is not one."""
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{cls.__name__} must be a JSON object, not {type(value).__name__}")
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(set(value) - set(fields)):
            raise ProtocolError(f"{cls.__name__} has unknown keys: {', '.join(map(str, unknown))}")
        hints = _hints(cls)  # type: ignore[arg-type]  # mypy: a generic class is hashable all the same
        arguments = {}
        for name, field in fields.items():
            if name in value:
                arguments[name] = _convert(hints[name], value[name], f"{cls.__name__}.{name}")
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ProtocolError(f"{cls.__name__} lacks {name}")
        return cls(**arguments)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a message's fields; working them out takes longer than reading the message."""
    return get_type_hints(kind)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Turn JSON lists back into tuples and strings back into enums; check the scalar types."""
    origin = getattr(hint, "__origin__", None)
    arguments: tuple[Any, ...] = getattr(hint, "__args__", ())
    if type(None) in arguments:  # Optional
        return None if value is None else _convert(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ProtocolError(f"{where} must be a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_convert(arguments[0], item, where) for item in value)
        if len(arguments) != len(value):
            raise ProtocolError(f"{where} must have {len(arguments)} items")
        return tuple(_convert(a, item, where) for a, item in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{where} must be an object")
        return dict(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError as error:
            raise ProtocolError(f"{where}: {error}") from error
    if isinstance(hint, type) and issubclass(hint, Message):
        return hint.from_dict(value)
    wanted = (int, float) if hint is float else hint
    if hint is not Any and (not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool)):
        raise ProtocolError(f"{where} must be {hint.__name__}, not {type(value).__name__}")
    return float(value) if hint is float else value


@dataclasses.dataclass(frozen=True)
class TensorSpec(Message):
    """One kernel argument: `shape` in elements, `dtype` as NumPy names it."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Limits(Message):
    """What a worker may use. A worker that exceeds one is an outcome, not an accident.

    `memory_bytes` is what the worker may allocate beyond what the agent itself has mapped.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 2 << 30
    threads: int = 0  # 0: one per core of `cluster`
    cluster: str = ""  # whose cores the worker's threads are placed on; "": every core that is not isolated

    def __post_init__(self) -> None:
        _require_positive(self, "timeout_s", "memory_bytes")
        if self.threads < 0:
            raise ProtocolError("Limits.threads must be >= 0")


@dataclasses.dataclass(frozen=True)
class StartConditions(Message):
    """What must hold before timing starts, waited for until `deadline_s`; then the outcome is `noisy` and says which.

    `max_temperature_c` is compared with the hottest zone, `max_load` with the cores' worth of CPU time that other
    processes use.
    """

    max_temperature_c: float | None = None
    max_load: float | None = None
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        _require_positive(self, "deadline_s")


@dataclasses.dataclass(frozen=True)
class EnergySpec(Message):
    """How to measure energy: the kernel is repeated until the slowest sensor has given `min_updates` values.

    `limit_s` bounds the repeating, `idle_s` is the length of the idle baseline taken before it at the same clocks (0:
    none is taken).
    """

    min_updates: int = 10
    limit_s: float = 10.0
    idle_s: float = 2.0

    def __post_init__(self) -> None:
        _require_positive(self, "min_updates", "limit_s")
        if self.idle_s < 0:
            raise ProtocolError("EnergySpec.idle_s must be >= 0")


@dataclasses.dataclass(frozen=True)
class MeasureSpec(Message):
    """How to time one candidate whose library travels beside this message.

    A sample is the mean of `number` calls; there are `repeat` samples. `number` grows until a sample takes
    `min_repeat_s`. Arguments are filled with seeded values, the same on every board. Samples that spread further than
    `max_spread` (interquartile range over median) make the outcome `noisy`. Energy is measured where `energy` asks.
    """

    arguments: tuple[TensorSpec, ...]
    number: int = 1
    repeat: int = 3
    min_repeat_s: float = 0.0
    warmup: int = 1
    flush_cache: bool = False
    seed: int = 0
    entry: str = "main"
    device: str = "cpu"
    limits: Limits = dataclasses.field(default_factory=Limits)
    max_spread: float | None = None
    start: StartConditions | None = None
    energy: EnergySpec | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "number", "repeat")
        if self.min_repeat_s < 0 or self.warmup < 0:
            raise ProtocolError("MeasureSpec.min_repeat_s and .warmup must be >= 0")
        if self.device != "cpu":
            raise ProtocolError(f"MeasureSpec.device {self.device!r} is not served by this agent; known: cpu")


class Engine(StrEnum):
    """What executes a program given to `run_model`."""

    RELAX_VM = "relax_vm"  # a linked library with a Relax VM executable; inputs in call order
    KERNEL = "kernel"  # a linked library with one destination-passing function; inputs are all its arguments
    ONNXRUNTIME = "onnxruntime"  # an ONNX file, run by ONNX Runtime where the board has it


@dataclasses.dataclass(frozen=True)
class RunSpec(Message):
    """How to run a program on inputs that travel beside this message (see `device_agent.run_model`)."""

    engine: Engine
    runs: int = 1
    warmup: int = 0
    entry: str = "main"
    device: str = "cpu"
    return_outputs: bool = True
    limits: Limits = dataclasses.field(default_factory=Limits)
    max_spread: float | None = None
    start: StartConditions | None = None
    energy: EnergySpec | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "runs")
        if self.warmup < 0:
            raise ProtocolError("RunSpec.warmup must be >= 0")
        if self.device != "cpu":
            raise ProtocolError(f"RunSpec.device {self.device!r} is not served by this agent; known: cpu")


EVERY_CLUSTER = "*"


@dataclasses.dataclass(frozen=True)
class OperatingPoint(Message):
    """Clocks to hold a board at. What is null or empty is left as it is.

    `cpu_freq_hz` maps a cluster's name, or `EVERY_CLUSTER`, to Hz. `cores_online` are all CPU numbers that shall be
    online. A power mode is applied first, the other values on top of it; one that needs a reboot is refused unless
    `allow_reboot`.
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
                raise ProtocolError(
                    f"OperatingPoint: frequency of {name} must be a whole number of Hz, not {value!r}"
                )
        if self.cores_online is not None and (not self.cores_online or min(self.cores_online) < 0):
            raise ProtocolError("OperatingPoint.cores_online must name at least one CPU")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return self == OperatingPoint(allow_reboot=self.allow_reboot)


@dataclasses.dataclass(frozen=True)
class DomainClocks(Message):
    """One clock as the board says it is now: a CPU cluster's, the GPU's, the memory's. Null: cannot be read.

    `cpus` and `online` are empty for what is not a CPU cluster. `available_hz` is empty where the board has no table.
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
    """All clocks of a board, who holds them, and whether they can be trusted.

    `unsafe` is the reason why clocks could not be restored, empty while all is well. `notes` say what this board
    lacks or what looks wrong (clocks locked by somebody else, a table that differs from the board type's).
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
    BUSY = "busy"  # somebody else holds the clocks
    UNAVAILABLE = "unavailable"  # no clock helper answers, so nothing can be written
    FAILED = "failed"  # a write did not take; everything was restored
    UNSAFE = "unsafe"  # clocks could not be restored; an operator must look


@dataclasses.dataclass(frozen=True)
class PinReport(Message):
    """What came of a `pin` or `unpin`: the point actually reached, read back, and all clocks afterwards."""

    status: PinStatus
    message: str = ""
    reached: OperatingPoint | None = None
    clocks: Clocks | None = None
    notes: tuple[str, ...] = ()  # what was rounded, capped or raised, and by what
    took_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Evidence(Message):
    """What the board saw at one moment. A value that the board cannot read is missing or null, never zero."""

    cpu_freq_hz: dict[str, Any] = dataclasses.field(default_factory=dict)  # core number -> Hz
    cpu_max_hz: dict[str, Any] = dataclasses.field(default_factory=dict)  # core number -> upper limit in force, Hz
    gpu_freq_hz: int | None = None
    memory_freq_hz: int | None = None
    temperature_c: dict[str, Any] = dataclasses.field(default_factory=dict)  # thermal zone -> degrees Celsius
    cooling: dict[str, Any] = dataclasses.field(default_factory=dict)  # cooling device that slows clocks -> its state
    alarms: dict[str, Any] = dataclasses.field(default_factory=dict)  # over-current alarm -> how often or whether
    load_1min: float | None = None
    busy_s: float | None = None  # CPU time used since boot, over all cores and processes


@dataclasses.dataclass(frozen=True)
class RailPower(Message):
    """Power of one rail, or of the total, over one window. Intervals are 95 %.

    `reads` counts values read, `updates` those that were new, `gaps` the updates that were missed, `bad_reads` errors
    and impossible values. `energy_j` is the time integral of power (trapezoid) over the window.
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
    """Power over a window of the board's own clock. `total` is null where no rail is, or sums to, the board's total.

    `enough` says whether every rail gave as many independent updates as were asked for; `note` says why not. `calls`
    are the kernel's calls in the window, 0 for a window that just looks.
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
    """Energy of one kernel call or inference, from `busy`'s total and the idle baseline taken at the same clocks.

    `above_idle_j` leaves the idle power out. Intervals are 95 %. Null where there is no total or no baseline.
    """

    busy: PowerWindow
    idle: PowerWindow | None = None
    per_call_j: float | None = None
    per_call_ci_j: tuple[float, float] | None = None
    above_idle_j: float | None = None
    above_idle_ci_j: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Outcome(Message):
    """How one `measure` or `run_model` call ended, and the evidence for believing it.

    `latency_s` has one entry per sample, in order, warm-up left out. `timing_s` is how long the worker spent
    timing (warm-up included), so that what the farm adds can be told apart. `power` is what the sensors said while
    timing, `energy` the measurement that was asked for; both null where the board has no sensor. `point` is the
    operating point held, null where none was.
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


@dataclasses.dataclass(frozen=True)
class SensorInfo(Message):
    """One power sensor as measured at the agent's start. Null: it did not change often enough to tell."""

    rail: str
    driver: str  # ina3221-iio, ina3221-hwmon, rapl
    update_period_s: float | None = None
    step_w: float | None = None
    note: str = ""  # e.g. that its name was taken from its place, since it may not be read


@dataclasses.dataclass(frozen=True)
class Description(Message):
    """What a board says of itself. Lists are empty and values null where the board has no such thing."""

    name: str
    board_type: str
    agent_version: str
    protocol_version: int
    simulated: bool
    architecture: str  # as uname -m
    cpu_model: str
    cores_online: tuple[int, ...]
    cpu_freq_range_hz: dict[str, Any]  # core number -> [lowest, highest]
    memory_bytes: int
    engines: tuple[str, ...]  # values of `Engine` that this board can run
    engine_versions: dict[str, Any]
    rails: tuple[str, ...]
    thermal_zones: tuple[str, ...]
    detected_type: str = ""  # board type that the device tree says this is; "": none known
    clocks: Clocks = dataclasses.field(default_factory=Clocks)
    sensors: tuple[SensorInfo, ...] = ()
    total_rails: tuple[str, ...] = ()  # rails whose sum is the total; empty: no total
    notes: tuple[str, ...] = ()  # what this board lacks


@dataclasses.dataclass(frozen=True)
class PowerSpec(Message):
    """A window to look at power: `seconds` long, read `rate_hz` times a second at most."""

    seconds: float = 1.0
    rate_hz: float = 100.0

    def __post_init__(self) -> None:
        _require_positive(self, "seconds", "rate_hz")
        if self.seconds > 3600 or self.rate_hz > 10_000:
            raise ProtocolError("PowerSpec: at most 3600 seconds and 10000 reads a second")


@dataclasses.dataclass(frozen=True)
class PowerTrace(Message):
    """Answer of `device_agent.power`. `samples` maps a rail to [seconds since the window's start, W], new values only.

    `window` is null where the board has no sensor.
    """

    window: PowerWindow | None
    samples: dict[str, Any] = dataclasses.field(default_factory=dict)
    before: Evidence | None = None
    after: Evidence | None = None
    board: str = ""
    simulated: bool = False


def _require_positive(message: Message, *names: str) -> None:
    for name in names:
        if not getattr(message, name) > 0:
            raise ProtocolError(f"{type(message).__name__}.{name} must be > 0, not {getattr(message, name)}")


def pack_frame(message: str, payload: bytes) -> bytes:
    """One blob holding a JSON text and the bytes that go with it: little-endian u32 length, JSON, payload."""
    text = message.encode()
    return struct.pack("<I", len(text)) + text + payload


def unpack_frame(frame: bytes) -> tuple[str, bytes]:
    """The inverse of `pack_frame`. Raises ProtocolError on a short or garbled frame."""
    if len(frame) < 4:
        raise ProtocolError(f"frame of {len(frame)} bytes has no header")
    (size,) = struct.unpack_from("<I", frame)
    if len(frame) < 4 + size:
        raise ProtocolError(f"frame holds {len(frame) - 4} bytes where its header promises at least {size}")
    try:
        return frame[4 : 4 + size].decode(), frame[4 + size :]
    except UnicodeDecodeError as error:
        raise ProtocolError(f"frame's message is not UTF-8: {error}") from error
