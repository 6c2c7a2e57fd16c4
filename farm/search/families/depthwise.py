"""Depthwise convolutions: register tiles of `rows` x `pixels` results by `vectors` x `lanes` channels.

Loads dominate, since each product is used once. The kernel loops are unrolled and neighbouring pixels share loads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families import facts as reading
from farm.search.families import loops
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction

# Values of `pad`: copy all data first, copy the rows needed next, the same with border columns peeled (fewer
# instructions, for narrow cores), or no copy: tiles check bounds, which compile away except at the border.
PAD_COPY, PAD_ROWS, PAD_APART, PAD_NONE = 0, 1, 2, 3
# Instructions to copy a vector with bounds checks, and without for interior columns (Cortex-A57).
_COMPARED, _COPIED = 10, 3
# Cycles of bounds checks per kernel row of a tile; the fraction of L1 beyond which neighbours miss the rest of a line;
# the exponent of the cost of partial lines; the fraction of traffic that stalls. Fitted to 237 schedules of the ten
# depthwise convolutions of mobilenet_v2 on Zen 3 and 136 of four of them in the estimates for a Cortex-A57.
_COMPARISON_CYCLES, _PART_HELD, _PART_COST, _WAITED = 3.0, 0.5, 0.25, 0.3
_LINE_BYTES = 64
# Lower bound of the associativity of L1 on cores with a known line stall.
_WAYS = 2
# Most rows of tiles that are padded together.
_MOST_LINES = 8
# Weight of issue cycles that FMAs hide, as in `dense`.
_ISSUED = 0.15
# Values of `unroll`: kernel columns, or the whole kernel, which shares loads among rows but needs registers.
UNROLL_COLUMNS, UNROLL_KERNEL = 0, 1
# Fraction of the registers for accumulators; shared loads need the rest. From 0.75 on spills doubled the time.
_MOST_FILLED = 0.6
# Accumulators of a tile on x86, whose FMAs read one factor from memory: with 16 or more of 32 registers LLVM spills
# (28x28x192 on an Intel server: 38.6 us by 4 x 2 pixels and two vectors, 28.4 us by 7 and two).
_MOST_SUMS = 15
# FMA slots per additional piece of a partial vector load (28x28x120, 5x5: 85 us by 12 lanes, 52 by 8, 109 by 15).
_PUT_TOGETHER = 2.0
# Vectors of a tile on x86, preferred first among equal predictions: 7 pixels by two took 0.83 to 0.94 of the time of 14
# by one (3x3 112x112x32, 28x28x192 and 14x14x384 on an Intel server).
VECTORS = (2, 1, 3)
# Columns of a padded row whose copies are unrolled: a vector each, two instructions.
_MOST_UNROLLED = 128


class Depthwise:
    """Convolutions with one filter per channel."""

    name = "depthwise"

    def read(self, schedule: Any) -> Contraction | None:
        found = reading.read_contraction(schedule)
        if found is None or found.group != 1 or found.channels or len(found.batch) != 1 or not found.pixels:
            return None
        return found

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Offer `lanes`, `vectors`, `pixels` and `rows` of a tile, `pad` and `unroll`.

        On Arm also `lines`: rows of tiles that are padded together.
        """
        width, height = _extents(facts)
        apart = core.lane_fma and facts.pad is not None
        lines = {"lines": tuple(loops.divisors(height, _MOST_LINES))} if apart else {}
        return {
            "lanes": loops.vector_lengths(facts.batch[-1].extent, core.lanes(facts.element_bytes)),
            "vectors": (1, 2, 3, 4) if core.lane_fma else VECTORS,
            "pixels": tuple(p for p in loops.divisors(width) if p <= 14),
            "rows": tuple(r for r in loops.divisors(height) if r <= 14),
            "pad": (PAD_NONE, PAD_ROWS, PAD_COPY, PAD_APART)[: 4 if apart else 3] if facts.pad else (PAD_COPY,),
            "unroll": (UNROLL_COLUMNS, UNROLL_KERNEL),
            **lines,
        }

    def predict(self, facts: Contraction, plan: Plan, core: Core) -> Prediction | None:
        lanes, vectors, pixels, rows = plan["lanes"], plan["vectors"], plan["pixels"], plan["rows"]
        lines = plan.get("lines", 1)
        channels = facts.batch[-1].extent
        width, height = _extents(facts)
        full = core.lanes(facts.element_bytes)
        registers = math.ceil(lanes / full) * vectors
        tile = rows * pixels * registers
        kernel = facts.depth
        if channels % (lanes * vectors) or tile > core.vector_registers * _MOST_FILLED:
            return None
        if tile > _MOST_SUMS and not core.lane_fma:
            return None
        if lines > 1 and (height % (rows * lines) or plan["pad"] in (PAD_COPY, PAD_NONE)):
            return None
        across, down = facts.stride[-1], facts.stride[-2] if len(facts.stride) > 1 else 1
        wide = (pixels - 1) * across + facts.reach[-1]
        high = (rows - 1) * down + (facts.reach[-2] if len(facts.reach) > 1 else 1)
        if plan["unroll"] == UNROLL_KERNEL and tile + wide * registers > core.vector_registers * 0.75:
            return None
        # Pixels of a row share loads, and all rows of a fully unrolled tile; weights load once. Bounds checks prevent
        # sharing between rows.
        lies = plan["pad"] == PAD_NONE
        shared = plan["unroll"] == UNROLL_KERNEL and (core.lane_fma or not lies)
        read = high if shared else rows * facts.sums[0].extent
        # On Arm, interior tiles have no bounds checks (`farm.search.codegen.borders`).
        compared = read * _COMPARISON_CYCLES if lies and not core.lane_fma else 0.0
        loads = (min(wide * read, rows * pixels * kernel) + kernel) * registers
        products = tile * kernel
        bits = core.vector_bits
        waits = kernel * core.fma_latency * min(1.0, (products + loads) / core.window)
        # On x86 a vector load that is no power of two is assembled from pieces in the FMA pipes.
        parts = 0.0 if core.lane_fma else _PUT_TOGETHER * (loops.count_parts(lanes, full) - 1) * loads
        inner = max((products + parts) / core.fma_per_cycle(bits), loads / core.loads_per_cycle(bits), waits)
        issued = (products + loads) / core.issue_width
        inner = max(inner, issued) + (_ISSUED * issued if core.lane_fma else 0.0)
        tiles = math.prod(a.extent for a in facts.pixels) // (rows * pixels) * (channels // (lanes * vectors))
        compute = tiles * (inner + tile * 2 / core.issue_width + 10 + compared)
        pad = 0.0
        moved = float(facts.data_bytes)
        vector_bytes = core.vector_bits / 8
        if lies:
            row = (width - 1) * across + facts.reach[-1]
            far = _read_in_place(facts, core, high, rows * down, row, lanes * vectors)
        elif facts.pad and plan["pad"] != PAD_COPY:
            strip_rows = high + (lines - 1) * rows * down
            moved *= strip_rows / (rows * lines * down)
            strip = strip_rows * ((width - 1) * across + facts.reach[-1]) * lanes * vectors * facts.element_bytes
            # At least one cycle per store; with bounds checks, cores that issue five took three.
            apart = plan["pad"] == PAD_APART
            again = max(1.0, _COPIED / core.issue_width) if apart else max(3.0, _COMPARED / core.issue_width)
            again += vector_bytes / core.l2_bytes_per_cycle if strip > core.l1_bytes * 0.75 else 0.0
            pad = moved / vector_bytes * again
        elif facts.pad:
            pad = moved / vector_bytes * 2.0 + 2 * moved / core.l2_bytes_per_cycle
        if core.line_wait:
            far = core.line_wait * _count_lines(facts, plan, core, high, rows * down)
        elif not lies:
            far = loops.moving_cycles(float(facts.data_bytes + facts.result_bytes), core)
            far += (moved - facts.data_bytes) / core.l2_bytes_per_cycle
        parallel = (channels // (lanes * vectors)) * (height // (rows * lines))
        balance = math.ceil(parallel / core.threads) * core.threads / parallel
        cycles = (compute + pad + far) * balance / core.threads
        regions = 1 + (1 if facts.pad and plan["pad"] == PAD_COPY else 0)
        seconds = cycles / core.freq_hz + regions * core.region_s * (core.threads > 1)
        return Prediction(seconds, {"compute": compute, "pad": pad, "far": far, "balance": balance})

    def apply(self, schedule: Any, facts: Contraction, plan: Plan) -> None:
        last = self.begin(schedule, facts, plan)
        outer, column, tile = self.tile(schedule, facts, schedule.get_loops(last), plan)
        *outer, block = outer
        together = []
        if plan.get("lines", 1) > 1:
            line, inner_line = schedule.split(outer.pop(), [None, plan["lines"]])
            outer, together = [*outer, line], [inner_line]
        schedule.reorder(*outer, block, *together, column, *tile)
        parallel = schedule.fuse(*outer, block)
        first = self.fill(schedule, facts, plan, column, tile)
        schedule.parallel(parallel)
        schedule.decompose_reduction(schedule.get_sblock(facts.main), first)
        if facts.pad and plan["pad"] != PAD_NONE:
            _schedule_pad(schedule, facts.pad, plan, parallel)

    @staticmethod
    def begin(schedule: Any, facts: Contraction, plan: Plan) -> Any:
        """Inline what is computed at its reader; return the block that writes the result."""
        loops.inline_blocks(schedule, ((facts.pad,) if facts.pad and plan["pad"] == PAD_NONE else ()) + facts.between)
        return loops.write_apart(schedule, facts)

    @staticmethod
    def tile(schedule: Any, facts: Contraction, own: Any, plan: Plan) -> tuple[list[Any], Any, list[Any]]:
        """Split the loops of the block that writes the result.

        Return the outer loops with blocks of channels last, the loop over a row's tiles, and the tile's own loops.
        """
        *outer, channel = own
        block, vector, lane = schedule.split(channel, [None, plan["vectors"], plan["lanes"]])
        column, pixel = schedule.split(outer.pop(), [None, plan["pixels"]])
        tile = [pixel]
        if len(facts.pixels) > 1 and outer:
            line, row = schedule.split(outer.pop(), [None, plan["rows"]])
            outer, tile = [*outer, line], [row, pixel]
        return [*outer, block], column, [*tile, vector, lane]

    @staticmethod
    def fill(schedule: Any, facts: Contraction, plan: Plan, column: Any, tile: list[Any]) -> Any:
        """Compute the convolution at a row's loop of tiles; `tile` are the loops inside it.

        Return the loop before which the accumulators are zeroed.
        """
        main = schedule.get_sblock(facts.main)
        schedule.compute_at(main, column, preserve_unit_loops=True)
        if facts.last != facts.main:
            schedule.set_scope(main, 0, "global")
        rank = len(facts.batch) + len(facts.pixels) + len(facts.sums)
        own = schedule.get_loops(main)[-rank:]
        sums = [own[axis.at] for axis in facts.sums]
        spatial = [own[axis.at] for axis in facts.pixels]
        inner, own_lane = schedule.split(own[facts.batch[-1].at], [None, plan["lanes"]])
        schedule.reorder(*sums, *spatial, inner, own_lane)
        for loop in (own_lane, tile[-1]):
            schedule.vectorize(loop)
        for loop in (*sums[plan["unroll"] == UNROLL_COLUMNS :], *spatial, inner, *tile[:-1]):
            schedule.unroll(loop)
        return sums[0]


def _read_in_place(facts: Contraction, core: Core, high: int, step: int, wide: int, channels: int) -> float:
    """Estimate the cycles of reading unpadded data in tiles of `high` rows, `step` apart, and of writing the result.

    A tile reads rows of `wide` pixels and `channels` of their channels; neighbours share cache lines.
    """
    part = max(1.0, _LINE_BYTES / (channels * facts.element_bytes))
    held = high * wide * max(channels * facts.element_bytes, _LINE_BYTES) <= core.l1_bytes * _PART_HELD
    again = facts.data_bytes * (high / step * (part**_PART_COST if held else part) - 1)
    fetched = loops.moving_cycles(float(facts.data_bytes + facts.result_bytes), core)
    return _WAITED * (fetched + max(0.0, again) / core.l2_bytes_per_cycle)


def _count_lines(facts: Contraction, plan: Plan, core: Core, high: int, step: int) -> float:
    """Estimate the L1 misses, in lines, of tiles of `high` rows, `step` apart.

    A block of channels may share its first and last line with other blocks, which hit where a tile's rows fit.
    """
    width = facts.pixels[-1].extent
    wide = (width - 1) * facts.stride[-1] + facts.reach[-1]
    block = plan["lanes"] * plan["vectors"] * facts.element_bytes
    part = (1 + (block - math.gcd(block, _LINE_BYTES)) / _LINE_BYTES) * _LINE_BYTES / block
    # Pixels are all channels apart, so they use only some sets of the cache.
    apart = math.gcd(facts.batch[-1].extent * facts.element_bytes, core.l1_bytes // _WAYS)
    room = core.l1_bytes // max(apart, _LINE_BYTES) * _PART_HELD
    lines, lies = plan.get("lines", 1), plan["pad"] == PAD_NONE
    strip = high if lies else high + (lines - 1) * step
    if strip * wide + lines * plan["rows"] * width <= room:
        part = 1.0
    times = strip / (lines * step)
    if plan["pad"] == PAD_COPY:
        times += 2.0
    elif not lies and strip * wide * block > core.l1_bytes * _PART_HELD:
        times *= 3.0
    return (facts.data_bytes * times + facts.result_bytes) / _LINE_BYTES * part


def _schedule_pad(schedule: Any, name: str, plan: Plan, parallel: Any) -> None:
    pad = schedule.get_sblock(name)
    if plan["pad"] == PAD_COPY:
        loops.pad_first(schedule, pad, plan["lanes"], apart=False)
        return
    schedule.compute_at(pad, parallel, preserve_unit_loops=True)
    loops.copy_pad(schedule, pad, plan["lanes"], apart=plan["pad"] == PAD_APART, most_unrolled=_MOST_UNROLLED)


def _extents(facts: Contraction) -> tuple[int, int]:
    """Return width and height of the result; one row where it has one dimension."""
    pixels = [axis.extent for axis in facts.pixels]
    return pixels[-1], pixels[-2] if len(pixels) > 1 else 1
