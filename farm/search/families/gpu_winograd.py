"""Winograd convolutions on a GPU: one function of three kernels, with their data between them in global memory.

The first kernel pads and transforms data, the second multiplies, the third transforms products and applies the fused
blocks. A thread of a transform computes one tile of one channel in registers; neighbouring threads access neighbouring
channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import START_S
from farm.search.families import facts as reading
from farm.search.families import gpu_cost
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction
from farm.search.families.gpu_tiles import GpuTiles
from farm.search.families.winograd import read_blocks
from farm.search.gpus import TargetGpu
from farm.search.graph import winograd

_PRODUCTS = GpuTiles()
# 64 to 512 threads of a transform were estimated equal within a tenth.
_THREADS = 128
# The share of loads of data that miss L1, since tiles overlap. Fitted to estimates on a Nano.
_MISSED = 0.5


@dataclasses.dataclass(frozen=True)
class JoinedWinograd:
    """A convolution F(m, 3) as `farm.search.graph.winograd.make_joined` writes it.

    `blocks` are the six of the algorithm; `between` are all others before `last`, which writes the result. `products`
    are the multiplications of all tiles. Sizes are in bytes.
    """

    m: int
    blocks: tuple[str, ...]
    between: tuple[str, ...]
    last: str
    products: Contraction
    data_bytes: int
    result_bytes: int


class GpuWinograd:
    """Family of Winograd convolutions on a GPU; its knobs are those of the products' tiles."""

    name = "gpu-winograd"

    def read(self, schedule: Any) -> JoinedWinograd | None:
        """Read a function whose fourth block has Winograd's mark, with element-wise blocks after the sixth."""
        found = read_blocks(schedule)
        if found is None:
            return None
        names, m = found
        count = len(winograd.BLOCKS)
        products = reading.read_contraction(schedule, [names[count - 3]])
        blocks = [schedule.get(schedule.get_sblock(name)) for name in names]
        shapes = [[int(v.dom.extent) for v in block.iter_vars] for block in blocks[count - 1 :]]
        if products is None or len(products.pixels) != 1 or any(shape != shapes[0] for shape in shapes):
            return None
        if not all(gpu_cost.writes_once(schedule, name) for name in names[count - 1 :]):
            return None
        return JoinedWinograd(
            m=m,
            blocks=tuple(names[:count]),
            between=tuple(names[count - 1 : -1]),
            last=names[-1],
            products=products,
            data_bytes=reading.size_of(schedule.mod["main"].params[0]),
            result_bytes=reading.size_of(blocks[-1].writes[0].source),
        )

    def options(self, facts: JoinedWinograd, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        return _PRODUCTS.options(facts.products, core)

    def predict(self, facts: JoinedWinograd, plan: Plan, core: TargetGpu) -> Prediction | None:
        """Add the transforms, which L2 and memory bound, to the products."""
        products = _PRODUCTS.predict(facts.products, plan, core)
        if products is None:
            return None
        tiles = facts.products
        forth = _move(tiles.data_bytes * (1 + _MISSED), facts.data_bytes + tiles.data_bytes, core)
        back = _move(tiles.result_bytes + facts.result_bytes, tiles.result_bytes + facts.result_bytes, core)
        terms = {**products.terms, "transforms": (forth + back) * core.freq_hz}
        return Prediction(products.seconds + forth + back, {**terms, "kernels": 3.0})

    def apply(self, schedule: Any, facts: JoinedWinograd, plan: Plan) -> None:
        """Give each transform a kernel before and after the one of the products, and unroll a tile's own loops."""
        pad, strips, tiles, _, lines, _ = (schedule.get_sblock(name) for name in facts.blocks)
        for name in facts.between:
            schedule.compute_inline(schedule.get_sblock(name))
        i, j, tile, channel = schedule.get_loops(tiles)
        thread = _bind(schedule, (tile, channel), (i, j))
        for block in (strips, pad):
            _hold(schedule, block, thread)
        _PRODUCTS.apply(schedule, facts.products, plan)
        image, row, column, channel = schedule.get_loops(schedule.get_sblock(facts.last))
        row, y = schedule.split(row, [None, facts.m])
        column, x = schedule.split(column, [None, facts.m])
        _hold(schedule, lines, _bind(schedule, (image, row, column, channel), (y, x)))


def _move(near_bytes: float, far_bytes: float, core: TargetGpu) -> float:
    """Estimate the seconds of a kernel that moves data past L1, a part of them to or from memory."""
    near_s = near_bytes / (gpu_cost.PORT_BYTES * core.processors * core.freq_hz)
    return max(near_s, far_bytes / core.memory_bytes_per_s) + START_S


def _bind(schedule: Any, outer: Sequence[Any], inner: Sequence[Any]) -> Any:
    """Give each step of the `outer` loops a thread that unrolls the `inner` ones; return the threads' loop."""
    schedule.reorder(*outer, *inner)
    block, thread = schedule.split(schedule.fuse(*outer), [None, _THREADS])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    for loop in inner:
        schedule.unroll(loop)
    return thread


def _hold(schedule: Any, block: Any, thread: Any) -> None:
    """Compute a block in registers of a thread."""
    schedule.compute_at(block, thread, preserve_unit_loops=True)
    schedule.set_scope(block, 0, "local")
    for loop in schedule.get_loops(block)[-len(schedule.get(block).iter_vars) :]:
        schedule.unroll(loop)
