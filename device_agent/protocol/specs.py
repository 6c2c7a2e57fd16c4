"""Messages that ask a board to work: what to measure or run, under which limits and conditions."""

from __future__ import annotations

import dataclasses

from device_agent.protocol.messages import Message, ProtocolError, StrEnum, require_positive
from device_agent.protocol.power import EnergySpec

# What executes a program: the board's processor, or its GPU.
CPU, GPU = "cpu", "gpu"


@dataclasses.dataclass(frozen=True)
class TensorSpec(Message):
    """One kernel argument: `shape` in elements, `dtype` as NumPy names it."""

    shape: tuple[int, ...]
    dtype: str


# How long a worker for GPU code may take to get ready, before any limit of a candidate begins: the driver comes up, and
# arguments are filled, unless they are large. The driver takes some tenths of a second, and more on a busy board.
PREPARE_S = 15.0
# How much longer this machine may take for what an emulated board computes in its time.
EMULATING_S = 20.0


@dataclasses.dataclass(frozen=True)
class Limits(Message):
    """What a worker may use. A worker that exceeds one is an outcome, not an accident.

    `memory_bytes` is what the worker may allocate beyond what it had when it began: address space that it maps, or for
    GPU code writable memory of its own. With `load_timeout_s` what comes before the first call (the library loaded,
    large arguments filled) has a deadline of its own, and `timeout_s` begins with that call; without, `timeout_s` is
    for both.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 2 << 30
    threads: int = 0  # 0: one per core of `cluster`
    cluster: str = ""  # whose cores the worker's threads are placed on; "": every core that is not isolated
    load_timeout_s: float | None = None

    @property
    def total_s(self) -> float:
        """How long a worker may take for everything."""
        return self.timeout_s + (self.load_timeout_s or 0.0)

    def __post_init__(self) -> None:
        require_positive(self, "timeout_s", "memory_bytes")
        if self.load_timeout_s is not None:
            require_positive(self, "load_timeout_s")
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
        require_positive(self, "deadline_s")


@dataclasses.dataclass(frozen=True)
class MeasureSpec(Message):
    """How to time one candidate whose library travels beside this message.

    A sample is the mean of `number` calls; there are `repeat` samples. `number` grows until a sample takes
    `min_repeat_s`. Arguments are filled with seeded values, the same on every board; with `cold_weights` calls meet
    them as a model's kernels do: calls take turns among copies of the large ones, and on a real board's processor the
    input is written anew before each and results take turns, too, which counts to a sample's length, not to its mean.
    Samples that spread further than `max_spread` (interquartile range over median) make the outcome `noisy`. Where
    `energy` asks, it is measured.
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
    """What executes a program given to `run_model`."""

    RELAX_VM = "relax_vm"  # a linked library with a Relax VM executable; inputs in call order
    KERNEL = "kernel"  # a linked library with one destination-passing function; inputs are all its arguments
    ONNXRUNTIME = "onnxruntime"  # an ONNX file, run by ONNX Runtime where the board has it


@dataclasses.dataclass(frozen=True)
class RunSpec(Message):
    """How to run a program on inputs that travel beside this message (see `device_agent.run_model`).

    `device` is `cpu` or `gpu`; inputs and outputs are the processor's either way. With `per_layer` the outcome's
    details say what each function of a model takes: of Relax VM programs on the processor.
    """

    engine: Engine
    runs: int = 1
    warmup: int = 0
    entry: str = "main"
    device: str = "cpu"
    return_outputs: bool = True
    per_layer: bool = False
    limits: Limits = dataclasses.field(default_factory=Limits)
    max_spread: float | None = None
    start: StartConditions | None = None
    energy: EnergySpec | None = None

    def __post_init__(self) -> None:
        require_positive(self, "runs")
        if self.warmup < 0:
            raise ProtocolError("RunSpec.warmup must be >= 0")
        if self.device not in (CPU, GPU):
            raise ProtocolError(f"RunSpec.device {self.device!r} is not served by this agent; known: {CPU}, {GPU}")
        if self.device == GPU and self.engine is Engine.ONNXRUNTIME:
            raise ProtocolError(f"the engine {self.engine} does not run on the GPU")
