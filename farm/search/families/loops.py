"""Schedule steps and estimates that families share: vectors, chunks for threads, inlining, row reductions, parts.

Long blocks of weights are computed in parts: the rows of a kernel one after the other, with accumulators kept between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import tvm
from tvm.tirx import IndexMap

from farm.search.cores import Core
from farm.search.families import expressions
from farm.search.families.facts import Contraction, is_moved, is_sum
from farm.search.families.family import Plan, Prediction

# Innermost loops shorter than this are not split among threads.
_LEAST_RUN = 256
# Least lanes of a vector whose pieces are counted.
_LEAST_PARTED = 8
# Additional stalled fraction of a stream where a tile's accumulators just hide the FMA latency, so that no step can
# catch up (7x7x2048>512 on Zen 3: 1,797 us in tiles of 2 by four vectors, 1,482 us of 5 by two). Not measured on Arm.
_NOT_CAUGHT_UP = 0.1
# Errors by which TVM refuses a primitive; inlining a copy of every second element hits an internal error.
_REFUSALS = (tvm.s_tir.ScheduleError, tvm.error.InternalError)
# Chunks of a parallel loop per thread.
_SHARES = 4
# Accesses of one accumulator per part: read it, read the part's own, write it.
_MOVED = 3


def divisors(number: int, most: int | None = None) -> list[int]:
    """List all divisors up to `most` in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    high = [number // d for d in reversed(low) if d * d != number]
    return [d for d in (*low, *high) if d <= (most or number)]


def vector_lengths(extent: int, lanes: int) -> tuple[int, ...]:
    """List vector lengths that divide an extent, the best first.

    The best waste the fewest lanes; LLVM splits long ones into registers, the last of which may be partly empty. With
    eight lanes or more (x86), shorter ones of few pieces: 15 elements load as 8, 4, 2 and 1. A depthwise 5x5 28x28x120
    took 52 us by 8 lanes, 85 by 12, 109 by 15, and over 1,000 by 20 to 60. A long prime leaves one lane.
    """
    if extent % lanes == 0:
        return (lanes,)
    if lanes >= _LEAST_PARTED:
        short = [d for d in divisors(extent, lanes) if d >= lanes // 2]
        if short:
            return tuple(sorted(short, key=lambda length: (count_parts(length, lanes) / length, -length))[:2])
    found = [d for d in divisors(extent, 4 * lanes) if d > 1] or [1]

    def cost(length: int) -> tuple[float, int]:
        return -(-length // lanes) / length, abs(length - lanes)

    return tuple(sorted(found, key=cost)[:2])


def count_parts(length: int, lanes: int) -> int:
    """Count the power-of-two pieces in which `length` elements are loaded."""
    return length // lanes + (length % lanes).bit_count()


def vectorise(schedule: Any, loop: Any, lanes: int) -> None:
    """Vectorise a loop by whole vectors; a short odd one becomes one vector."""
    extent = int(schedule.get(loop).extent)
    length = vector_lengths(extent, lanes)[0]
    if length > 1:
        if length < extent:
            _, loop = schedule.split(loop, [None, length])
        schedule.vectorize(loop)


def write_apart(schedule: Any, facts: Contraction) -> Any:
    """Return a block other than the reduction that writes a contraction's result."""
    if facts.last != facts.main:
        return schedule.get_sblock(facts.last)
    main = schedule.get_sblock(facts.main)
    result = schedule.cache_write(main, 0, "global")
    *extents, _ = (int(d) for d in schedule.get(result).writes[0].source.shape)
    if sum(extent > 1 for extent in extents) > len(facts.pixels) + len(facts.batch):
        join_pixels_written(schedule, main, result)
    return result


def join_pixels_written(schedule: Any, main: Any, result: Any) -> None:
    """Give fused pixels one dimension in the buffer between `main` and `result`, or accumulators stay in memory.

    TVM cannot bound the tiles of a buffer that is indexed by quotients and remainders.
    """
    *extents, _ = (int(d) for d in schedule.get(result).writes[0].source.shape)

    if len(extents) > 1:
        mapping = index_map(lambda *at: (flat_index(at[:-1], extents), at[-1]), len(extents) + 1)
        schedule.transform_layout(main, ("write", 0), mapping)
        schedule.transform_block_layout(result, mapping)


def own_loops(schedule: Any, block: Any) -> tuple[list[Any], list[Any]]:
    """Return the innermost loops of a block, one for each of its variables: those of results, those of the sum."""
    variables = schedule.get(block).iter_vars
    own = list(zip(schedule.get_loops(block)[-len(variables) :], map(is_sum, variables), strict=True))
    return [loop for loop, sums in own if not sums], [loop for loop, sums in own if sums]


def flat_index(indices: Sequence[Any], extents: Sequence[int]) -> Any:
    """Return the index in one loop of the steps of several loops."""
    joined = indices[0]
    for index, extent in zip(indices[1:], extents[1:], strict=True):
        joined = joined * extent + index
    return joined


def index_map(mapping: Any, count: int) -> Any:
    """Make a mapping of `count` indices; TVM cannot count those of a variadic function."""
    return IndexMap.from_func(mapping, ndim=count, index_dtype="int64")


def pad_first(schedule: Any, pad: Any, lanes: int, *, apart: bool) -> None:
    """Pad the data first, in parallel; see `copy_pad`."""
    loops = schedule.get_loops(pad)
    if len(loops) > 2:
        schedule.parallel(schedule.fuse(*loops[:-2]))
    copy_pad(schedule, pad, lanes, apart=apart)


def copy_pad(schedule: Any, pad: Any, lanes: int, *, apart: bool, most_unrolled: int = 0) -> None:
    """Vectorise a pad's channels; with `apart`, peel its border columns.

    Interior columns need no bounds checks, five of ten instructions on a Cortex-A57. Up to `most_unrolled` of them are
    unrolled. Rows are peeled likewise where the pad writes all of them. Call it when the loops are in place.
    """
    *_, row, column, channel = loops = schedule.get_loops(pad)
    vectorise(schedule, channel, lanes)
    if not apart:
        return
    inside = schedule.get_loops(pad)[len(loops) :]
    serial = int(schedule.get(row).kind) == 0
    if serial and int(schedule.get(row).extent) == int(schedule.get(pad).iter_vars[-3].dom.extent):
        between, _ = _set_border_apart(schedule, pad, row, -3)
        if between is not None:
            (pad,) = schedule.get_child_blocks(between)
            column = schedule.get_loops(pad)[-2 - len(inside)]
    between, extent = _set_border_apart(schedule, pad, column, -2)
    if between is not None and extent <= most_unrolled:
        schedule.unroll(between)


def _set_border_apart(schedule: Any, pad: Any, loop: Any, at: int) -> tuple[Any | None, int]:
    """Cut a loop over dimension `at` of a pad at its borders; return the interior loop, or None, and its extent."""
    first, inside = _find_border(schedule.get(pad), at)
    cuts = [cut for cut in (first, first + inside) if 0 < cut < int(schedule.get(loop).extent)]
    if not inside or not cuts:
        return None, 0
    parts = schedule.loop_partition(loop, [cut - before for before, cut in itertools.pairwise([0, *cuts])])
    return parts[first > 0], inside


def _find_border(block: Any, at: int) -> tuple[int, int]:
    """Return the width of a dimension's leading border and its interior extent; 0, 0 where unknown."""
    reads, comparisons = expressions.read_value(block.body.value)
    if len(reads) != 1 or not comparisons:
        return 0, 0
    variable = block.iter_vars[at].var
    dimensions = zip(reads[0].indices, reads[0].source.shape, strict=True)
    along = [pair for pair in dimensions if expressions.mentions(pair[0], variable)]
    if len(along) != 1 or expressions.slope(along[0][0], variable) != 1:
        return 0, 0
    return -expressions.evaluate(along[0][0], None), int(along[0][1])


def pieces(outside: int, extents: Sequence[int], threads: int) -> tuple[int, ...]:
    """List the numbers of chunks that loops may be cut into: `outside` steps times cuts of the inner run. 0: serial.

    A run of several loops is cut between steps of one of them: otherwise TVM does not see that it is contiguous, and
    the code is ten times slower.
    """
    if threads == 1:
        return (0,)
    run = math.prod(extents)
    cuts = {math.prod(extents[:at]) * d for at, extent in enumerate(extents) for d in divisors(extent)}
    finer = [d for d in cuts if run // d >= _LEAST_RUN and outside * d <= threads * _SHARES * 2]
    count = outside * max(finer, default=1)
    return (count, 0) if count > 1 else (0,)


def wait_share(core: Core, plan: Plan, element_bytes: int) -> float:
    """Return the fraction of a stream from L2 that a tile's FMAs do not hide."""
    sums = plan["pixels"] * plan["rows"] * plan["vectors"]
    hidden = core.fma_latency * core.fma_per_cycle(plan["lanes"] * element_bytes * 8)
    return core.l2_wait + (_NOT_CAUGHT_UP if sums <= hidden and not core.lane_fma else 0.0)


def moving_cycles(moved_bytes: float, core: Core) -> float:
    """Estimate the cycles of one core to move `moved_bytes`."""
    near = moved_bytes <= core.l2_bytes * 0.75
    return moved_bytes / (core.l2_bytes_per_cycle if near else core.far_bytes_per_cycle)


def predict_shares(shares: int, compute: float, far: float, core: Core) -> Prediction:
    """Predict the time of `compute` and `far` cycles in `shares` parallel chunks; 0 chunks: no threads."""
    threads = min(core.threads, shares) if shares else 1
    balance = math.ceil(shares / threads) * threads / shares if shares else 1.0
    seconds = max(compute, far) * balance / threads / core.freq_hz + (core.region_s if threads > 1 else 0.0)
    return Prediction(seconds, {"compute": compute, "far": far, "balance": balance})


def inline_blocks(schedule: Any, names: Iterable[str], folded: str | None = None) -> None:
    """Inline blocks, `folded` into the one that it reads; raises TVM's errors."""
    if folded:
        schedule.reverse_compute_inline(schedule.get_sblock(folded))
    for name in names:
        schedule.compute_inline(schedule.get_sblock(name))


def inline(schedule: Any, names: list[str]) -> tuple[str, ...]:
    """Inline all blocks that TVM can; return their names in order."""
    done = []
    for name in names:
        try:
            schedule.compute_inline(schedule.get_sblock(name))
        except _REFUSALS:
            continue
        done.append(name)
    return tuple(done)


def fold(schedule: Any, name: str) -> bool:
    """Fold a block that only copies into its producer; say whether TVM could."""
    if not is_moved(schedule, name):
        return False
    try:
        schedule.reverse_compute_inline(schedule.get_sblock(name))
    except _REFUSALS:
        return False
    return True


def row_vectors(elements: int, lanes: int) -> int:
    """Return the number of vector accumulators per row in `codegen.accumulators`."""
    return next(count for count in (4, 2, 1) if elements >= 4 * count * lanes or count == 1)


def row_lengths(elements: int, lanes: int, most: int) -> tuple[int, ...]:
    """List vector lengths for reducing a row: whole vectors up to `most` at a time, a shorter one, or 1.

    Length 1 leaves it to the lowering (`codegen.accumulators`). LLVM scalarises partial vectors longer than one.
    """
    whole = [d for d in divisors(elements, most * lanes) if d % lanes == 0]
    shorter = [d for d in divisors(elements, lanes - 1) if d > 1]
    return (*shorter[-1:], *whole[-3:], 1)


def row_cycles(elements: int, length: int, core: Core, element_bytes: int) -> float:
    """Estimate the cycles of reducing a row by vectors of `length`, see `row_lengths`."""
    lanes, latency = core.lanes(element_bytes), core.fma_latency
    if length == 1:
        count = row_vectors(elements, lanes)
        steps, rest = divmod(elements, lanes * count)
        beside = max(latency, count / core.loads_per_cycle(core.vector_bits))
        return steps * beside + (math.ceil(rest / lanes) + math.log2(lanes * count)) * latency
    return elements / length * max(latency, math.ceil(length / lanes)) + length * latency / 2


def split_sums(schedule: Any, name: str, sums: int, length: int) -> Any:
    """Split a block's innermost `sums` reduction loops into partial sums by lane; return the block that makes them.

    The original block then adds these up. Call it first: TVM cannot factor a block that has been moved.
    """
    run = schedule.get_loops(schedule.get_sblock(name))[-sums:]
    _, lane = schedule.split(schedule.fuse(*run), [None, length])
    partial = schedule.rfactor(lane, 0)
    for at in range(len(schedule.get(partial).writes)):
        schedule.set_scope(partial, at, "global")
    return partial


def vectorise_partial(schedule: Any, partial: Any, at: Any | None) -> None:
    """Compute the block of `split_sums` at a loop, its lanes as one vector."""
    if at is None:
        *_, steps, lane = schedule.get_loops(partial)
    else:
        schedule.compute_at(partial, at, preserve_unit_loops=True)
        _, lane, *_, steps = schedule.get_loops(partial)
    schedule.reorder(steps, lane)
    schedule.vectorize(lane)
    schedule.decompose_reduction(partial, steps)


def list_parts(facts: Contraction, core: Core) -> dict[str, tuple[int, ...]]:
    """Return the knob `parts` where a block of two channel vectors is too long to prefetch and a part of it is not."""
    places = [axis.at for axis in (*facts.pixels, *facts.channels, *facts.sums)]
    if facts.group or len(facts.sums) < 2 or places != list(range(len(places))):
        return {}
    pair = 2 * core.lanes(facts.element_bytes) * facts.depth * facts.weight_element_bytes
    rows = facts.sums[0].extent
    fits = 0 < core.prefetched_bytes < pair <= rows * core.prefetched_bytes
    return {"parts": (1, rows)} if rows > 1 and fits else {}


def count_moved_parts(plan: Plan) -> int:
    """Count the extra accesses per accumulator when the reduction is split into parts."""
    parts = plan.get("parts", 1)
    return _MOVED * parts if parts > 1 else 0


def apply_parts(schedule: Any, facts: Contraction, plan: Plan, split_tile: Any) -> None:
    """Schedule a contraction whose reduction is split into parts; only a pad may precede the block of the result.

    `split_tile` splits the loops of pixels and channels into outer loops and a list of the tile's own.
    """
    main = schedule.get_sblock(facts.main)
    part_sums = schedule.rfactor(schedule.get_loops(main)[facts.sums[0].at], 0)
    *pixels, channel = schedule.get_loops(write_apart(schedule, facts))
    block, channel = schedule.split(channel, [None, plan["lanes"] * plan["vectors"]])
    schedule.reorder(block, *pixels, channel)
    vector, lane = schedule.split(channel, [None, plan["lanes"]])
    schedule.unroll(vector)
    schedule.vectorize(lane)
    schedule.parallel(block)
    schedule.compute_at(main, block, preserve_unit_loops=True)
    schedule.set_scope(main, 0, "global")
    _, part, *own = schedule.get_loops(main)
    *outer, tile = split_tile(schedule, own, plan)
    schedule.reorder(part, *outer, *tile)
    schedule.compute_at(part_sums, outer[-1], preserve_unit_loops=True)
    count = len(facts.pixels)
    own = schedule.get_loops(part_sums)[-(count + 1 + len(facts.sums)) :]
    pixels, channel, sums = own[1 : count + 1], own[count + 1], own[count + 2 :]
    vector, lane = schedule.split(channel, [None, plan["lanes"]])
    schedule.reorder(*sums, *pixels, vector, lane)
    for each in (*pixels, vector, *tile[:-1]):
        schedule.unroll(each)
    for each in (lane, tile[-1]):
        schedule.vectorize(each)
    schedule.decompose_reduction(part_sums, sums[0])
    schedule.decompose_reduction(main, part)
    if facts.pad:
        pad_first(schedule, schedule.get_sblock(facts.pad), plan["lanes"], apart=False)
