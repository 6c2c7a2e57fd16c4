"""The other GPU families: norms, maps whose threads work alone, and reductions that threads share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tvm import tirx

from device_agent.protocol import WARP
from farm.gpu.code import THREADS_PER_BLOCK
from farm.search.families import expressions, gpu_cost, loops, norm
from farm.search.families import facts as reading
from farm.search.families.family import Plan, Prediction
from farm.search.families.gpu_cost import Blocks
from farm.search.families.norm import Norm
from farm.search.gpus import TargetGpu

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
        if found is None:
            return None
        # A mean pool's counts are spread over channels, which it does not reduce: no norm.
        run = math.prod(extent for at, extent in enumerate(found.extents) if at not in found.kept)
        return found if found.run == run else None

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
        loops.inline_blocks(schedule, facts.inlined, facts.folded)
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
            rows, summed = loops.own_loops(schedule, block)
            if summed:
                schedule.reorder(*rows, *summed)
                schedule.bind(schedule.fuse(*rows), of_rows)
                _, share = schedule.split(schedule.fuse(*summed), [None, plan["shares"]])
                schedule.bind(share, of_shares)
                continue
            outer, inner = (plan["beside"], plan["shares"]) if facts.rows else (plan["shares"], plan["beside"])
            _, high, low = schedule.split(schedule.fuse(*rows), [None, outer, inner])
            schedule.bind(high, "threadIdx.y")
            schedule.bind(low, "threadIdx.x")


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
    pad: str | None = None  # the block that `main` reads, such as padded data


# Elements of a window whose neighbours share them, as in pools and depthwise convolutions.
_LEAST_WINDOW, _MOST_WINDOW = 4, 64
# A thread's most columns and rows of such windows.
_MOST_COLUMNS, _MOST_LINES = 13, 8


class GpuFlat:
    """One thread computes `each` contiguous results, in `columns` columns of `rows` rows.

    Serves element-wise functions, pools and depthwise convolutions.
    """

    name = "gpu-flat"

    def read(self, schedule: Any) -> Map | None:
        return read_map(schedule)

    def options(self, facts: Map, core: TargetGpu) -> Mapping[str, tuple[int, ...]]:
        # Plans that are predicted equal come in this order: a wide load takes as long as a narrow one.
        each = tuple(n for n in (2, 4, 1) if facts.run % n == 0)
        # TVM computes a reduction inside a thread only where all blocks are full.
        full = sorted({_nearest(facts.extents, n) for n in (64, 128, 256, 512)}) if facts.main else []
        threads = tuple(n for n in full if n >= WARP) or tuple(full[-1:])
        windows = facts.main and len(facts.extents) > 2 and _LEAST_WINDOW <= facts.depth <= _MOST_WINDOW
        columns, rows = (
            tuple(n for n in reversed(loops.divisors(facts.extents[at])) if n <= most) if windows else (1,)
            for at, most in ((-2, _MOST_COLUMNS), (-3, _MOST_LINES))
        )
        return {"threads": threads or (64, 128, 256, 512), "each": each, "columns": columns, "rows": rows}

    def predict(self, facts: Map, plan: Plan, core: TargetGpu) -> Prediction | None:
        columns, rows = plan["columns"], plan["rows"]
        each = plan["each"] * columns * rows
        *outer, _ = facts.extents or (1,)
        if columns > 1:
            outer[-1] //= columns
        if rows > 1:
            outer[-2] //= rows
        if facts.main and not gpu_cost.is_whole(plan["threads"], (*outer, facts.run // plan["each"])):
            return None
        # All threads read the same weights, so a warp's loads are contiguous where results are. Neighbouring columns
        # share what their windows read: here windows of three.
        tile = columns * rows
        shared = (columns + 2) * (rows + 2) / (9 * tile) if tile > 1 else 1.0
        moved = facts.results * (facts.depth * facts.loads * shared + 1) * facts.element_bytes
        if not facts.follows:
            moved *= 4
        work = Blocks(
            blocks=math.ceil(facts.results / (plan["threads"] * each)),
            threads=plan["threads"],
            multiplied=facts.depth * each,
            others=(facts.depth * (facts.loads + 2)) * (1 if facts.follows else each) + 4 * each + 8,
            held=each * (facts.loads + 1) if tile == 1 else plan["each"] * (tile + columns + 2),
            waits=1 + facts.depth / 16,
            moved_bytes=moved,
            far_bytes=float(facts.moved_bytes),
        )
        return gpu_cost.predict(work, core)

    def apply(self, schedule: Any, facts: Map, plan: Plan) -> None:
        held = facts.pad if plan["columns"] > 1 else None
        last = _prepare(schedule, facts, "local", held)
        # Split a thread's own elements off first: TVM does not see that a part of one fused loop is contiguous.
        *outer, row = schedule.get_loops(last)
        row, lane = schedule.split(row, [None, plan["each"]])
        unrolled = []
        if plan["columns"] > 1:
            outer[-1], column = schedule.split(outer[-1], [None, plan["columns"]])
            outer[-2], line = schedule.split(outer[-2], [None, plan["rows"]])
            schedule.reorder(*outer, row, line, column, lane)
            unrolled = [line, column]
        block, thread = schedule.split(schedule.fuse(*outer, row), [None, plan["threads"]])
        schedule.bind(block, "blockIdx.x")
        schedule.bind(thread, "threadIdx.x")
        if facts.main:
            main = schedule.get_sblock(facts.main)
            schedule.compute_at(main, thread, preserve_unit_loops=True)
            rest, sums = loops.own_loops(schedule, main)
            schedule.reorder(*sums, *rest)
            if plan["each"] > 1:
                schedule.vectorize(rest[-1])
            if unrolled:
                # So the compiler keeps what windows share.
                unrolled += [*sums, *(rest[:-1] if plan["each"] > 1 else rest)]
            if held:
                # Each element of the padded data is loaded once, then taken from a register.
                schedule.set_scope(schedule.get_sblock(held), 0, "local")
                schedule.compute_at(schedule.get_sblock(held), thread, preserve_unit_loops=True)
                loaded, _ = loops.own_loops(schedule, schedule.get_sblock(held))
                unrolled += loaded[:-1]
                if plan["each"] > 1:
                    schedule.vectorize(loaded[-1])
            schedule.decompose_reduction(main, sums[0])
        for loop in unrolled:
            schedule.unroll(loop)
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
        rest, sums = loops.own_loops(schedule, main)
        schedule.reorder(*rest, *sums)
        schedule.bind(schedule.fuse(*rest), "threadIdx.x")
        _, share = schedule.split(schedule.fuse(*sums), [None, plan["shares"]])
        schedule.bind(share, "threadIdx.y")


def _nearest(extents: tuple[int, ...], wanted: int) -> int:
    """Return the thread count nearest to `wanted` that covers whole parts of loops with these extents."""
    whole = [n for n in loops.divisors(math.prod(extents), THREADS_PER_BLOCK // 2) if gpu_cost.is_whole(n, extents)]
    return min(whole, key=lambda each: (abs(each - wanted), each))


def _prepare(schedule: Any, facts: Map, scope: str, held: str | None = None) -> Any:
    """Inline blocks but `held`, put the reduction into a buffer of `scope`; return the block that writes the result."""
    for name in facts.inlined:
        if name != held:
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
    blocks = reading.read_blocks(schedule)
    names, mains = list(blocks), [name for name, block in blocks.items() if reading.has_sums(block)]
    if not names or len(mains) > 1 or not (names[-1] in mains or reading.writes_once(schedule, names[-1])):
        return None
    last, main = blocks[names[-1]], mains[0] if mains else None
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
        pad=next((name for name in reversed(names[: names.index(main)])), None) if main else None,
        follows=bool(final) and any(expressions.mentions(list(load.indices)[-1], final[0].var) for load in read),
    )
