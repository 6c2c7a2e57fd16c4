"""Requests to a board: what to measure or run, under which limits and conditions."""

from __future__ import annotations

import dataclasses
import re

from device_agent.protocol.messages import Message, ProtocolError, StrEnum, require_positive
from device_agent.protocol.outcome import EnergySpec

# From tvm/rpc/base.py: the magic number of TVM's RPC handshake, and a server's acceptance.
RPC_MAGIC = 0xFF271
RPC_SUCCESS = RPC_MAGIC
RPC_MISMATCH = RPC_MAGIC + 2

# A greeting with this prefix asks for no session; see `fence_key`.
FENCE_PREFIX = "fence:"

_NONCE = re.compile(r"[A-Za-z0-9]{0,64}")
_STORE = re.compile(r"[A-Za-z0-9._-]{1,64}")
# The largest integer that SQLite, and JSON in other languages, represent exactly.
_GREATEST_TOKEN = 2**53
_MAX_TEXT = 200


# The device that executes a program.
CPU, GPU = "cpu", "gpu"
# How long a worker for GPU code may prepare before a candidate's limits begin: start the driver, fill arguments that
# are not large. The driver takes some tenths of a second, more on a busy board.
PREPARE_S = 15.0
# Extra host time for emulating what a board computes within its limit.
EMULATING_S = 20.0


@dataclasses.dataclass(frozen=True)
class LeaseClaim(Message):
    """The lease that a client holds: its number in its store; `owner` and `purpose` are for people.

    `nonce` is drawn for each lease: a store restored from a backup issues its numbers a second time.
    """

    store: str
    token: int
    owner: str = ""
    purpose: str = ""
    nonce: str = ""

    def __post_init__(self) -> None:
        if not _STORE.fullmatch(self.store):
            raise ProtocolError(f"LeaseClaim.store {self.store!r} is no store's identity")
        if not 0 < self.token <= _GREATEST_TOKEN:
            raise ProtocolError(f"LeaseClaim.token must be 1 to {_GREATEST_TOKEN}, not {self.token}")
        if max(len(self.owner), len(self.purpose)) > _MAX_TEXT:
            raise ProtocolError(f"LeaseClaim.owner and .purpose have {_MAX_TEXT} characters at most")
        if not _NONCE.fullmatch(self.nonce):
            raise ProtocolError(f"LeaseClaim.nonce {self.nonce!r} is none")

    def is_same(self, other: LeaseClaim) -> bool:
        """Whether both are one lease; a nonce missing from either is not compared."""
        known = bool(self.nonce and other.nonce)
        return (self.store, self.token) == (other.store, other.token) and (not known or self.nonce == other.nonce)


class ClaimStatus(StrEnum):
    """The agent's answer to a claim or a fence."""

    OK = "ok"
    EVICTED = "evicted"  # ok, and the session of an older lease of the same store was ended
    REFUSED = "refused"  # a later lease of the same store has been here, or another one with the same number


@dataclasses.dataclass(frozen=True)
class ClaimReport(Message):
    """The agent's answer. `greatest` and `owner` belong to the greatest token known of the store, the claim's included.

    `holder` describes the client with a session on the board, as far as the agent knows; empty: none.
    """

    status: ClaimStatus
    message: str = ""
    greatest: int = 0
    owner: str = ""
    holder: str = ""


def fence_key(claim: LeaseClaim) -> str:
    """Encode a fence, in place of a client's key in TVM's handshake: it only declares this lease the latest.

    The agent answers at once, even during a session, with `RPC_SUCCESS` and a `ClaimReport`.
    """
    owner = re.sub(r"[^!-9;-~]", "_", claim.owner)[:_MAX_TEXT]
    return f"{FENCE_PREFIX}{claim.store}:{claim.token}:{owner}" + (f":{claim.nonce}" if claim.nonce else "")


def parse_fence_key(key: str) -> LeaseClaim:
    """The inverse of `fence_key`, except for the simplified owner. Raises ProtocolError."""
    prefix, colon, rest = key.partition(":")
    store, _, rest = rest.partition(":")
    token, _, rest = rest.partition(":")
    owner, _, nonce = rest.partition(":")
    if prefix + colon != FENCE_PREFIX or not re.fullmatch(r"[0-9]{1,16}", token):
        raise ProtocolError(f"{key!r} is no fence")
    return LeaseClaim(store, int(token), owner, nonce=nonce)


@dataclasses.dataclass(frozen=True)
class TensorSpec(Message):
    """One kernel argument: `shape` in elements, `dtype` as NumPy names it."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Limits(Message):
    """What a worker may use. Exceeding a limit is an outcome, not an accident.

    `memory_bytes` is the worker's allowance beyond its memory at the start: mapped address space, or private writable
    memory for GPU code. With `load_timeout_s`, everything before the first call (load the library, fill large
    arguments) has its own deadline, and `timeout_s` begins with that call. Otherwise `timeout_s` covers both.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 2 << 30
    threads: int = 0  # 0: one per core of `cluster`
    cluster: str = ""  # whose cores the worker's threads are placed on; "": every core that is not isolated
    load_timeout_s: float | None = None

    @property
    def total_s(self) -> float:
        """The worker's whole time limit."""
        return self.timeout_s + (self.load_timeout_s or 0.0)

    def __post_init__(self) -> None:
        require_positive(self, "timeout_s", "memory_bytes")
        if self.load_timeout_s is not None:
            require_positive(self, "load_timeout_s")
        if self.threads < 0:
            raise ProtocolError("Limits.threads must be >= 0")


@dataclasses.dataclass(frozen=True)
class StartConditions(Message):
    """Conditions for starting to time. If they do not hold by `deadline_s`, the outcome is `noisy` and names one.

    `max_temperature_c` applies to the hottest zone, `max_load` to the CPU time of other processes, in cores.
    """

    max_temperature_c: float | None = None
    max_load: float | None = None
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        require_positive(self, "deadline_s")


@dataclasses.dataclass(frozen=True)
class MeasureSpec(Message):
    """How to time one candidate whose library travels beside this message.

    A sample is the mean of `number` calls; there are `repeat` samples. `number` grows until a sample takes
    `min_repeat_s`. Arguments are filled with seeded values, the same on every board. With `cold_weights` the caches are
    as in a model: calls rotate through copies of the large arguments, and on a real board's CPU the input is rewritten
    before each call and results rotate too; that adds to a sample's length, not to its mean. Samples that spread beyond
    `max_spread` (interquartile range over median) make the outcome `noisy`. `energy` requests an energy measurement.
    """

    arguments: tuple[TensorSpec, ...]
    number: int = 1
    repeat: int = 3
    min_repeat_s: float = 0.0
    warmup: int = 1
    cold_weights: bool = False
    seed: int = 0
    entry: str = "main"
    device: str = "cpu"
    limits: Limits = dataclasses.field(default_factory=Limits)
    max_spread: float | None = None
    start: StartConditions | None = None
    energy: EnergySpec | None = None

    def __post_init__(self) -> None:
        require_positive(self, "number", "repeat")
        if self.min_repeat_s < 0 or self.warmup < 0:
            raise ProtocolError("MeasureSpec.min_repeat_s and .warmup must be >= 0")
        if self.device not in (CPU, GPU):
            raise ProtocolError(f"MeasureSpec.device {self.device!r} is not served by this agent; known: {CPU}, {GPU}")


class Engine(StrEnum):
    """The executor of a program given to `run_model`."""

    RELAX_VM = "relax_vm"  # a linked library with a Relax VM executable; inputs in call order
    KERNEL = "kernel"  # a linked library with one destination-passing function; inputs are all its arguments
    # Where the board has them:
    ONNXRUNTIME = "onnxruntime"  # an ONNX file
    NCNN = "ncnn"  # a zip of pnnx's `model.ncnn.param` and `model.ncnn.bin`
    PYTORCH = "pytorch"  # a zip of pnnx's `model_pnnx.py` and `model.pnnx.bin`
    TFLITE = "tflite"  # a TensorFlow Lite file
    TENSORRT = "tensorrt"  # an ONNX file, run by `trtexec`
    PROGRAM = "program"  # any program: `RunSpec.command`, without inputs


@dataclasses.dataclass(frozen=True)
class Command(Message):
    """A program to run as it is: each run in a new folder, as the agent's user, without input and without a shell.

    `files` lie in that folder, by name: the SHA-256 of what `keep_program` got. `arguments[0]` is a path in it, an
    absolute one, or a name that the agent's PATH has. Power counts, and a run is timed, from the first line of a run
    that `begin` (a regular expression) is found in, up to the first after it with `end`; empty: from its start, to its
    exit. The outputs of a call are its runs' stdout and stderr in turn, as
    bytes.
    """

    arguments: tuple[str, ...]
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    begin: str = ""
    end: str = ""
    processes: int = 256  # more at once end the run

    def __post_init__(self) -> None:
        if not self.arguments or not self.arguments[0]:
            raise ProtocolError("Command.arguments names no program")
        if any("\0" in each for each in self.arguments):
            raise ProtocolError("Command.arguments holds a NUL character")
        if bad := [name for name in self.files if "/" in name or name in ("", ".", "..") or "\0" in name]:
            raise ProtocolError(f"Command.files has {bad[0][:80]!r}, which is no file's name")
        for pattern in (self.begin, self.end):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ProtocolError(f"{pattern[:80]!r} is no regular expression: {error}") from error
        require_positive(self, "processes")


@dataclasses.dataclass(frozen=True)
class RunSpec(Message):
    """How to run a program on inputs that travel beside this message (see `device_agent.run_model`).

    `device` is `cpu` or `gpu`; inputs and outputs are in CPU memory either way. `per_layer` adds the time of each
    function to the details, for Relax VM programs on the CPU. `instances` processes of a CPU program run at once, each
    with `limits` and its share of the cores; the samples are the first one's. The arrays hold `stacked` inputs along a
    new first axis: a Relax VM program runs each once, and the outputs are stacked likewise.
    """

    engine: Engine
    runs: int = 1
    warmup: int = 0
    entry: str = "main"
    device: str = "cpu"
    return_outputs: bool = True
    per_layer: bool = False
    instances: int = 1
    stacked: int = 1
    limits: Limits = dataclasses.field(default_factory=Limits)
    max_spread: float | None = None
    start: StartConditions | None = None
    energy: EnergySpec | None = None
    command: Command | None = None

    def __post_init__(self) -> None:
        require_positive(self, "runs", "instances", "stacked")
        if (self.command is None) is (self.engine is Engine.PROGRAM):
            raise ProtocolError("RunSpec.command goes with the engine program")
        if self.warmup < 0:
            raise ProtocolError("RunSpec.warmup must be >= 0")
        if self.device not in (CPU, GPU):
            raise ProtocolError(f"RunSpec.device {self.device!r} is not served by this agent; known: {CPU}, {GPU}")
        if self.device == GPU and self.engine not in (
            *(Engine.RELAX_VM, Engine.KERNEL, Engine.TENSORRT, Engine.PROGRAM),
        ):
            raise ProtocolError(f"the engine {self.engine} does not run on the GPU")
        if self.device == CPU and self.engine is Engine.TENSORRT:
            raise ProtocolError(f"the engine {self.engine} runs on the GPU alone")
        if self.device == GPU and self.instances > 1:
            raise ProtocolError("a GPU runs one instance at a time")
        if self.stacked > 1 and (self.engine, self.runs, self.warmup, self.instances) != (Engine.RELAX_VM, 1, 0, 1):
            raise ProtocolError("a Relax VM program runs stacked inputs once each, in one instance")
