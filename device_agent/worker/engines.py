"""Run a whole program on given inputs, inside a worker process: Relax VM or a bare kernel; `rivals.py` loads others.

Each run is timed separately. Candidates are timed in `timing.py`.
"""

from __future__ import annotations

import io
import itertools
import resource
import statistics
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm.runtime
from tvm.runtime.vm import VirtualMachine

from device_agent import protocol
from device_agent.platforms import gpu
from device_agent.protocol import Engine, Layer, Outcome, RunDetails, RunSpec, Status
from device_agent.worker import rivals
from device_agent.worker.arguments import numpy_dtype
from device_agent.worker.plan import Collector, LoadError, Marks, Plan, Profile, Runner
from device_agent.worker.timing import load, load_module

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]


# Instrumented runs of a repeated program; the median of each function's total counts.
_RUNS = 5
# No model has more functions; names are displayed.
_MOST, _MOST_NAME = 2000, 200
# The VM's own functions: shape checks, memory.
_OWN = ("vm.",)


# Short runs are timed back to back for this long, as in an energy window: other work in between cools caches.
_BLOCK_S = 0.02
# How often an instance looks whether the others run.
_LOOK_S = 0.001


def profile(machine: Any, run: Callable[[], Any], runs: int = _RUNS) -> Profile:
    """Instrument `machine` while `run` runs it, up to `runs` times."""
    began: list[float] = []
    sums: list[dict[str, tuple[int, float]]] = []

    def watch(_function: Any, name: str, before_run: bool, *_: Any) -> None:
        now = time.perf_counter()
        if before_run:
            began.append(time.perf_counter())
            return
        took = now - began.pop()
        if not began and not name.startswith(_OWN):  # nested calls belong to the outer function
            calls, before = sums[-1].get(name, (0, 0.0))
            sums[-1][name] = calls + 1, before + took

    machine.set_instrument(watch)
    for _ in range(min(_RUNS, runs)):
        sums.append({})
        run()
    return {
        name: (calls, statistics.median(each[name][1] for each in sums if name in each))
        for name, (calls, _) in sums[-1].items()
    }


def to_layers(found: Profile, latency_s: float, host_s: float) -> tuple[Layer, ...]:
    """Scale a profile from `host_s` on this machine to the board's `latency_s`."""
    scale = latency_s / host_s if host_s > 0 else 1.0
    rows: Sequence[tuple[str, tuple[int, float]]] = list(found.items())[:_MOST]
    return tuple(Layer(name[:_MOST_NAME], calls, took * scale) for name, (calls, took) in rows)


def run_program(spec: RunSpec, program: Path, inputs: bytes, plan: Plan) -> bytes:
    """Run the program in the file `program`; return a frame of the Outcome and an npz of the outputs.

    The outputs are the very first run's of each input, warm-up included, since a kernel may accumulate into its
    arguments. Raises LoadError, ProtocolError for inputs that are no npz or not `stacked`, MemoryError, and what the
    engine raises.
    """
    arrays = read_arrays(inputs)
    if spec.stacked > 1 and any(each.shape[:1] != (spec.stacked,) for each in arrays.values()):
        raise protocol.ProtocolError(f"the inputs are not {spec.stacked} along their first axis")
    if spec.engine is Engine.TENSORRT:
        outcome, outputs = rivals.run_trtexec(spec, program, arrays, plan)
        return protocol.pack_frame(outcome.to_json(), write_arrays(outputs) if spec.return_outputs else b"")
    run, collect, profile = _load(spec, program, arrays, plan)
    plan.marks.set("loaded_s", time.monotonic())
    while not all(each.read().running_s for each in plan.others):
        time.sleep(_LOOK_S)  # the session ends this worker at its deadline
    plan.rest()
    before = plan.sensors.read()
    plan.marks.set("running_s", time.monotonic())
    started_s = plan.mark("timing_start_s")
    cpu_started_s = time.process_time()
    plan.pace.begin()
    timed = _Timed(spec, plan, run, collect)
    taken_s, first_s = timed.take_samples()
    timing_s = plan.mark("timing_end_s") - started_s - timed.collecting_s
    plan.fill_window(timed.repeat, statistics.median(taken_s))
    plan.pace.end()
    plan.marks.set("cpu_s", time.process_time() - cpu_started_s)
    layers: tuple[Layer, ...] = ()
    if spec.per_layer and profile is not None:
        # Times on this machine differ from those on the virtual board.
        found = profile()
        here = statistics.median(timed.host_s) if plan.emulator is None else sum(took for _, took in found.values())
        layers = to_layers(found, statistics.median(taken_s), here)
    outcome = Outcome(
        Status.OK,
        latency_s=tuple(taken_s),
        calls_per_sample=1,
        timing_s=timing_s,
        before=before,
        after=plan.sensors.read(),
        details=RunDetails(first_s if plan.emulator is None else None, _read_peak_bytes(spec, plan), layers),
    )
    return protocol.pack_frame(outcome.to_json(), timed.payload)


class _Timed:
    """Timed runs of a loaded program. `payload`: the outputs of the first run of each input, as an npz."""

    def __init__(self, spec: RunSpec, plan: Plan, run: Runner, collect: Collector) -> None:
        self._spec, self._plan, self._run, self._collect = spec, plan, run, collect
        self._collected: list[list[NDArray[Any]]] = []
        self._result: Any = None
        self.payload = b""
        self.host_s: list[float] = []
        self.collecting_s = 0.0

    def repeat(self, calls: int) -> float:
        """Seconds per run on this machine."""
        return statistics.fmean(self._call() for _ in range(calls))

    def take_samples(self) -> tuple[list[float], float]:
        """The board's seconds of each run after the warm-up, and of the very first one."""
        spec, plan = self._spec, self._plan
        latency_s: list[float] = []
        first_s = 0.0
        done, total, block = 0, spec.warmup + spec.runs * spec.stacked, 1
        while done < total:
            taken_s = [plan.pace.take(self.repeat, 1) for _ in range(block)]
            first_s = first_s or taken_s[0]
            # Drop warm-up runs, also at the start of a block.
            latency_s += taken_s[max(0, spec.warmup - done) :]
            done += block
            block = min(total - done, max(1, round(_BLOCK_S / max(taken_s[-1], 1e-9))))
        plan.pace.settle()
        while spec.return_outputs and not self.payload:  # a known program is charged for without running it
            self._call()
        return latency_s, first_s

    def _call(self) -> float:
        self._result = None  # two results at a time may exceed the board's memory
        begun = time.perf_counter()
        self._result = self._run()
        took_s = time.perf_counter() - begun
        self.host_s.append(took_s)
        if self._spec.return_outputs and not self.payload:
            ended_s = self._plan.time.now_s()
            self._collected.append(self._collect(self._result))
            if len(self._collected) == self._spec.stacked:
                self.payload = write_arrays(stack(self._collected))
            self.collecting_s = self._plan.time.now_s() - ended_s
        return took_s


def run_beside(spec: RunSpec, program: Path, inputs: bytes, plan: Plan, first: Marks) -> bytes:
    """Run the program until the worker with the marks `first` is done; return a frame with the median latency.

    Raises as `run_program`.
    """
    run, _, _ = _load(spec, program, read_arrays(inputs), plan)
    every_s: list[float] = []
    timed_s: list[float] = []
    while not (phases := first.read()).cpu_s:
        began_s = time.perf_counter()
        run()
        every_s.append(time.perf_counter() - began_s)
        plan.marks.set("running_s", time.monotonic())
        if phases.running_s and not phases.timing_end_s:
            timed_s.append(every_s[-1])
    # A timing shorter than one run has none.
    median_s = statistics.median(timed_s or every_s)
    return protocol.pack_frame(Outcome(Status.OK, latency_s=(median_s,)).to_json(), b"")


def _read_peak_bytes(spec: RunSpec, plan: Plan) -> int | None:
    """The process's peak memory. Emulated code and GPU work are elsewhere."""
    if plan.emulator is not None or spec.device == protocol.GPU:
        return None
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _load(
    spec: RunSpec, program: Path, arrays: Arrays, plan: Plan
) -> tuple[Runner, Collector, Callable[[], Profile] | None]:
    if plan.emulator is None:
        if spec.engine is Engine.RELAX_VM and spec.device == protocol.CPU:
            return _load_relax_vm(spec, program, arrays)
        return (*load_program(spec, program, arrays), None)
    return plan.emulator.load_program(spec, program.read_bytes(), unstack(spec, arrays), plan.pace)


def load_program(spec: RunSpec, program: Path, arrays: Arrays) -> tuple[Runner, Collector]:
    """How to run the program in the file `program` once on `arrays`, and how to copy its outputs.

    Raises LoadError, MemoryError, and what the engine raises.
    """
    if spec.engine is Engine.RELAX_VM:
        run, collect, _ = _load_relax_vm(spec, program, arrays)
        return run, collect
    loader = _load_kernel if spec.engine is Engine.KERNEL else rivals.LOADERS[spec.engine]
    return loader(spec, program, arrays)


def read_arrays(data: bytes) -> Arrays:
    """The arrays of an npz in order. Raises ProtocolError; never unpickles."""
    if not data:
        return {}
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            # Not `ascontiguousarray`: it turns a scalar into a vector.
            found = {name: np.asarray(archive[name], order="C") for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise protocol.ProtocolError(f"the inputs are not an npz of plain arrays: {error}") from error
    # NumPy's files have no name for bfloat16 and store raw two-byte values.
    return {
        name: array.view(numpy_dtype("bfloat16")) if array.dtype == np.dtype("V2") else array
        for name, array in found.items()
    }


def unstack(spec: RunSpec, arrays: Arrays) -> list[Arrays]:
    """Return the inputs of each inference."""
    if spec.stacked == 1:
        return [arrays]
    return [{name: each[index, ...] for name, each in arrays.items()} for index in range(spec.stacked)]


def stack(collected: list[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    """Return the outputs of all inferences: one's own, or those of several along a new first axis."""
    return collected[0] if len(collected) == 1 else [np.stack(each) for each in zip(*collected, strict=True)]


def write_arrays(arrays: list[NDArray[Any]]) -> bytes:
    """Write an npz of `out_000`, `out_001` …"""
    buffer = io.BytesIO()
    np.savez(buffer, **{f"out_{index:03}": array for index, array in enumerate(arrays)})  # type: ignore[arg-type]
    return buffer.getvalue()


def _tensors(arrays: Arrays, device: Any = None) -> list[Any]:
    return [tvm.runtime.tensor(array, device or tvm.runtime.cpu()) for array in arrays.values()]


def _load_kernel(spec: RunSpec, program: Path, arrays: Arrays) -> tuple[Runner, Collector]:
    device = gpu.open_device() if spec.device == protocol.GPU else tvm.runtime.cpu()
    _, function = load(program, spec.entry)
    tensors = _tensors(arrays, device)

    def run() -> list[Any]:
        function(*tensors)
        if spec.device == protocol.GPU:
            device.sync()
        return tensors

    return run, _collect


def _load_relax_vm(
    spec: RunSpec, program: Path, arrays: Arrays
) -> tuple[Runner, Collector, Callable[[], Profile] | None]:
    device = gpu.open_device() if spec.device == protocol.GPU else tvm.runtime.cpu()
    module = load_module(program)
    if not module.implements_function("vm_load_executable"):
        raise LoadError("the library holds no Relax VM program")
    try:
        machine = VirtualMachine(module, device)
        function = machine[spec.entry]
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        raise LoadError(f"the program has no function {spec.entry!r}: {error}") from error
    feeds = itertools.cycle([_tensors(each, device) for each in unstack(spec, arrays)])
    if spec.device == protocol.CPU:
        return (
            lambda: function(*next(feeds)),
            _collect,
            lambda: profile(machine, lambda: function(*next(feeds)), spec.runs),
        )

    def run() -> Any:
        result = function(*next(feeds))
        device.sync()  # launches are queued: without it only the queueing is timed
        return result

    return run, _collect, None


def _collect(result: Any) -> list[NDArray[Any]]:
    """Copy the tensors in a result: one, or nested tuples of them; other values are dropped."""
    if hasattr(result, "numpy"):
        return [result.numpy()]
    if isinstance(result, str | bytes) or not hasattr(result, "__len__"):
        return []
    return [array for item in result for array in _collect(item)]
