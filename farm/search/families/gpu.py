"""The GPU families: tiled contractions, norms, maps whose threads work alone, and reductions that threads share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tvm import tirx

from device_agent.protocol import WARP, count_fetched
from farm.gpu.code import THREADS_PER_BLOCK
from farm.search.families import expressions, gpu_cost, loops, norm
from farm.search.families import facts as reading
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction
from farm.search.families.gpu_cost import Blocks
from farm.search.families.norm import Norm
from farm.search.gpus import TargetGpu

# Below this, threads that share reductions are faster (`GpuSums`).
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


# Assumed warp instructions of an exponential, a root or a division.
_CALL_ISSUED = 10


class GpuNorms:
    """Norms: `shares` threads share a row and a block has `beside` rows.

    Values between the reductions (exponentials) are held in shared memory (`held`) or recomputed by each reader. A row
    is everything that is reduced to one sum. Neighbouring threads access neighbouring elements.
    """

    name = "gpu-norm"

    def read(self, schedule: Any) -> Norm | None:
        found = norm.read_norm(schedule)
        # A mean pool's counts are spread over channels, which it does not reduce: no norm.
        return found if found and found.run == _count_run(found) else None

    def options(self, facts: Norm, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        kept = [facts.extents[at] for at in facts.kept]
        between = any(not sums for sums in facts.sums)
        # Rows side by side in `threadIdx.y` gave wrong results on a virtual GPU (2 rows of 40, 16 or 64 threads each);
        # the cause is unknown.
        beside = (1,) if facts.rows else (1, 2, 4, 8, 16, 32)
        return {
            "beside": tuple(n for n in beside if gpu_cost.is_whole(n, kept)),
            "shares": tuple(n for n in (1, 8, 16, 32, 64, 128, 256) if n < 2 * facts.run),
            "held": (1, 0) if between else (0,),
        }

    def predict(self, facts: Norm, plan: Plan, core: TargetGpu) -> Prediction | None:
        threads = plan["beside"] * plan["shares"]
        if not WARP <= threads <= 512:
            return None
        rows = math.prod(facts.extents[at] for at in facts.kept)
        steps = math.ceil(facts.run / plan["shares"])
        summing, between = (sum((sums > 0) is wanted for sums in facts.sums) for wanted in (True, False))
        # Recomputed values are computed by every later reduction and by the block that writes the result.
        computed = 1 + between if plan["held"] else 1 + between * (1 + max(0, summing - 1))
        held = facts.run * between * plan["held"] + (summing if facts.rows else 0)
        shared_bytes = plan["beside"] * facts.element_bytes * held
        # One warp reduces by shuffles, several through shared memory.
        turns = 2 * math.log2(max(2, plan["shares"]))
        in_row = min(8, plan["shares"] if facts.rows else plan["beside"])
        passes = 1 + summing
        work = Blocks(
            blocks=math.ceil(rows / plan["beside"]),
            threads=threads,
            multiplied=steps * passes,
            others=steps * (4 * passes + _CALL_ISSUED * computed) + summing * 6 * turns,
            held=4,
            waits=passes * (1 + steps / 8),
            moved_bytes=rows * facts.run * facts.element_bytes * (passes + 1) * 8 / in_row,
            far_bytes=float(facts.moved_bytes),
            shared_bytes=shared_bytes + threads * facts.element_bytes,
            shared_turns=math.ceil(threads / WARP) * (steps * between * plan["held"] * 2 + summing * turns),
            barriers=summing * (2 + (turns if plan["shares"] > WARP else 0)) + between * plan["held"],
        )
        return gpu_cost.predict(work, core)

    def apply(self, schedule: Any, facts: Norm, plan: Plan) -> None:
        """Bind rows to blocks and each row to threads; compute everything before the result at a block's rows."""
        if facts.folded:
            schedule.reverse_compute_inline(schedule.get_sblock(facts.folded))
        for name in facts.inlined:
            schedule.compute_inline(schedule.get_sblock(name))
        left = []
        for name, sums in zip(facts.blocks, facts.sums, strict=True):
            if sums or plan["held"]:
                left.append(name)
            else:
                schedule.compute_inline(schedule.get_sblock(name))
        # Neighbouring threads access contiguous elements.
        of_rows, of_shares = ("threadIdx.y", "threadIdx.x") if facts.rows else ("threadIdx.x", "threadIdx.y")
        own = schedule.get_loops(schedule.get_sblock(facts.last))
        kept = [own[at] for at in facts.kept]
        rest = [loop for at, loop in enumerate(own) if at not in facts.kept]
        schedule.reorder(*kept, *rest)
        at, beside = schedule.split(schedule.fuse(*kept), [None, plan["beside"]])
        _, share = schedule.split(schedule.fuse(*rest), [None, plan["shares"]])
        schedule.bind(at, "blockIdx.x")
        schedule.bind(beside, of_rows)
        schedule.bind(share, of_shares)
        summing = {name for name, sums in zip(facts.blocks, facts.sums, strict=True) if sums}
        for name in reversed(left):
            block = schedule.get_sblock(name)
            # Where `threadIdx.x` counts rows, TVM assumes that the writer of a row's sum also reads it for any
            # `threadIdx.y`, and omits the barrier. Scope "local" gives every thread the sum. Along rows the barrier
            # is emitted, and local sums take up to four times as long (measured on an H200).
            scope = "local" if name in summing and not facts.rows else "shared"
            for index in range(len(schedule.get(block).writes)):
                schedule.set_scope(block, index, scope)
            schedule.compute_at(block, at, preserve_unit_loops=True)
            variables = schedule.get(block).iter_vars
            own = schedule.get_loops(block)[-len(variables) :]
            summed = [loop for loop, v in zip(own, variables, strict=True) if reading.is_sum(v)]
            if summed:
                rows = [loop for loop, v in zip(own, variables, strict=True) if not reading.is_sum(v)]
                schedule.reorder(*rows, *summed)
                schedule.bind(schedule.fuse(*rows), of_rows)
                _, share = schedule.split(schedule.fuse(*summed), [None, plan["shares"]])
                schedule.bind(share, of_shares)
                continue
            outer, inner = (plan["beside"], plan["shares"]) if facts.rows else (plan["shares"], plan["beside"])
            _, high, low = schedule.split(schedule.fuse(*own), [None, outer, inner])
            schedule.bind(high, "threadIdx.y")
            schedule.bind(low, "threadIdx.x")


def _count_run(facts: Norm) -> int:
    """Count the elements of the result that share one sum."""
    return math.prod(extent for at, extent in enumerate(facts.extents) if at not in facts.kept)


# Reductions of at least so many steps, with fewer results than the GPU has threads, are shared among threads.
_LONG, _FEW = 32, 2048


@dataclasses.dataclass(frozen=True)
class Map:
    """A function of at most one reduction, `main`, and blocks around it that write one element per step.

    `inlined` blocks are computed at their readers; `last` writes the result over loops of `extents`. It has `results`
    elements of `element_bytes`, `run` of them contiguous along its last loop. Each takes `depth` steps with `loads`
    loads each. `moved_bytes` is the size of all arguments and the result.
    """

    main: str | None
    inlined: tuple[str, ...]
    last: str
    extents: tuple[int, ...]
    results: int
    run: int
    depth: int
    loads: int
    element_bytes: int
    moved_bytes: int
    follows: bool  # whether a load moves with the last loop


class GpuFlat:
    """One thread computes `each` contiguous results: element-wise functions, pools, depthwise convolutions."""

    name = "gpu-flat"

    def read(self, schedule: Any) -> Map | None:
        return read_map(schedule)

    def options(self, facts: Map, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        each = tuple(n for n in (1, 2, 4) if facts.run % n == 0)
        # TVM computes a reduction inside a thread only where all blocks are full.
        full = sorted({_nearest(facts.extents, n) for n in (64, 128, 256, 512)}) if facts.main else []
        threads = tuple(n for n in full if n >= WARP) or tuple(full[-1:])
        return {"threads": threads or (64, 128, 256, 512), "each": each}

    def predict(self, facts: Map, plan: Plan, core: TargetGpu) -> Prediction | None:
        each = plan["each"]
        if facts.main and not gpu_cost.is_whole(plan["threads"], (*facts.extents[:-1], facts.run // each)):
            return None
        # All threads read the same weights, so a warp's loads are contiguous where results are.
        moved = facts.results * (facts.depth * facts.loads + 1) * facts.element_bytes
        if not facts.follows:
            moved *= 4
        work = Blocks(
            blocks=math.ceil(facts.results / (plan["threads"] * each)),
            threads=plan["threads"],
            multiplied=facts.depth * each,
            others=(facts.depth * (facts.loads + 2)) * (1 if facts.follows else each) + 4 * each + 8,
            held=each * (facts.loads + 1),
            waits=1 + facts.depth / 16,
            moved_bytes=moved,
            far_bytes=float(facts.moved_bytes),
        )
        return gpu_cost.predict(work, core)

    def apply(self, schedule: Any, facts: Map, plan: Plan) -> None:
        last = _prepare(schedule, facts, "local")
        # Split a thread's own elements off first: TVM does not see that a part of one fused loop is contiguous.
        *outer, row = schedule.get_loops(last)
        row, lane = schedule.split(row, [None, plan["each"]])
        block, thread = schedule.split(schedule.fuse(*outer, row), [None, plan["threads"]])
        schedule.bind(block, "blockIdx.x")
        schedule.bind(thread, "threadIdx.x")
        if facts.main:
            main = schedule.get_sblock(facts.main)
            schedule.compute_at(main, thread, preserve_unit_loops=True)
            depth = len(schedule.get(main).iter_vars)
            own = schedule.get_loops(main)[-depth:]
            kinds = [reading.is_sum(v) for v in schedule.get(main).iter_vars]
            sums = [loop for loop, is_sum in zip(own, kinds, strict=True) if is_sum]
            schedule.reorder(*sums, *(loop for loop, is_sum in zip(own, kinds, strict=True) if not is_sum))
            schedule.decompose_reduction(main, sums[0])
        if plan["each"] > 1:
            schedule.vectorize(lane)


class GpuSums:
    """`shares` threads share a reduction and a block has `beside` results: means, products with a vector."""

    name = "gpu-sums"

    def read(self, schedule: Any) -> Map | None:
        found = read_map(schedule)
        if found is None or not found.main or found.depth < _LONG:
            return None
        # Where the reduced elements are contiguous, single threads would read far apart.
        return found if found.results <= _FEW or not found.follows else None

    def options(self, facts: Map, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        in_one_loop = max(facts.extents, default=1) == facts.results
        return {
            # TVM finds a block's results in several loops only where they are whole parts of rows.
            "beside": tuple(
                n
                for n in (1, 4, 8, 16, 32)
                if n <= facts.results and (in_one_loop or gpu_cost.is_whole(n, facts.extents))
            ),
            "shares": tuple(n for n in (8, 16, 32, 64, 128, 256) if n <= 2 * facts.depth),
        }

    def predict(self, facts: Map, plan: Plan, core: TargetGpu) -> Prediction | None:
        threads = plan["beside"] * plan["shares"]
        if not WARP <= threads <= 512:
            return None
        steps = math.ceil(facts.depth / plan["shares"])
        # Neighbouring threads read contiguous elements where results are contiguous.
        in_row = min(8, plan["beside"]) if facts.follows else 8
        work = Blocks(
            blocks=math.ceil(facts.results / plan["beside"]),
            threads=threads,
            multiplied=steps,
            others=steps * (facts.loads + 3) + 12 * math.log2(plan["shares"]),
            held=4,
            waits=1 + steps / 8,
            moved_bytes=facts.results * facts.depth * facts.loads * facts.element_bytes * 8 / in_row,
            far_bytes=float(facts.moved_bytes),
            barriers=math.log2(plan["shares"]),
            shared_bytes=threads * 4 + plan["beside"] * 4,
        )
        return gpu_cost.predict(work, core)

    def apply(self, schedule: Any, facts: Map, plan: Plan) -> None:
        last = _prepare(schedule, facts, "shared")
        block, beside = schedule.split(schedule.fuse(*schedule.get_loops(last)), [None, plan["beside"]])
        schedule.bind(block, "blockIdx.x")
        main = schedule.get_sblock(facts.main)
        schedule.compute_at(main, block, preserve_unit_loops=True)
        schedule.bind(beside, "threadIdx.x")
        variables = schedule.get(main).iter_vars
        own = schedule.get_loops(main)[-len(variables) :]
        sums = [loop for loop, v in zip(own, variables, strict=True) if reading.is_sum(v)]
        rest = [loop for loop, v in zip(own, variables, strict=True) if not reading.is_sum(v)]
        schedule.reorder(*rest, *sums)
        schedule.bind(schedule.fuse(*rest), "threadIdx.x")
        _, share = schedule.split(schedule.fuse(*sums), [None, plan["shares"]])
        schedule.bind(share, "threadIdx.y")


def _nearest(extents: tuple[int, ...], wanted: int) -> int:
    """Return the thread count nearest to `wanted` that covers whole parts of loops with these extents."""
    whole = [n for n in loops.divisors(math.prod(extents), THREADS_PER_BLOCK // 2) if gpu_cost.is_whole(n, extents)]
    return min(whole, key=lambda each: (abs(each - wanted), each))


def _prepare(schedule: Any, facts: Map, scope: str) -> Any:
    """Inline blocks and put the reduction into a buffer of `scope`; return the block that writes the result."""
    for name in facts.inlined:
        schedule.compute_inline(schedule.get_sblock(name))
    if facts.main is None:
        return schedule.get_sblock(facts.last)
    main = schedule.get_sblock(facts.main)
    if facts.last == facts.main:
        return schedule.cache_write(main, 0, scope)
    schedule.set_scope(main, 0, scope)
    return schedule.get_sblock(facts.last)


def read_map(schedule: Any) -> Map | None:
    """Read the function as a map, or return None."""
    names = reading.list_blocks(schedule)
    if not names or len(set(names)) < len(names):
        return None
    blocks = {name: schedule.get(schedule.get_sblock(name)) for name in names}
    mains = [name for name in names if any(reading.is_sum(v) for v in blocks[name].iter_vars)]
    last = blocks[names[-1]]
    if len(mains) > 1 or not (names[-1] in mains or gpu_cost.writes_once(schedule, names[-1])):
        return None

    main = mains[0] if mains else None
    body = blocks[main or names[-1]].body
    if not isinstance(body, tirx.BufferStore) or not last.iter_vars:
        return None
    final = [v for v in blocks[main or names[-1]].iter_vars if not reading.is_sum(v)][-1:]
    loads, _ = expressions.read_value(body.value)
    read = [load for load in loads if not load.source.same_as(body.buffer)]
    sizes = {load.source: reading.size_of(load.source) for load in read}
    spatial = [int(v.dom.extent) for v in last.iter_vars if not reading.is_sum(v)]
    sums = [int(v.dom.extent) for v in blocks[main].iter_vars if reading.is_sum(v)] if main else []
    return Map(
        main=main,
        inlined=tuple(name for name in names[:-1] if name != main),
        last=names[-1],
        extents=tuple(spatial),
        results=math.prod(spatial),
        run=spatial[-1] if spatial else 1,
        depth=math.prod(sums),
        loads=max(1, len(read)),
        element_bytes=reading.bytes_of(body.buffer.dtype),
        moved_bytes=sum(sizes.values()) + reading.size_of(last.writes[0].source),
        follows=bool(final) and any(expressions.mentions(list(load.indices)[-1], final[0].var) for load in read),
    )
