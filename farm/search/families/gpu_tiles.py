"""Contractions on GPUs: block tiles in shared memory, thread tiles in registers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import WARP, count_fetched
from farm.search.families import facts as reading
from farm.search.families import gpu_cost
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction
from farm.search.families.gpu_cost import Blocks
from farm.search.gpus import TargetGpu

# Below this, threads that share reductions are faster (`gpu_flat.py`).
_FEWEST_PIXELS = 4


class GpuTiles:
    """Dense convolutions and matrix products, also batched.

    A block has `wide` threads along channels, and `high` by `far` along rows and columns of pixels. Each thread has
    `channels` x `rows` x `columns` results. `steps` of the innermost reduction loop are staged at a time.
    """

    name = "gpu-tiles"

    def read(self, schedule: Any) -> Contraction | None:
        found = reading.read_contraction(schedule)
        if found is None or found.group or len(found.channels) != 1 or not found.pixels or not found.sums:
            return None
        if math.prod(axis.extent for axis in found.pixels) < _FEWEST_PIXELS or found.element_bytes != 4:
            return None
        after = [name for name in (*found.between, found.last) if name != found.main]
        return found if all(gpu_cost.writes_once(schedule, name) for name in after) else None

    def options(self, facts: Contraction, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        rows, columns = _area(facts)
        wide = tuple(n for n in (4, 8, 16, 32) if n <= max(4, facts.channel))
        return {
            "wide": wide,
            "channels": tuple(n for n in (1, 2, 4, 8) if n * 4 <= max(4, facts.channel)),
            "high": tuple(n for n in (1, 2, 4, 8) if n <= rows) or (1,),
            "far": tuple(n for n in (1, 2, 4, 7, 8, 14, 16) if n <= columns),
            "rows": tuple(n for n in ((1, 2, 3) if _is_lost(facts, 2) else (1, 2)) if n <= rows) or (1,),
            "columns": tuple(n for n in (1, 2, 4, 7, 8) if n <= columns),
            "steps": tuple(n for n in (4, 8, 16, 32) if facts.sums[-1].extent % n == 0) or (facts.sums[-1].extent,),
        }

    def predict(self, facts: Contraction, plan: Plan, core: TargetGpu) -> Prediction | None:
        threads = plan["wide"] * plan["high"] * plan["far"]
        if threads < WARP or threads > 512:
            return None
        rows, columns = _area(facts)
        tile_rows, tile_columns = plan["high"] * plan["rows"], plan["far"] * plan["columns"]
        tile_channels = plan["wide"] * plan["channels"]
        if tile_rows >= 2 * rows or tile_columns >= 2 * columns or tile_channels >= 2 * facts.channel + 4:
            return None
        if _is_lost(facts, tile_rows):
            return None
        parts = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        outer = math.prod(axis.extent for axis in (*facts.batch, *facts.pixels[:-2]))
        blocks = outer * parts * math.ceil(facts.channel / tile_channels)
        kernel = facts.depth // facts.sums[-1].extent
        stages = math.ceil(facts.sums[-1].extent / plan["steps"])
        values = plan["rows"] * plan["columns"]
        own = values * plan["channels"]
        sizes = [tile_columns, tile_rows][: len(facts.pixels)]
        spans = zip(sizes, reversed(facts.stride), reversed(facts.reach), strict=False)
        data = math.prod((size - 1) * stride + reach for size, stride, reach in spans) * plan["steps"]
        weights = kernel * plan["steps"] * tile_channels
        steps = kernel * stages * plan["steps"]
        warps = math.ceil(threads / WARP)
        # Per step a thread reads its pixels one by one and its channels as vectors of up to four.
        read = values * min(8, max(1, WARP // plan["wide"])) ** 0.25 + math.ceil(plan["channels"] / 4) * _turns(plan)
        fetched = stages * (data + weights) / threads
        moved = blocks * (stages * (data + weights) + tile_rows * tile_columns * tile_channels) * 4.0
        data_asked, weights_asked = blocks * stages * data * 4.0, blocks * stages * weights * 4.0
        work = Blocks(
            blocks=blocks,
            threads=threads,
            multiplied=steps * own,
            others=steps * (values + plan["channels"] / 4 + 1) + fetched * (8 if facts.pad else 4) + own * 4,
            held=own + values + plan["channels"],
            waits=stages,
            moved_bytes=moved,
            far_bytes=count_fetched(data_asked, facts.data_bytes, core.unit.cache_bytes)
            + count_fetched(weights_asked, facts.weight_bytes, core.unit.cache_bytes)
            + facts.result_bytes,
            shared_bytes=(data + weights) * 4,
            shared_turns=warps * steps * read + stages * (data + weights) / WARP,
            barriers=2 * stages,
        )
        return gpu_cost.predict(work, core)

    def apply(self, schedule: Any, facts: Contraction, plan: Plan) -> None:
        """Tile the block of the result, compute the contraction inside, stage its operands."""
        main = schedule.get_sblock(facts.main)
        held = None
        if facts.pad and len(facts.sums) > 1 and not reading.is_moved(schedule, facts.pad):
            # Padding while staging checks each element once, and TVM sees the staged region.
            held = schedule.get_sblock(facts.pad)
            schedule.set_scope(held, 0, "shared")
        elif facts.pad:
            schedule.compute_inline(schedule.get_sblock(facts.pad))
        for name in facts.between:
            schedule.compute_inline(schedule.get_sblock(name))
        if len(facts.sums) == 1:
            # Index by the block's own loops: fused rows and columns of pixels would be staged as whole rows.
            held = schedule.reindex(main, ("read", facts.data_at))
            schedule.set_scope(held, 0, "shared")
        last = schedule.cache_write(main, 0, "local") if facts.last == facts.main else schedule.get_sblock(facts.last)
        if facts.last != facts.main:
            schedule.set_scope(main, 0, "local")
        *before, channel = schedule.get_loops(last)
        pixels = before[-min(2, len(facts.pixels)) :]
        blocks, threads, own = list(before[: len(before) - len(pixels)]), [], []
        factors = [(plan["high"], plan["rows"]), (plan["far"], plan["columns"])][-len(pixels) :]
        for loop, (shared, kept) in zip(pixels, factors, strict=True):
            block, thread, inner = schedule.split(loop, [None, shared, kept])
            blocks.append(block)
            threads.append(thread)
            own.append(inner)
        block, thread, vector = schedule.split(channel, [None, plan["wide"], plan["channels"]])
        schedule.reorder(*blocks, block, *threads, thread, *own, vector)
        schedule.bind(schedule.fuse(*blocks, block), "blockIdx.x")
        inside = schedule.fuse(*threads, thread)
        schedule.bind(inside, "threadIdx.x")
        if plan["channels"] > 1:
            lanes = min(4, plan["channels"])
            schedule.vectorize(schedule.split(vector, [None, lanes])[-1])
        schedule.compute_at(main, inside, preserve_unit_loops=True)
        mine = schedule.get_loops(main)[-len(schedule.get(main).iter_vars) :]
        sums = [mine[axis.at] for axis in facts.sums]
        results = [loop for at, loop in enumerate(mine) if at not in {axis.at for axis in facts.sums}]
        stage, step = schedule.split(sums[-1], [None, plan["steps"]])
        schedule.reorder(stage, *sums[:-1], step, *results)
        staged = [
            held if held and at == facts.data_at else schedule.cache_read(main, at, "shared")
            for at in range(len(schedule.get(main).reads))
        ]
        total = plan["wide"] * plan["high"] * plan["far"]
        for copy in staged:
            schedule.compute_at(copy, stage, preserve_unit_loops=True)
            gpu_cost.give_to_threads(schedule, copy, total, 1)
        schedule.decompose_reduction(main, stage)


def _area(facts: Contraction) -> tuple[int, int]:
    """Return rows and columns of pixels; one row where they are one loop."""
    rows = facts.pixels[-2].extent if len(facts.pixels) > 1 else 1
    return rows, facts.pixels[-1].extent


def _is_lost(facts: Contraction, tile_rows: int) -> bool:
    """Say whether TVM would stage all data, since the last tile exceeds rows that a stride of 2 leaves partly unread.

    Seen for 224 rows, of which 111 results need 223.
    """
    if len(facts.pixels) < 2 or len(facts.sums) < 2:
        return False
    rows, stride, reach = facts.pixels[-2].extent, facts.stride[-2], facts.reach[-2]
    return rows % tile_rows != 0 and (rows - 1) * stride + reach < facts.room[-2]


def _turns(plan: Plan) -> int:
    """Count the shared-memory accesses for the channel vectors of a warp."""
    return max(1, min(4, plan["channels"]) * min(WARP, plan["wide"]) // WARP)
