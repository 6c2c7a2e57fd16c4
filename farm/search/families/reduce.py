"""Pools, means and other single reductions, with inputs inlined and followers fused.

A vector holds neighbouring results or, where the reduced elements are contiguous, neighbouring summands whose partial
sums are added last. Strided results (pools of stride 2 with columns innermost) and partial vectors may be left to LLVM,
which shuffles loaded vectors. Products of two operands come here only where other families refuse them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tvm import tirx

from farm.search.cores import Core
from farm.search.families import expressions, loops
from farm.search.families import facts as reading
from farm.search.families.family import Plan, Prediction
from farm.search.graph import winograd

# Kernels of up to so many elements are unrolled.
_MOST_UNROLLED = 32
# Cycles per summand that is not contiguous: one result at a time, or one lane at a time. Measured on Zen 4 (maxima of
# 3x3 at stride 2: 64x29x29>14x14, 64x57x57>29x29; LLVM's own vectors take 0.3).
_CYCLES_ALONE, _CYCLES_A_LANE = 1.5, 0.9


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A function around one reduction of any kind.

    `before` blocks are computed at their readers, `between` where `last` reads them, which may be `main` itself. `pad`
    is a block before main that must be written first, since it varies within a vector. `spatial` and `sums` are the
    extents of main's loops, in this order. `rows`: the summands are contiguous. `step` is the stride of the loads from
    one result to the next, `taps` the loads per summand. Sizes are in bytes.
    """

    main: str
    before: tuple[str, ...]
    pad: str | None
    between: tuple[str, ...]
    last: str
    spatial: tuple[int, ...]
    sums: tuple[int, ...]
    rows: bool
    step: int
    taps: int
    element_bytes: int
    moved_bytes: int


class Reduce:
    """Family of single reductions."""

    name = "reduce"

    def read(self, schedule: Any) -> Reduction | None:
        return _read(schedule)

    def options(self, facts: Reduction, core: Core) -> Mapping[str, tuple[int, ...]]:
        lanes = core.lanes(facts.element_bytes)
        if facts.rows:
            return {
                "pieces": loops.pieces(math.prod(facts.spatial), (), core.threads),
                "lanes": loops.row_lengths(math.prod(facts.sums), lanes, 8),
                "vectors": (1,),
                "pixels": (1,),
            }
        width = facts.spatial[-2] if len(facts.spatial) > 1 else 1
        uneven = facts.step > 1 or facts.spatial[-1] % lanes > 0
        apart = (0,) if uneven and math.prod(facts.sums) <= _MOST_UNROLLED else ()
        return {
            "pieces": (1, 0) if core.threads > 1 else (0,),
            "lanes": (*apart, *loops.vector_lengths(facts.spatial[-1], lanes)),
            "vectors": tuple(range(1, 9)),
            "pixels": tuple(p for p in loops.divisors(width) if p <= 8),
        }

    def predict(self, facts: Reduction, plan: Plan, core: Core) -> Prediction | None:
        lanes, vectors, pixels = plan["lanes"], plan["vectors"], plan["pixels"]
        full = core.lanes(facts.element_bytes)
        depth, results = math.prod(facts.sums), math.prod(facts.spatial)
        far = loops.moving_cycles(facts.moved_bytes, core)
        registers = math.ceil(lanes / full)
        latency = core.fma_latency
        if facts.rows:
            compute = results * (loops.row_cycles(depth, lanes, core, facts.element_bytes) + 10)
            return loops.predict_shares(plan["pieces"], compute, far, core)
        if not lanes:
            shares = math.prod(facts.spatial[: _count_still(facts)]) if plan["pieces"] else 0
            if vectors > 1 or pixels > 1 or shares == 1:
                return None
            # LLVM does not vectorise a row shorter than a vector.
            tap = 3.0 / full + 0.1 if facts.spatial[-1] > full else _CYCLES_ALONE
            return loops.predict_shares(shares, results * depth * facts.taps * tap, far, core)
        tile = registers * vectors * pixels
        if facts.spatial[-1] % (lanes * vectors) or tile > core.vector_registers // 2:
            return None
        # Neighbouring pixels of an unrolled kernel share loads.
        shared = 0.7 if pixels > 1 and depth <= _MOST_UNROLLED else 1.0
        loads = tile * facts.taps * shared / core.loads_per_cycle(core.vector_bits)
        if facts.step > 1 or (lanes > full and lanes % full):  # each lane is loaded by itself
            loads = lanes * vectors * pixels * facts.taps * _CYCLES_A_LANE
        inner = depth * max(loads, tile / core.fma_per_cycle(core.vector_bits), latency / 2)
        tiles = results // (lanes * vectors * pixels)
        compute = tiles * (inner + tile * 2 + 8 + (0 if depth <= _MOST_UNROLLED else 4 * depth))
        shares = tiles if plan["pieces"] else 0
        if plan["pieces"] and tiles < 2:
            return None
        return loops.predict_shares(shares, compute, far, core)

    def apply(self, schedule: Any, facts: Reduction, plan: Plan) -> None:
        loops.inline_blocks(schedule, (*facts.before, *facts.between))
        if not plan["lanes"]:
            _sum_apart(schedule, facts, plan)
            return
        if facts.pad and plan["pieces"]:
            schedule.parallel(schedule.fuse(*schedule.get_loops(schedule.get_sblock(facts.pad))[:-1]))
        if facts.rows:
            _sum_rows(schedule, facts, plan)
        else:
            _sum_beside(schedule, facts, plan)


def _count_still(facts: Reduction) -> int:
    """Count the outermost loops that no window moves along, at least one."""
    return max(1, len(facts.spatial) - len(facts.sums))


def _sum_apart(schedule: Any, facts: Reduction, plan: Plan) -> None:
    """Compute one result after the other from strided summands, which LLVM vectorises by shuffles."""
    main = schedule.get_sblock(facts.main)
    own = schedule.get_loops(schedule.get_sblock(facts.last))[: len(facts.spatial)]
    still = _count_still(facts)
    at = schedule.fuse(*own[:still])
    if facts.last != facts.main:
        schedule.compute_at(main, ([at, *own[still:]])[-2 if len(own) > still else -1], preserve_unit_loops=True)
        schedule.set_scope(main, 0, "global")
    sums = schedule.get_loops(main)[-len(facts.sums) :]
    if facts.pad:
        schedule.compute_at(schedule.get_sblock(facts.pad), at, preserve_unit_loops=True)
    for loop in sums:
        schedule.unroll(loop)
    if plan["pieces"]:
        schedule.parallel(at)
    schedule.decompose_reduction(main, sums[0])


def _sum_beside(schedule: Any, facts: Reduction, plan: Plan) -> None:
    """Compute a tile of vectors of results in registers."""
    lanes = plan["lanes"]
    main = schedule.get_sblock(facts.main)
    own_last = facts.last == facts.main
    last = schedule.cache_write(main, 0, "global") if own_last else schedule.get_sblock(facts.last)
    *outer, channel = schedule.get_loops(last)
    block, vector, lane = schedule.split(channel, [None, plan["vectors"], lanes])
    tile = []
    if outer:
        column, pixel = schedule.split(outer.pop(), [None, plan["pixels"]])
        outer, tile = [*outer, column], [pixel]
    schedule.reorder(*outer, block, *tile, vector, lane)
    at = schedule.fuse(*outer, block)
    schedule.compute_at(main, at, preserve_unit_loops=True)
    if not own_last:
        schedule.set_scope(main, 0, "global")
    own = schedule.get_loops(main)[1:]
    spatial, sums = own[: len(facts.spatial)], own[len(facts.spatial) :]
    inner, own_lane = schedule.split(spatial.pop(), [None, lanes])
    schedule.reorder(*sums, *spatial, inner, own_lane)
    if lanes > 1:
        schedule.vectorize(own_lane)
        schedule.vectorize(lane)
    if math.prod(facts.sums) <= _MOST_UNROLLED:
        for loop in sums[1:]:
            schedule.unroll(loop)
    for loop in (*spatial, inner, *tile, vector):
        schedule.unroll(loop)
    if plan["pieces"]:
        schedule.parallel(at)
    schedule.decompose_reduction(main, sums[0])


def _sum_rows(schedule: Any, facts: Reduction, plan: Plan) -> None:
    """Reduce vectors of summands to partial sums by lane, and add these last."""
    main = schedule.get_sblock(facts.main)
    partial = None
    if plan["lanes"] > 1:
        partial = loops.split_sums(schedule, facts.main, len(facts.sums), plan["lanes"])
    at = None
    if facts.spatial:
        own = schedule.get_loops(schedule.get_sblock(facts.last))[: len(facts.spatial)]
        at = schedule.fuse(*own)
        if facts.last != facts.main:
            schedule.compute_at(main, at, preserve_unit_loops=True)
            schedule.set_scope(main, 0, "global")
        if plan["pieces"]:
            schedule.parallel(at)
    if partial is not None:
        loops.vectorise_partial(schedule, partial, at)
    elif len(facts.sums) > 1:
        schedule.fuse(*schedule.get_loops(main)[-len(facts.sums) :])


def _read(schedule: Any) -> Reduction | None:
    blocks = reading.read_blocks(schedule)
    names, mains = list(blocks), [name for name, block in blocks.items() if reading.has_sums(block)]
    # TVM needs half a second to print Winograd's transforms once they are all inlined.
    if (
        winograd.is_marked(blocks.values())
        or len(mains) != 1
        or not isinstance(blocks[mains[0]].body, tirx.BufferStore)
    ):
        return None
    main = mains[0]
    before, after = names[: names.index(main)], names[names.index(main) + 1 :]
    if after and (reading.is_cut(schedule, after[-1]) or not reading.is_plain(schedule, after[-1])):
        after.pop()  # writes part of the result, or into part of a buffer: it stays
    if not all(reading.is_plain(schedule, name) for name in (*before, *after)):
        return None
    kinds = [reading.is_sum(v) for v in blocks[main].iter_vars]
    if kinds != sorted(kinds) or len(kinds) != len(schedule.get_loops(schedule.get_sblock(main))):
        return None
    trial = schedule.copy()
    if loops.inline(trial, before) != tuple(before) or loops.inline(trial, after[:-1]) != tuple(after[:-1]):
        return None
    block = trial.get(trial.get_sblock(main))
    extents = [int(v.dom.extent) for v in block.iter_vars]
    spatial = [v.var for v in block.iter_vars if not reading.is_sum(v)]
    sums = [v.var for v in block.iter_vars if reading.is_sum(v)]
    last = after[-1] if after else main
    written = trial.get(trial.get_sblock(last))
    if after and [int(v.dom.extent) for v in written.iter_vars] != extents[: len(spatial)]:
        return None
    loads = [load for load in expressions.read_value(block.body.value)[0] if not load.source.same_as(block.body.buffer)]
    wide = [v for v, extent in zip(spatial, extents, strict=False) if extent > 1]
    ends = [list(load.indices)[-1] for load in loads if len(load.indices)]
    beside = bool(wide) and wide[-1].same_as(spatial[-1]) and any(expressions.mentions(end, wide[-1]) for end in ends)
    rows = not beside and any(expressions.mentions(end, v) for end in ends for v in sums)
    steps = [abs(expressions.slope(end, wide[-1])) for end in ends] if beside else []
    comparisons = expressions.read_value(block.body.value)[1]
    uneven = sums[-1] if rows or not spatial else spatial[-1]
    pad = before[-1] if before and any(expressions.mentions(c, uneven) for c in comparisons) else None
    result = written.body.buffer
    return Reduction(
        main=main,
        before=tuple(before) if pad is None else tuple(before[:-1]),
        pad=pad,
        between=tuple(after[:-1]),
        last=last,
        spatial=tuple(extents[: len(spatial)]),
        sums=tuple(extents[len(spatial) :]),
        rows=rows or not spatial,
        step=max(steps, default=1),
        taps=max(1, len(loads)),
        element_bytes=reading.bytes_of(block.body.buffer.dtype),
        moved_bytes=reading.size_of(result) + sum({d.source: reading.size_of(d.source) for d in loads}.values()),
    )
