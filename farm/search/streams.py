"""Kernels that read: what a board's second cache and its memory give its cores, for whoever prices or fits its core.

Scheduled by hand, never searched for; run beside the golden kernel (`golden.py`). What their times say is decided in
`farm.services.calibrate_model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from farm.errors import PermanentError
from farm.search.build.builder import try_to_build

ENTRY = "main"
_LANES = 16
_SEED = 28


@dataclasses.dataclass(frozen=True)
class Stream:
    """A kernel whose cores read `bytes_each` of their own, so many times over; they sum up lanes."""

    name: str
    bytes_each: int
    times: int

    def make_inputs(self, cores: int) -> dict[str, npt.NDArray[Any]]:
        """Its arguments in order, the result's place last; the same everywhere."""
        values = np.random.default_rng(_SEED).standard_normal((cores, self.bytes_each // 4)).astype("float32")
        return {"arg_000": values, "arg_001": np.zeros((cores, _LANES), "float32")}


# More than any first cache and, for four cores, less than the last one of every type; and more than any last cache.
SECOND_CACHE = Stream("reads of the second cache", 256 << 10, 48)
MEMORY = Stream("reads of memory", 4 << 20, 1)
STREAMS = (SECOND_CACHE, MEMORY)


def build(stream: Stream, target: Mapping[str, Any], cores: int) -> bytes:
    """The kernel's library. Loads TVM's compiler: for a process of its own. Raises PermanentError."""
    status, library, reason = try_to_build(_make_module(stream, cores), target, standalone=True)
    if not library:
        raise PermanentError(f"the kernel that {stream.name} cannot be built: {status}: {reason}")
    return library


def _make_module(stream: Stream, cores: int) -> str:
    """The scheduled function in TVM's JSON."""
    from farm.search import tvm_env

    tvm = tvm_env.load_compiler()
    from tvm import te

    lines = stream.bytes_each // 4 // _LANES
    x = te.placeholder((cores, lines * _LANES), "float32", name="x")
    turn, line = te.reduce_axis((0, stream.times), name="turn"), te.reduce_axis((0, lines), name="line")
    total = te.compute(
        (cores, _LANES), lambda core, lane: te.sum(x[core, line * _LANES + lane], axis=[turn, line]), name="total"
    )
    function = te.create_prim_func([x, total]).with_attr("global_symbol", ENTRY)
    schedule = tvm.s_tir.Schedule(tvm.IRModule({ENTRY: function}))
    block = schedule.get_sblock("total")
    core, lane, turns, lines_ = schedule.get_loops(block)
    schedule.reorder(core, turns, lines_, lane)
    sums = schedule.cache_write(block, 0, "local")
    schedule.reverse_compute_at(sums, core)
    schedule.vectorize(schedule.get_loops(sums)[-1])
    schedule.vectorize(lane)
    schedule.parallel(core)
    schedule.decompose_reduction(block, turns)
    return str(tvm.ir.save_json(schedule.mod))
