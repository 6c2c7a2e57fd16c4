"""Micro-kernels that ask a core what it can do: its clock, multiply-adds, loads, caches, memory and parallel regions.

Written down, never searched for, and compiled as candidates are. When they are run, and what their times say of a core,
is `farm.services.core_probe`'s business; kernels that price a board in the emulator's terms are `streams`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.errors import PermanentError
from farm.search.build.builder import try_to_build
from farm.search.cores import Core

ENTRY = "main"
# Of every cache that boards have.
LINE_BYTES = 64
# A call takes a tenth of a millisecond and more on the slowest core: long against what a call itself costs.
_TURNS, _UNROLLED, _REGIONS = 4096, 16, 64
# What is multiplied: small enough for any first cache.
_STEPS = 64
# A tile of sums: as many rows, and vectors by the core's registers, of which it leaves some for what is multiplied.
_TILE_ROWS, _TILE_VECTORS = 4, {16: 3, 32: 4}
_READERS = 12  # sums of a kernel that reads
_READ_BYTES = 2 << 20  # in a call, at least
_SEED = 29

Arrays = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class CoreKernel:
    """A kernel as text, for so many threads. `make_inputs` takes the bytes that each of them goes through.

    `count` says how many of what is asked for a call of it takes, one after the other, of each thread.
    """

    source: str = dataclasses.field(repr=False)
    make_inputs: Callable[[int], Arrays]
    count: Callable[[int], float]
    threads: int = 1


def build(sources: Mapping[str, str], target: Mapping[str, Any]) -> dict[str, bytes]:
    """The libraries of kernels' texts, by name. Loads TVM's compiler: for a process apart. Raises PermanentError."""
    from farm.search import tvm_env

    tvm = tvm_env.load_compiler()
    from tvm.script import from_source

    built = {}
    for name, source in sources.items():
        status, library, reason = try_to_build(tvm.ir.save_json(from_source(source)), target, standalone=True)
        if not library:
            raise PermanentError(f"the kernel that asks a core for its {name} cannot be built: {status}: {reason}")
        built[name] = library
    return built


def list_kernels(core: Core, threads: int) -> dict[str, CoreKernel]:
    """All kernels for a core, by what they ask for; those of several threads only where there are some.

    `clock`: cycles. `latency`: multiply-adds, each of which waits for the one before. `products`: multiply-adds of full
    vectors. `reads`, `shared reads`: bytes. `chase`: loads, each of which waits for the one before, of lines in random
    order. `regions`: parallel regions.
    """
    lanes = core.vector_bits // 32
    kernels = {
        "clock": _ask_clock(),
        "latency": _ask_latency(lanes),
        "products": _ask_products(lanes, _TILE_VECTORS[core.vector_registers]),
        "reads": _ask_reads(lanes, 1),
        "chase": _ask_chase(),
    }
    if threads > 1:
        kernels |= {"shared reads": _ask_reads(lanes, threads), "regions": _ask_regions(threads)}
    return kernels


def _ask_clock() -> CoreKernel:
    # Two instructions, each of which needs what the one before gave: two cycles on any core, whatever else it can do.
    body = f"""
        one = T.alloc_buffer((1,), "int64", scope="local")
        one[0] = x[0]
        for turn in range({_TURNS}):
            for step in T.unroll({_UNROLLED}):
                one[0] = T.bitwise_xor(one[0], x[0]) + x[1]
        z[0] = one[0]"""
    given = {"x": np.array([12345, 999], "int64"), "z": np.zeros(1, "int64")}
    return _make('x: T.Buffer((2,), "int64"), z: T.Buffer((1,), "int64")', body, given, 2.0 * _TURNS * _UNROLLED)


def _ask_latency(lanes: int) -> CoreKernel:
    # Products come early, since they need no sum; a sum needs the one before.
    turns = _TURNS // _STEPS
    body = f"""
        total = T.alloc_buffer(({lanes},), "float32", scope="local")
        for lane in T.vectorized({lanes}):
            total[lane] = T.float32(0)
        for turn, row in T.grid({turns}, {_STEPS}):
            for step in T.unroll({_UNROLLED}):
                for lane in T.vectorized({lanes}):
                    total[lane] = total[lane] + x[row, step, lane] * y[lane]
        for lane in T.vectorized({lanes}):
            z[lane] = total[lane]"""
    shape = (_STEPS, _UNROLLED, lanes)
    header = f'x: T.Buffer({shape}, "float32"), y: T.Buffer(({lanes},), "float32"), z: T.Buffer(({lanes},), "float32")'
    given = {"x": _floats(shape), "y": _floats((lanes,)), "z": np.zeros(lanes, "float32")}
    return _make(header, body, given, 1.0 * _TURNS * _UNROLLED)


def _ask_products(lanes: int, vectors: int) -> CoreKernel:
    # As in a matrix product: a sum that is its own addend is what instructions are made for, and its factors change.
    tile = f"{_TILE_ROWS}, {vectors}, {lanes}"
    body = f"""
        total = T.alloc_buffer(({tile}), "float32", scope="local")
        for row in T.unroll({_TILE_ROWS}):
            for one in T.unroll({vectors}):
                for lane in T.vectorized({lanes}):
                    total[row, one, lane] = T.float32(0)
        for turn, step in T.grid({_TURNS // _STEPS}, {_STEPS}):
            for row in T.unroll({_TILE_ROWS}):
                for one in T.unroll({vectors}):
                    for lane in T.vectorized({lanes}):
                        total[row, one, lane] = total[row, one, lane] + x[step, row] * y[step, one, lane]
        for row in T.unroll({_TILE_ROWS}):
            for one in T.unroll({vectors}):
                for lane in T.vectorized({lanes}):
                    z[row, one, lane] = total[row, one, lane]"""
    shapes = {"x": (_STEPS, _TILE_ROWS), "y": (_STEPS, vectors, lanes), "z": (_TILE_ROWS, vectors, lanes)}
    header = ", ".join(f'{name}: T.Buffer({shape}, "float32")' for name, shape in shapes.items())
    given = {name: _floats(shape) for name, shape in shapes.items()}
    return _make(header, body, given, 1.0 * _TURNS * _TILE_ROWS * vectors)


def _ask_reads(lanes: int, threads: int) -> CoreKernel:
    # Integers: sums of floats wait longer for each other than a cache takes.
    row = f"{_READERS}, {lanes}"
    body = f"""
        rows, turns = T.int32(), T.int32()
        x = T.match_buffer(xs, ({threads}, rows, {row}), "int32")
        again = T.match_buffer(agains, (turns,), "int32")
        z = T.match_buffer(zs, ({threads}, {row}), "int32")
        for thread in T.parallel({threads}):
            total = T.alloc_buffer(({row}), "int32", scope="local")
            for one in T.unroll({_READERS}):
                for lane in T.vectorized({lanes}):
                    total[one, lane] = 0
            for turn, line in T.grid(turns, rows):
                for one in T.unroll({_READERS}):
                    for lane in T.vectorized({lanes}):
                        total[one, lane] = T.bitwise_xor(total[one, lane], x[thread, line, one, lane])
            for one in T.unroll({_READERS}):
                for lane in T.vectorized({lanes}):
                    z[thread, one, lane] = total[one, lane]"""
    row_bytes = _READERS * lanes * 4

    def plan(size_bytes: int) -> tuple[int, int]:
        rows = max(1, size_bytes // row_bytes)
        return rows, max(1, _READ_BYTES // (rows * row_bytes))

    def make_inputs(size_bytes: int) -> Arrays:
        rows, turns = plan(size_bytes)
        values = np.random.default_rng(_SEED).integers(0, 1 << 30, (threads, rows, _READERS, lanes), "int32")
        return {"x": values, "again": np.zeros(turns, "int32"), "z": np.zeros((threads, _READERS, lanes), "int32")}

    source = _write("xs: T.handle, agains: T.handle, zs: T.handle", body)
    return CoreKernel(source, make_inputs, lambda size_bytes: 1.0 * row_bytes * math.prod(plan(size_bytes)), threads)


def _ask_chase() -> CoreKernel:
    body = f"""
        count = T.int32()
        x = T.match_buffer(xs, (count,), "int32")
        z = T.match_buffer(zs, (1,), "int32")
        one = T.alloc_buffer((1,), "int32", scope="local")
        one[0] = 0
        for turn in range({_TURNS}):
            for step in T.unroll({_UNROLLED}):
                one[0] = x[one[0]]
        z[0] = one[0]"""
    words = LINE_BYTES // 4

    def make_inputs(size_bytes: int) -> Arrays:
        """One word of each line names the next one, and all lines are in the circle."""
        lines = size_bytes // LINE_BYTES
        order = np.random.default_rng(_SEED).permutation(lines)
        following = np.zeros(lines * words, "int32")
        following[order * words] = np.roll(order, -1) * words
        return {"x": following, "z": np.zeros(1, "int32")}

    return CoreKernel(
        _write("xs: T.handle, zs: T.handle", body), make_inputs, lambda size_bytes: 1.0 * _TURNS * _UNROLLED
    )


def _ask_regions(threads: int) -> CoreKernel:
    body = f"""
        for region in range({_REGIONS}):
            for thread in T.parallel({threads}):
                for lane in T.vectorized(16):
                    z[thread, lane] = z[thread, lane] + T.float32(1)"""
    header = f'z: T.Buffer(({threads}, 16), "float32")'
    return _make(header, body, {"z": np.zeros((threads, 16), "float32")}, 1.0 * _REGIONS, threads)


def _make(header: str, body: str, given: Arrays, count: float, threads: int = 1) -> CoreKernel:
    return CoreKernel(_write(header, body), lambda size_bytes: given, lambda size_bytes: count, threads)


def _write(header: str, body: str) -> str:
    """A module in TVMScript, whose only function is made of `body`."""
    return f"""
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main({header}):
        T.func_attr({{"global_symbol": "{ENTRY}", "tirx.noalias": True}}){body}
"""


def _floats(shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.random.default_rng(_SEED).standard_normal(shape).astype("float32")
