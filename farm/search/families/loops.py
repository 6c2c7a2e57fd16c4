"""Small steps that several families take: lengths of vectors, shares of threads, what is computed where it is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tvm
from tvm.ir.expr import TensorLoad

from farm.search.cores import Core
from farm.search.families import expressions
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction

# Elements of an innermost loop under which it is not shared out among threads.
_LEAST_RUN = 256
# The least lanes of a vector whose parts are worth counting.
_LEAST_PARTED = 8
# Where a tile's sums only just hide a multiply-add's latency, so much more of a stream is waited for: no step makes up
# for a late one (7x7x2048>512 on Zen 3: 1,797 us in tiles of 2 by four vectors, 1,482 of 5 by two). No board has told.
_NOT_CAUGHT_UP = 0.1
# Shares of a parallel loop that each thread should find.
_SHARES = 4


def divisors(number: int, most: int | None = None) -> list[int]:
    """All divisors up to `most`, the least first."""
    return [d for d in range(1, min(number, most or number) + 1) if number % d == 0]


def vector_lengths(extent: int, lanes: int) -> tuple[int, ...]:
    """Numbers of elements to treat as one vector: divisors of an extent, the best first.

    Those that waste the fewest lanes; LLVM makes several registers of a long one, the last of them smaller or partly
    empty. Where a vector has eight elements and more (x86), shorter ones of few parts: 15 are loaded as 8, 4, 2 and 1.
    Of a depthwise 5x5 28x28x120 8 lanes took 52 us, 12 85, 15 109, 20 to 60 more than 1,000. One lane is left where a
    prime is too long.
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
    """In how many pieces so many elements are loaded, each of a power of two of them."""
    return length // lanes + (length % lanes).bit_count()


def vectorise(schedule: Any, loop: Any, lanes: int) -> None:
    """Make whole vectors of a loop, as many as there are; one that is short and odd becomes one vector."""
    extent = int(schedule.get(loop).extent)
    length = vector_lengths(extent, lanes)[0]
    if length > 1:
        if length < extent:
            _, loop = schedule.split(loop, [None, length])
        schedule.vectorize(loop)


def write_apart(schedule: Any, facts: Contraction) -> Any:
    """The block that writes a contraction's result, another one than sums it up."""
    if facts.last == facts.main:
        return schedule.cache_write(schedule.get_sblock(facts.main), 0, "global")
    return schedule.get_sblock(facts.last)


def pad_first(schedule: Any, pad: Any, lanes: int, *, apart: bool) -> None:
    """Let all threads write padded data before anything else, see `copy_pad`."""
    loops = schedule.get_loops(pad)
    if len(loops) > 2:
        schedule.parallel(schedule.fuse(*loops[:-2]))
    copy_pad(schedule, pad, lanes, apart=apart)


def copy_pad(schedule: Any, pad: Any, lanes: int, *, apart: bool, most_unrolled: int = 0) -> None:
    """Make vectors of a pad's channels; `apart`: and loops of their own for columns left, right and between.

    Between, no column need be compared: on a Cortex-A57 that took five of ten instructions. Up to so many of these are
    unrolled. Rows likewise where the pad writes all of them. The loops must be where they stay.
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
    """Cut a loop of a pad's dimension `at` where the border ends; returns the loop between and its extent, or None."""
    first, inside = _find_border(schedule.get(pad), at)
    cuts = [cut for cut in (first, first + inside) if 0 < cut < int(schedule.get(loop).extent)]
    if not inside or not cuts:
        return None, 0
    parts = schedule.loop_partition(loop, [cut - before for before, cut in itertools.pairwise([0, *cuts])])
    return parts[first > 0], inside


def _find_border(block: Any, at: int) -> tuple[int, int]:
    """Steps of a dimension that a pad leaves free first, and how many it copies then; 0, 0 if that cannot be told."""
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
    """Into how many shares loops may be cut: the steps outside times pieces of the innermost run; 0 for no threads.

    A run of several loops is cut between steps of one of them: TVM cannot tell that others are contiguous, and their
    code is ten times slower.
    """
    if threads == 1:
        return (0,)
    run = math.prod(extents)
    cuts = {math.prod(extents[:at]) * d for at, extent in enumerate(extents) for d in divisors(extent)}
    finer = [d for d in cuts if run // d >= _LEAST_RUN and outside * d <= threads * _SHARES * 2]
    count = outside * max(finer, default=1)
    return (count, 0) if count > 1 else (0,)


def wait_share(core: Core, plan: Plan, element_bytes: int) -> float:
    """Share of a stream from the second cache that a tile's multiply-adds wait for."""
    sums = plan["pixels"] * plan["rows"] * plan["vectors"]
    hidden = core.fma_latency * core.fma_per_cycle(plan["lanes"] * element_bytes * 8)
    return core.l2_wait + (_NOT_CAUGHT_UP if sums <= hidden and not core.lane_fma else 0.0)


def moving_cycles(moved_bytes: float, core: Core) -> float:
    """Cycles of one core that it takes to read and write so many bytes in all."""
    near = moved_bytes <= core.l2_bytes * 0.75
    return moved_bytes / (core.l2_bytes_per_cycle if near else core.far_bytes_per_cycle)


def predict_shares(shares: int, compute: float, far: float, core: Core) -> Prediction:
    """What cycles of one core come to as so many shares of a parallel loop; 0 shares for no threads."""
    threads = min(core.threads, shares) if shares else 1
    balance = math.ceil(shares / threads) * threads / shares if shares else 1.0
    seconds = max(compute, far) * balance / threads / core.freq_hz + (core.region_s if threads > 1 else 0.0)
    return Prediction(seconds, {"compute": compute, "far": far, "balance": balance})


# What TVM refuses, and where it trips over itself: taking back a copy of every second element ends in the latter.
def _refusals() -> tuple[type[Exception], ...]:
    return tvm.s_tir.ScheduleError, tvm.error.InternalError


def inline(schedule: Any, names: list[str]) -> tuple[str, ...]:
    """Compute blocks where they are read, all that TVM lets; returns their names in order."""
    done = []
    for name in names:
        try:
            schedule.compute_inline(schedule.get_sblock(name))
        except _refusals():
            continue
        done.append(name)
    return tuple(done)


def fold(schedule: Any, name: str) -> bool:
    """Let the block before one that only copies write the copy itself; says whether TVM does it."""
    block = schedule.get_sblock(name)
    if not isinstance(schedule.get(block).body.value, TensorLoad):
        return False
    try:
        schedule.reverse_compute_inline(block)
    except _refusals():
        return False
    return True


def row_vectors(elements: int, lanes: int) -> int:
    """How many vectors of a row are reduced beside each other where lowering makes vectors of it (`build.rows`)."""
    return next(count for count in (4, 2, 1) if elements >= 4 * count * lanes or count == 1)


def row_lengths(elements: int, lanes: int, most: int) -> tuple[int, ...]:
    """Lengths of vectors for a row that is reduced: whole ones, up to `most` at a time, or shorter, or 1.

    Of 1, lowering makes vectors (`build.rows`). LLVM takes those that are longer than one and not whole apart.
    """
    whole = [d for d in divisors(elements, most * lanes) if d % lanes == 0]
    shorter = [d for d in divisors(elements, lanes - 1) if d > 1]
    return (*shorter[-1:], *whole[-3:], 1)


def row_cycles(elements: int, length: int, core: Core, element_bytes: int) -> float:
    """Cycles that it takes to reduce a row by vectors of such a length, see `row_lengths`."""
    lanes, latency = core.lanes(element_bytes), core.fma_latency
    if length == 1:
        count = row_vectors(elements, lanes)
        steps, rest = divmod(elements, lanes * count)
        beside = max(latency, count / core.loads_per_cycle(core.vector_bits))
        return steps * beside + (math.ceil(rest / lanes) + math.log2(lanes * count)) * latency
    return elements / length * max(latency, math.ceil(length / lanes)) + length * latency / 2


def split_sums(schedule: Any, name: str, sums: int, length: int) -> Any:
    """Give a block whose innermost `sums` loops sum up a partial sum for each lane; returns the block that makes them.

    What remains of the block adds these up. To be done before anything else: TVM cannot factor a block that was moved.
    """
    run = schedule.get_loops(schedule.get_sblock(name))[-sums:]
    _, lane = schedule.split(schedule.fuse(*run), [None, length])
    partial = schedule.rfactor(lane, 0)
    for at in range(len(schedule.get(partial).writes)):
        schedule.set_scope(partial, at, "global")
    return partial


def vectorise_partial(schedule: Any, partial: Any, at: Any | None) -> None:
    """Compute what `split_sums` returned at a loop, its lanes as one vector."""
    if at is None:
        *_, steps, lane = schedule.get_loops(partial)
    else:
        schedule.compute_at(partial, at, preserve_unit_loops=True)
        _, lane, *_, steps = schedule.get_loops(partial)
    schedule.reorder(steps, lane)
    schedule.vectorize(lane)
    schedule.decompose_reduction(partial, steps)
