"""What a machine can do at best, as kernels timed as candidates are: arithmetic in registers, and a plain copy.

Benchmarks time them in the same run, in turns with their own kernels, and say a share of them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import _machine

from device_agent.protocol import Limits, MeasureSpec, Status, TensorSpec
from farm.measure.blocking import BlockingSession
from farm.search import tvm_env
from farm.search.codegen import lowering
from farm.search.tuners.decisions import derive_traits
from farm.settings import Settings

# One FMA starts per pipe and cycle and has its sum 4 to 5 cycles later, in up to two pipes:
# twelve independent sums keep them full, and leave registers for the operands where there are sixteen.
_SUMS = 12
# A quarter of a millisecond at 100 GFLOPS: long against a call, short against a time slice.
_STEPS = 65_536
# Many and short, so that one of them has all cores to itself even on a machine that others use.
_PEAK_SAMPLES = 40
# What is moved at a time; a line of the cache.
_LINE_FLOATS = 16

# `sums` never leaves the registers. Halving it each time and adding keeps values near 2 * y: neither infinite nor tiny.
_ARITHMETIC = """
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(y: T.Buffer(({lanes},), "float32"), z: T.Buffer(({threads}, {sums}, {lanes}), "float32")):
        T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
        for thread in T.parallel({threads}):
            sums = T.alloc_buffer(({sums}, {lanes}), scope="local")
            for one in T.unroll({sums}):
                for lane in T.vectorized({lanes}):
                    sums[one, lane] = y[lane]
            for step in range({steps}):
                for one in T.unroll({sums}):
                    for lane in T.vectorized({lanes}):
                        sums[one, lane] = sums[one, lane] * T.float32(0.5) + y[lane]
            for one in T.unroll({sums}):
                for lane in T.vectorized({lanes}):
                    z[thread, one, lane] = sums[one, lane]
"""

_COPY = """
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(
        x: T.Buffer(({threads}, {lines}, {line}), "float32"),
        y: T.Buffer(({threads}, {lines}, {line}), "float32"),
    ):
        T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
        for thread in T.parallel({threads}):
            for one in range({lines}):
                for lane in T.vectorized({line}):
                    y[thread, one, lane] = x[thread, one, lane]
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A program for `threads` threads. `flop` is per call, an FMA counted as two."""

    library: bytes = dataclasses.field(repr=False)
    arguments: tuple[TensorSpec, ...]
    threads: int
    flop: float = 0.0


def arithmetic(target: Mapping[str, Any], threads: int) -> Kernel:
    """FMAs of full vectors and nothing else."""
    lanes = derive_traits(target).vector_bits // 32
    text = _ARITHMETIC.format(lanes=lanes, threads=threads, sums=_SUMS, steps=_STEPS)
    arguments = ((lanes,), (threads, _SUMS, lanes))
    return Kernel(_build(text, target), _floats(arguments), threads, flop=2.0 * _STEPS * _SUMS * lanes * threads)


def copy(target: Mapping[str, Any], threads: int, size_bytes: int) -> Kernel:
    """A buffer of about `size_bytes` copied to another one."""
    lines = max(1, round(size_bytes / (4 * _LINE_FLOATS * threads)))
    shape = (threads, lines, _LINE_FLOATS)
    text = _COPY.format(threads=threads, lines=lines, line=_LINE_FLOATS)
    return Kernel(_build(text, target), _floats((shape, shape)), threads)


def _build(text: str, target: Mapping[str, Any]) -> bytes:
    tvm = tvm_env.load_compiler()
    from tvm.script import from_source

    return lowering.build_candidate(tvm.ir.save_json(from_source(text)), target)


def _floats(shapes: Sequence[tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(shape, "float32") for shape in shapes)


def fetch_least_s(session: BlockingSession, settings: Settings, kernel: Kernel, samples: int = 10) -> float:
    """Seconds per call in the best of so many samples. Raises RuntimeError where it fails."""
    return min(_fetch(session, settings, kernel, samples, settings.measure_min_repeat_s / 10))


def fetch_trial_s(session: BlockingSession, settings: Settings, kernel: Kernel) -> float:
    """Seconds per call as a trial has them. Raises RuntimeError where it fails."""
    repeat, min_repeat_s = settings.measure_repeat, settings.measure_min_repeat_s
    return statistics.median(_fetch(session, settings, kernel, repeat, min_repeat_s, cold_weights=True))


def _fetch(
    session: BlockingSession,
    settings: Settings,
    kernel: Kernel,
    repeat: int,
    min_repeat_s: float,
    *,
    cold_weights: bool = False,
) -> tuple[float, ...]:
    spec = MeasureSpec(
        arguments=kernel.arguments,
        repeat=repeat,
        min_repeat_s=min_repeat_s,
        cold_weights=cold_weights,
        limits=Limits(settings.measure_timeout_s, settings.measure_memory_bytes, kernel.threads),
    )
    outcome = session.measure(spec, kernel.library)
    if outcome.status is not Status.OK:
        raise RuntimeError(f"a kernel was not measured: {outcome.status} {outcome.message}")
    return outcome.latency_s


class Peaks:
    """The least times seen of each kernel; `measure` again and again between other work, and ask in the end."""

    def __init__(self, target: Mapping[str, Any], threads: Sequence[int], copy_bytes: Sequence[int] = ()) -> None:
        self._arithmetic = {count: arithmetic(target, count) for count in threads}
        self._copies = {(count, size): copy(target, count, size) for count in threads for size in copy_bytes}
        self._least_s: dict[Kernel, float] = {}

    def measure(self, session: BlockingSession, settings: Settings) -> None:
        """Time each kernel once."""
        for kernel in (*self._arithmetic.values(), *self._copies.values()):
            seconds = fetch_least_s(session, settings, kernel, _PEAK_SAMPLES)
            self._least_s[kernel] = min(seconds, self._least_s.get(kernel, math.inf))

    def flop_per_s(self, threads: int) -> float:
        """Of all threads together, an FMA counted as two."""
        kernel = self._arithmetic[threads]
        return kernel.flop / self._least_s[kernel]

    def copy_s(self, threads: int, size_bytes: int) -> float:
        """Seconds that a plain copy of so much takes with up to so many threads: waking them may take longer."""
        return min(
            self._least_s[kernel]
            for (count, size), kernel in self._copies.items()
            if count <= threads and size == size_bytes
        )

    @property
    def summary(self) -> dict[str, Any]:
        """What benchmarks say of them, by number of threads."""
        result: dict[str, Any] = {}
        for count in self._arithmetic:
            copies = {
                size: {
                    "us": _machine.round_to(self.copy_s(threads, size) * 1e6),
                    "gb_per_s": _machine.round_to(2 * size / self.copy_s(threads, size) / 1e9),
                }
                for threads, size in self._copies
                if threads == count
            }
            result[str(count)] = {"gflops": _machine.round_to(self.flop_per_s(count) / 1e9), "copy_bytes": copies}
        return result
