"""Run a virtual board's own code for a worker, in the emulator's process: candidates, kernels and whole models.

Costs are collected here; `farm/virtual/pace.py` converts them to time at the board's clocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.protocol import Engine, MeasureSpec, RunSpec, Segment, count_seconds
from device_agent.worker import arguments
from device_agent.worker.plan import Collector, LoadError, OverrunError, Profile, Runner
from farm.virtual.emulated.client import Emulation, Placed, ProgramError, Run
from farm.virtual.emulated.elf import MACHINE_AARCH64, Elf, ElfError

KIND = "relax.VMExecutable"
_SYMBOL = "__tvm_ffi__library_bin"
_HERE = "_lib"  # the library itself
_MOST_MODULES = 64


def read_executable(library: bytes) -> bytes:
    """Extract the executable in a library. Raises ElfError without one."""
    elf = Elf(library)
    at = elf.symbols.get(_SYMBOL)
    if at is None:
        raise ElfError("the library holds no Relax VM program")
    data = next((s.data[at - s.address :] for s in elf.segments if s.address <= at < s.address + len(s.data)), b"")
    try:
        return _find(_Reader(data))
    except (struct.error, UnicodeDecodeError) as error:
        raise ElfError(f"the library's program is damaged: {error}") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self) -> int:
        (value,) = struct.unpack_from("<Q", self._data, self._at)
        self._at += 8
        return int(value)

    def numbers(self) -> list[int]:
        count = self.number()
        if count > _MOST_MODULES:
            raise ElfError("the library's program is damaged: too many modules")
        return [self.number() for _ in range(count)]

    def bytes(self) -> bytes:
        size = self.number()
        if self._at + size > len(self._data):
            raise ElfError("the library's program is cut short")
        self._at += size
        return self._data[self._at - size : self._at]


def _find(reader: _Reader) -> bytes:
    reader.number()  # the total length
    modules = len(reader.numbers()) - 1
    reader.numbers()  # the children of each module
    for _ in range(max(0, modules)):
        kind = reader.bytes().decode()
        if kind == _HERE:
            continue
        data = reader.bytes()
        if kind == KIND:
            return data
    raise ElfError("the library holds no Relax VM program")


# A candidate is stopped after this many instructions over all threads: 0.1 s of a slow core, 20 s of emulation. A
# model's function may take more.
_MOST_IN_CANDIDATE, _MOST_IN_MODEL = 200_000_000, 10_000_000_000
# Limits on cached outputs.
_MOST_KEPT, _MOST_KEPT_BYTES = 64, 4 << 20
# The session kills a worker that takes too long, and this process with it.
_ANSWER_TIMEOUT_S = 3600.0
_HEAP_BYTES = 1 << 30
_ALIGNED = 256
# For a core without a clock: only ratios are needed then.
_ANY_HZ = 1e9


@dataclasses.dataclass(frozen=True)
class Emulator:
    """The emulator and the cores to emulate, by cluster; `core` is that of the clusters open to the scheduler.

    `tasks` is the number of threads. `kept` caches the outputs of programs: blocks of runs repeat the same program.
    """

    socket: Path
    core: Mapping[str, Any]
    cores: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    tasks: int = 1
    kept: Path | None = None

    def open(self, library: bytes, shared_bytes: int, heap_bytes: int) -> Emulation:
        heap_bytes = min(heap_bytes, _HEAP_BYTES)
        try:
            return Emulation(self.socket, library, self.core, self.tasks, shared_bytes, heap_bytes, _ANSWER_TIMEOUT_S)
        except ProgramError as error:
            raise LoadError(str(error)) from error

    def load_candidate(self, spec: MeasureSpec, library: bytes, pace: Any) -> Candidate:
        """See `device_agent.worker.plan.Emulator`."""
        candidate = Candidate(self, spec, library)
        # Its cost is deterministic: once known, it need not run again.
        pace.emulate(lambda: candidate.segments, again=False)
        return candidate

    def load_program(
        self, spec: RunSpec, program: bytes, inputs: Sequence[Mapping[str, Any]], pace: Any
    ) -> tuple[Runner, Collector, Callable[[], Profile]]:
        """See `device_agent.worker.plan.Emulator`."""
        execution = Execution(self, spec, program, inputs)
        pace.emulate(execution.count, again=spec.return_outputs)
        return execution.run, collect, execution.profile


def is_for_board(library: bytes) -> bool:
    """Whether it is aarch64 code."""
    return len(library) > 20 and int.from_bytes(library[18:20], "little") == MACHINE_AARCH64


class Candidate:
    """One candidate with its arguments; `segments` is the cost of a call."""

    beside_s = 0.0

    def __init__(self, emulator: Emulator, spec: MeasureSpec, library: bytes) -> None:
        """Fill the arguments. Raises LoadError, EmulatorError, UnknownDtypeError."""
        self.segments: list[Segment] = []
        self._spec, self._most = spec, _MOST_IN_CANDIDATE // emulator.tasks
        size = sum(_count_bytes(each.shape, each.dtype) + _ALIGNED for each in spec.arguments)
        self._emulation = emulator.open(library, size, spec.limits.memory_bytes)
        if spec.entry not in self._emulation.functions:
            raise LoadError(f"the library has no function {spec.entry!r}")
        self._tensors = [self._emulation.place(each.shape, each.dtype) for each in spec.arguments]
        for index, each in enumerate(self._tensors):
            flat = each.array.reshape(-1)
            arguments.fill_argument(flat, spec.arguments[index].dtype, spec.seed, index)

    def warm_up(self, calls: int) -> None:
        """Do nothing: each call names what is in the caches."""

    def evaluate(self, number: int, repeat: int) -> list[float]:
        """Not implemented: emulated code is timed by its board's pace."""
        return [self.run(number) for _ in range(repeat)]

    def run(self, calls: int) -> float:
        """Call it once for any `calls`: every call costs the same. Returns 0."""
        del calls
        last = len(self._tensors) - 1
        # L2 holds the previous layer's output and this layer's output; weights come from memory.
        middle = () if self._spec.cold_weights else range(1, last)
        warm = [0, *middle, last] if last > 0 else [0] * len(self._tensors)
        run = _call(self._emulation, self._spec.entry, self._tensors, self._most, warm, first_only=True)
        self.segments = list(run.segments)
        return 0.0


class Execution:
    """A kernel or a model on the arrays of each inference in turn; runs only if its outputs or cost are not cached."""

    def __init__(self, emulator: Emulator, spec: RunSpec, program: bytes, arrays: Sequence[Mapping[str, Any]]) -> None:
        self._emulator, self._spec, self._program, self._arrays = emulator, spec, program, arrays
        self._loaded: Kernel | Model | None = None
        digest = hashlib.sha256(f"{spec.engine} {spec.entry}".encode() + program)
        for name, each in arrays[0].items():
            digest.update(f"{name} {each.shape} {each.dtype}".encode() + each.tobytes())
        kept = emulator.kept if len(arrays) == 1 else None
        self._path = kept / f"{digest.hexdigest()}.npz" if kept else None

    def run(self) -> Any:
        """Return its result. Raises LoadError, EmulatorError, ProgramError, OverrunError."""
        if self._path is not None and self._path.exists():
            with np.load(self._path, allow_pickle=False) as found:
                return [found[name] for name in found.files]
        return self._run()

    def count(self) -> Sequence[Segment]:
        """Return its cost. Raises as `run`."""
        return self._look().segments

    def profile(self) -> dict[str, tuple[int, float]]:
        """Calls and seconds of each function of a model at its core's usual clock; empty for a kernel."""
        loaded, core = self._look(), self._emulator.core
        if not isinstance(loaded, Model):
            return {}
        hz = float(core.get("freq_hz", _ANY_HZ))
        profile = loaded.profile()
        return {
            name: (calls, count_seconds(segments, core, hz, self._emulator.tasks)[0])
            for name, (calls, segments) in profile.items()
        }

    def _look(self) -> Kernel | Model:
        """Run the program if necessary. Raises as `run`."""
        if self._loaded is None:
            self._run()
        assert self._loaded is not None
        return self._loaded

    def _run(self) -> Any:
        if self._loaded is None:
            if self._spec.engine is Engine.RELAX_VM:
                self._loaded = Model(self._emulator, self._spec, self._program, self._arrays)
            else:
                self._loaded = Kernel(self._emulator, self._spec, self._program, self._arrays[0])
        result = self._loaded.run()
        self._keep(collect(result))
        return result

    def _keep(self, outputs: list[Any]) -> None:
        """Cache outputs up to a limit; a full folder caches none."""
        plain = all(each.dtype.kind in "iufb" for each in outputs)
        if self._path is None or not plain or sum(each.nbytes for each in outputs) > _MOST_KEPT_BYTES:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for old in sorted(self._path.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MOST_KEPT]:
                old.unlink(missing_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}.npz")
            np.savez(part, *outputs)
            part.replace(self._path)


def collect(result: Any) -> list[Any]:
    """Copy the tensors in a result: one, or nested tuples of them; other values are dropped."""
    if isinstance(result, np.ndarray):
        return [result]
    if hasattr(result, "numpy"):
        return [result.numpy()]
    if isinstance(result, str | bytes) or not hasattr(result, "__len__"):
        return []
    return [array for item in result for array in collect(item)]


class Kernel:
    """A bare function on given arrays."""

    def __init__(self, emulator: Emulator, spec: RunSpec, library: bytes, arrays: Mapping[str, Any]) -> None:
        """Raises LoadError, EmulatorError."""
        self.segments: list[Segment] = []
        self._entry = spec.entry
        size = sum(each.nbytes + _ALIGNED for each in arrays.values())
        self._emulation = emulator.open(library, size, spec.limits.memory_bytes)
        if spec.entry not in self._emulation.functions:
            raise LoadError(f"the library has no function {spec.entry!r}")
        self._tensors = []
        for each in arrays.values():
            placed = self._emulation.place(each.shape, each.dtype.name)
            placed.array[...] = each
            self._tensors.append(placed)

    def run(self) -> list[Any]:
        run = _call(self._emulation, self._entry, self._tensors, _MOST_IN_MODEL)
        self.segments = list(run.segments)
        return [each.array for each in self._tensors]


class Model:
    """A whole model: TVM's virtual machine runs its program, the emulator each function that it calls."""

    def __init__(self, emulator: Emulator, spec: RunSpec, library: bytes, arrays: Sequence[Mapping[str, Any]]) -> None:
        """Raises LoadError, EmulatorError."""
        import tvm.runtime
        import tvm_ffi
        from tvm.runtime.vm import VirtualMachine

        self.segments: list[Segment] = []
        self._gathered: list[tuple[str, Run]] = []
        self._is_counting = True
        try:
            data = read_executable(library)
        except ElfError as error:
            raise LoadError(str(error)) from error
        self._emulation = emulator.open(library, spec.limits.memory_bytes // 2, spec.limits.memory_bytes)
        self._places: dict[tuple[int, tuple[int, ...], str], Placed] = {}
        for name in self._emulation.functions:
            tvm_ffi.register_global_func(name, self._make_function(name), override=True)
        module = tvm_ffi.get_global_func("ffi.Module.load_from_bytes.relax.VMExecutable")(data)
        try:
            self._function = VirtualMachine(module, tvm.runtime.cpu())[spec.entry]
        except (AttributeError, KeyError, RuntimeError, ValueError) as error:
            raise LoadError(f"the program has no function {spec.entry!r}: {error}") from error
        self._feeds = itertools.cycle(arrays)
        self._inputs = [tvm.runtime.tensor(each, tvm.runtime.cpu()) for each in arrays[0].values()]

    def run(self) -> Any:
        self._is_counting = not self.segments  # each run costs the same
        for tensor, each in zip(self._inputs, next(self._feeds).values(), strict=True):
            tensor.copyfrom(each)
        result = self._function(*self._inputs)
        self.segments = self.segments or [each for _, run in self._gathered for each in run.segments]
        return result

    def profile(self) -> dict[str, tuple[int, list[Segment]]]:
        """Calls and cost of each function in the first run."""
        found: dict[str, tuple[int, list[Segment]]] = {}
        for name, run in self._gathered:
            calls, segments = found.get(name, (0, []))
            found[name] = calls + 1, [*segments, *run.segments]
        return found

    def _make_function(self, name: str) -> Callable[..., None]:
        def function(*tensors: Any) -> None:
            placed = []
            for each in tensors:
                if not hasattr(each, "numpy"):
                    raise ProgramError("missing", f"{name} takes more than tensors, which is not emulated")
                array = each.numpy()
                key = (each.data_ptr(), tuple(each.shape), str(each.dtype))
                if key not in self._places:
                    self._places[key] = self._emulation.place(array.shape, str(each.dtype))
                self._places[key].array[...] = array
                placed.append(self._places[key])
            run = _call(self._emulation, name, placed, _MOST_IN_MODEL, counted=self._is_counting)
            if self._is_counting:
                self._gathered.append((name, run))
            for each, place in zip(tensors, placed, strict=True):
                each.copyfrom(place.array)

        return function


def _call(
    emulation: Emulation,
    entry: str,
    tensors: Sequence[Placed],
    most: int,
    warm: Sequence[int] = (),
    *,
    first_only: bool = False,
    counted: bool = True,
) -> Run:
    """Call a function. Raises OverrunError for one that takes too long, else as the emulation."""
    try:
        return emulation.call(entry, tensors, most, warm, first_only=first_only, counted=counted)
    except ProgramError as error:
        if error.kind == "cap":
            raise OverrunError(f"{entry}: {error}") from error
        raise


def _count_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * arguments.numpy_dtype(dtype).itemsize
