"""Time one candidate, inside a worker process: load its library, fill arguments, warm up, sample."""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tvm.runtime

from device_agent import protocol
from device_agent.platforms import gpu
from device_agent.protocol import Outcome, Status
from device_agent.worker import arguments
from device_agent.worker.plan import Candidate, HostPace, LoadError, Plan

# A model writes a result into memory that was used a few results before; its size decides whether a near cache still
# has it. Results larger than all caches need no more.
_RESULTS, _MOST_BYTES = 4, 16 << 20


# A sample aimed exactly at the wanted length falls short half of the time.
_GROWTH_MARGIN = 1.2
# Lazy paging of a kernel may mislead one sample about the number of calls, but not three rounds.
_MAX_ROUNDS = 8
# TVM's evaluator makes one uncounted call, and so does `Place`.
_CALLS_BESIDE = 1


class _Group(ctypes.Structure):
    """TVM's `TVMParallelGroupEnv`."""

    _fields_ = (("sync_handle", ctypes.c_void_p), ("tasks", ctypes.c_int32))


# TVM's `FTVMParallelLambda`: task number, task group, the launcher's data.
_Task = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Group), ctypes.c_void_p)


class Place:
    """Calls of a function on the CPU, with all arguments but its weights in the caches of a model's run.

    `beside_s`: the time between two calls (s) in the last run.
    """

    def __init__(self, arguments: list[Any]) -> None:
        """`arguments` are the function's, the result last."""
        self.beside_s = 0.0
        self._produce = make_producer(arguments[0])
        self._results = itertools.cycle(copy_result(arguments[-1]))

    def run(self, function: Any, following: Iterator[list[Any]], calls: int) -> float:
        """Seconds per call, each with the next set of arguments; one extra call is not counted."""
        taken_s = began = 0.0
        for number in range(calls + 1):
            *given, _ = next(following)
            self._produce()
            begun = time.perf_counter()
            function(*given, next(self._results))
            ended = time.perf_counter()
            if number:
                taken_s += ended - begun
            else:
                began = ended
        self.beside_s = (ended - began - taken_s) / calls
        return taken_s / calls


def make_producer(tensor: Any) -> Callable[[], None]:
    """Make a function that rewrites a tensor in parallel, as the previous layer would.

    TVM's threads run the candidate too, and always run the same part of a parallel loop.
    """
    source = tvm.runtime.empty(tensor.shape, tensor.dtype, tvm.runtime.cpu())
    tensor.copyto(source)
    size = count_bytes(tensor)

    def write(task: int, group: Any, _: Any) -> int:
        first, end = (size * at // group.contents.tasks for at in (task, task + 1))
        ctypes.memmove(tensor.data_ptr() + first, source.data_ptr() + first, end - first)
        return 0

    launch, task = ctypes.CDLL(None).TVMBackendParallelLaunch, _Task(write)

    return lambda: launch(task, None, 0)


def copy_result(tensor: Any) -> list[Any]:
    """A tensor and copies of it, for calls to rotate through."""
    size = count_bytes(tensor)
    count = min(_RESULTS, 1 + _MOST_BYTES // max(1, size))
    found = [tensor, *(tvm.runtime.empty(tensor.shape, tensor.dtype, tvm.runtime.cpu()) for _ in range(count - 1))]
    for each in found:
        ctypes.memset(each.data_ptr(), 0, size)  # touch the pages, which must not be timed
    return found


def count_bytes(tensor: Any) -> int:
    """Bytes of a tensor."""
    return int(math.prod(tensor.shape) * tensor.dtype.itemsize)


def load_module(path: Path) -> Any:
    """Load the library at `path`. Raises LoadError with the loader's message."""
    try:
        return tvm.runtime.load_module(str(path))
    except (RuntimeError, OSError, ValueError) as error:
        text = str(error)
        if "bad_alloc" in text or "Cannot allocate memory" in text:
            raise MemoryError(text) from error
        raise LoadError(text.replace(f"{path} ", "")) from error


def load(path: Path, entry: str) -> tuple[Any, Any]:
    """Load the library at `path`; return it and its function `entry`. Raises LoadError."""
    module = load_module(path)
    try:
        return module, module[entry]
    except AttributeError as error:
        raise LoadError(f"the library has no function {entry!r}") from error


def time_candidate(spec: protocol.MeasureSpec, library: Path, plan: Plan) -> Outcome:
    """Measure one candidate; this process may not survive it. Raises LoadError, MemoryError, TVM's errors.

    At least one call precedes the first sample, even with `warmup` 0: TVM's evaluator always drops one. With
    `cold_weights` calls rotate through copies of the large arguments (`arguments.allocate_turns`), and on a real
    board's CPU each finds its other data as in a model (`in_place`).
    """
    candidate: Candidate
    if plan.emulator is not None:
        candidate = plan.emulator.load_candidate(spec, library.read_bytes(), plan.pace)
    else:
        candidate = _Native(spec, library, in_place=isinstance(plan.pace, HostPace))
    plan.marks.set("loaded_s", time.monotonic())
    plan.rest()
    before = plan.sensors.read()
    plan.marks.set("running_s", time.monotonic())
    started_s = plan.mark("timing_start_s")
    cpu_started_s, host_started_s = time.process_time(), time.monotonic()
    set_s = plan.pace.begin()
    real = isinstance(plan.pace, HostPace)
    candidate.warm_up(spec.warmup - 1 if real else 0)

    def sample(number: int, repeat: int) -> list[float]:
        if real:
            return candidate.evaluate(number, repeat)
        return [plan.pace.take(candidate.run, number, _CALLS_BESIDE) for _ in range(repeat)]

    number = 1 if set_s else spec.number
    samples = sample(number, spec.repeat)
    if spec.min_repeat_s > 0 and not set_s:
        for _ in range(_MAX_ROUNDS):
            call_s = statistics.median(samples) + candidate.beside_s
            if call_s * number >= spec.min_repeat_s:
                break
            wanted = spec.min_repeat_s * _GROWTH_MARGIN / max(call_s, 1e-9)
            number = max(math.ceil(wanted), number + 1)
            samples = sample(number, spec.repeat)
    plan.pace.settle()
    time.sleep(max(0.0, host_started_s + set_s - time.monotonic()))  # a set time is on this machine's clock
    plan.time.sleep(max(0.0, started_s + set_s - plan.time.now_s()))
    timing_s = plan.mark("timing_end_s") - started_s
    plan.fill_window(candidate.run, statistics.median(samples), _CALLS_BESIDE)
    plan.pace.end()
    plan.marks.set("cpu_s", time.process_time() - cpu_started_s)
    return Outcome(
        Status.OK,
        latency_s=tuple(samples),
        calls_per_sample=number,
        timing_s=timing_s,
        before=before,
        after=plan.sensors.read(),
    )


class _Native:
    """A candidate in this machine's own code."""

    def __init__(self, spec: protocol.MeasureSpec, library: Path, *, in_place: bool) -> None:
        on_gpu = spec.device == protocol.GPU
        self._device = gpu.open_device() if on_gpu else tvm.runtime.cpu()
        self._entry = spec.entry
        self._module, self._function = load(library, spec.entry)
        # A GPU's cache is smaller than most functions' inputs.
        if spec.cold_weights and not on_gpu:
            turns = arguments.allocate_turns(spec.arguments, spec.seed)
        else:
            turns = [arguments.allocate(spec.arguments, spec.seed)]
        if on_gpu:
            turns = [[tvm.runtime.tensor(each.numpy(), self._device) for each in turns[0]]]
        self._turns = turns
        self._following = itertools.cycle(turns)
        in_place = in_place and spec.cold_weights and not on_gpu and len(spec.arguments) > 1
        self._place = Place(turns[0]) if in_place else None

    @property
    def beside_s(self) -> float:
        return self._place.beside_s if self._place else 0.0

    def warm_up(self, calls: int) -> None:
        for _ in range(calls):
            self._function(*self._turns[0])

    def evaluate(self, number: int, repeat: int) -> list[float]:
        if self._place:
            return [self._place.run(self._function, self._following, number) for _ in range(repeat)]
        return self._run_on(number, repeat)

    def run(self, calls: int) -> float:
        return self._run_on(calls, 1)[0]  # an energy window contains only the kernel

    def _run_on(self, number: int, repeat: int) -> list[float]:
        if len(self._turns) > 1:
            return [self._run_in_turns(number) for _ in range(repeat)]
        evaluator = self._module.time_evaluator(self._entry, self._device, number=number, repeat=repeat)
        return list(evaluator(*self._turns[0]).results)

    def _run_in_turns(self, calls: int) -> float:
        self._function(*next(self._following))
        begun = time.perf_counter()
        for _ in range(calls):
            self._function(*next(self._following))
        return (time.perf_counter() - begun) / calls
