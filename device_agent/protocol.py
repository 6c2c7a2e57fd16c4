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
PROTOCOL_VERSION = 1

# Names under which the agent registers its functions with TVM's RPC server.
DESCRIBE = "device_agent.describe"
MEASURE = "device_agent.measure"
RUN_MODEL = "device_agent.run_model"


M = TypeVar("M", bound="_Message")


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


class _Message:
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
    if isinstance(hint, type) and issubclass(hint, _Message):
        return hint.from_dict(value)
    wanted = (int, float) if hint is float else hint
    if hint is not Any and (not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool)):
        raise ProtocolError(f"{where} must be {hint.__name__}, not {type(value).__name__}")
    return float(value) if hint is float else value


@dataclasses.dataclass(frozen=True)
class TensorSpec(_Message):
    """One kernel argument: `shape` in elements, `dtype` as NumPy names it."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Limits(_Message):
    """What a worker may use. A worker that exceeds one is an outcome, not an accident.

    `memory_bytes` is what the worker may allocate beyond what the agent itself has mapped.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 2 << 30
    threads: int = 0  # 0: every core of the board

    def __post_init__(self) -> None:
        _require_positive(self, "timeout_s", "memory_bytes")
        if self.threads < 0:
            raise ProtocolError("Limits.threads must be >= 0")


@dataclasses.dataclass(frozen=True)
class MeasureSpec(_Message):
    """How to time one candidate whose library travels beside this message.

    A sample is the mean of `number` calls; there are `repeat` samples. `number` grows until a sample takes
    `min_repeat_s`. Arguments are filled with seeded values, the same on every board.
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
class RunSpec(_Message):
    """How to run a program on inputs that travel beside this message (see `device_agent.run_model`)."""

    engine: Engine
    runs: int = 1
    warmup: int = 0
    entry: str = "main"
    device: str = "cpu"
    return_outputs: bool = True
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        _require_positive(self, "runs")
        if self.warmup < 0:
            raise ProtocolError("RunSpec.warmup must be >= 0")
        if self.device != "cpu":
            raise ProtocolError(f"RunSpec.device {self.device!r} is not served by this agent; known: cpu")


@dataclasses.dataclass(frozen=True)
class Evidence(_Message):
    """What the board saw at one moment. A value that the board cannot read is missing or null, never zero."""

    cpu_freq_hz: dict[str, Any] = dataclasses.field(default_factory=dict)  # core number -> Hz
    temperature_c: dict[str, Any] = dataclasses.field(default_factory=dict)  # thermal zone -> degrees Celsius
    load_1min: float | None = None


@dataclasses.dataclass(frozen=True)
class Outcome(_Message):
    """How one `measure` or `run_model` call ended, and the evidence for believing it.

    `latency_s` has one entry per sample, in order, warm-up left out. `timing_s` is how long the worker spent
    timing (warm-up included), so that what the farm adds can be told apart. `power_w` and `energy_j` are per rail
    and null where the board has no sensor.
    """

    status: Status
    message: str = ""
    latency_s: tuple[float, ...] = ()
    calls_per_sample: int = 0
    timing_s: float = 0.0
    signal: str | None = None
    before: Evidence | None = None
    after: Evidence | None = None
    power_w: dict[str, Any] | None = None
    energy_j: dict[str, Any] | None = None
    board: str = ""
    agent_version: str = ""
    simulated: bool = False
    started_at: float = 0.0  # seconds since the epoch, the board's own clock


@dataclasses.dataclass(frozen=True)
class Description(_Message):
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


def _require_positive(message: _Message, *names: str) -> None:
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
