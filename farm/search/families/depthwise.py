"""Depthwise convolutions: a register tile of `rows` x `pixels` results by `vectors` x `lanes` channels.

Each product is used once, so loads are what counts: the kernel's loops are unrolled, and neighbouring pixels of a tile
share what they read.
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

# Options of `pad`: a copy of all data first, or of the rows that are needed next, also with the border's columns apart
# from those between: fewer instructions, which counts where few are issued at a time. Or no copy: each tile compares
# where it reads, which is settled when it is compiled for all but the border's rows and columns.
PAD_COPY, PAD_ROWS, PAD_APART, PAD_NONE = 0, 1, 2, 3
# Instructions of a vector's copy where all columns are compared, and where those between are not (Cortex-A57).
_COMPARED, _COPIED = 10, 3
# Cycles of a tile for each row of the kernel that it compares where it reads its data where they lie; the share of the
# first cache past which neighbours no longer find the rest of a line there, and what a part of a line costs else, as an
# exponent; the part of the traffic that is waited for. Fitted to 237 schedules of the ten depthwise convolutions of
# mobilenet_v2 on Zen 3 and 136 of four of them as priced for a Cortex-A57.
_COMPARISON_CYCLES, _PART_HELD, _PART_COST, _WAITED = 3.0, 0.5, 0.25, 0.3
_LINE_BYTES = 64
# Of the first cache of a core whose waits are known, at least.
_WAYS = 2
# Most rows of tiles whose data are padded together.
_MOST_LINES = 8
# Share of the issue's cycles that counts although multiply-adds hide them, as in `dense`.
_ISSUED = 0.15
# Options of `unroll`: the kernel's columns, or all of it, which shares loads among rows and needs registers for it.
UNROLL_COLUMNS, UNROLL_KERNEL = 0, 1
# Share of the registers that a tile may take: the compiler keeps what neighbouring pixels share in others, and spills
# where there are none (measured: twice the time from 0.75 on).
_MOST_FILLED = 0.6
# Sums of a tile on x86, whose multiply-adds read one factor from memory: with 16 and more of 32 registers LLVM spills
# (28x28x192 on an Intel server: 38.6 us by 4 x 2 pixels and two vectors, 28.4 by 7 and two).
_MOST_SUMS = 15
# What a further part of a load takes of multiply-adds' pipes (28x28x120, 5x5: 85 us by 12 lanes, 52 by 8, 109 by 15).
_PUT_TOGETHER = 2.0
# Vectors of a tile on x86, the first of them where tiles are predicted alike: 7 pixels of two lines side by side took
# 0.83 to 0.94 of the time of 14 of one (3x3 112x112x32, 28x28x192 and 14x14x384 on an Intel server).
VECTORS = (2, 1, 3)
# Columns of a padded row whose copies are written one after the other: a vector each, two instructions.
_MOST_UNROLLED = 128


class Depthwise:
    """Convolutions whose channels are not summed over."""

    name = "depthwise"

    def read(self, schedule: Any) -> Contraction | None:
        found = reading.read_contraction(schedule)
        if found is None or found.group != 1 or found.channels or len(found.batch) != 1 or not found.pixels:
            return None
        return found

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """`lanes`, `vectors`, `pixels`, `rows` of a tile; `pad`; `unroll`.

        Where instructions are what counts also `lines`: rows of tiles whose data are padded together.
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
        # Pixels of a row share their loads, and all of the tile where everything is unrolled; weights come once. Rows
        # that are compared share nothing.
        lies = plan["pad"] == PAD_NONE
        shared = plan["unroll"] == UNROLL_KERNEL and (core.lane_fma or not lies)
        read = high if shared else rows * facts.sums[0].extent
        # On Arm tiles inside an image compare nothing (`farm.search.build.borders`).
        compared = read * _COMPARISON_CYCLES if lies and not core.lane_fma else 0.0
        loads = (min(wide * read, rows * pixels * kernel) + kernel) * registers
        products = tile * kernel
        bits = core.vector_bits
        waits = kernel * core.fma_latency * min(1.0, (products + loads) / core.window)
        # On x86 a load of a vector that is no power of two comes in parts, put together where multiply-adds are made.
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
            # A store a cycle is the least; with comparisons three cycles were measured on cores that issue five.
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
        """Inline what is computed where it is read; returns the block that writes the result."""
        for name in ((facts.pad,) if facts.pad and plan["pad"] == PAD_NONE else ()) + facts.between:
            schedule.compute_inline(schedule.get_sblock(name))
        return loops.write_apart(schedule, facts)

    @staticmethod
    def tile(schedule: Any, facts: Contraction, own: Any, plan: Plan) -> tuple[list[Any], Any, list[Any]]:
        """Split the loops of the block that writes the result.

        Returns the outer ones, blocks of channels last, that of a row's tiles, and the tile's.
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
        """Compute the convolution at a row's loop of tiles, of which `tile` are the loops inside.

        Returns the loop before which its sums are to be set to zero.
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
    """Cycles for data that tiles of `high` rows, `step` apart, read where they lie, and for the result.

    Rows of `wide` pixels, so many `channels` of them at a time: what neighbours read is a part of the same lines.
    """
    part = max(1.0, _LINE_BYTES / (channels * facts.element_bytes))
    held = high * wide * max(channels * facts.element_bytes, _LINE_BYTES) <= core.l1_bytes * _PART_HELD
    again = facts.data_bytes * (high / step * (part**_PART_COST if held else part) - 1)
    fetched = loops.moving_cycles(float(facts.data_bytes + facts.result_bytes), core)
    return _WAITED * (fetched + max(0.0, again) / core.l2_bytes_per_cycle)


def _count_lines(facts: Contraction, plan: Plan, core: Core, high: int, step: int) -> float:
    """Lines that the first cache lacks, where tiles of `high` rows, `step` apart, go over the data.

    A block of channels may begin and end within lines, whose rest the next block finds where a tile's rows fit.
    """
    width = facts.pixels[-1].extent
    wide = (width - 1) * facts.stride[-1] + facts.reach[-1]
    block = plan["lanes"] * plan["vectors"] * facts.element_bytes
    part = (1 + (block - math.gcd(block, _LINE_BYTES)) / _LINE_BYTES) * _LINE_BYTES / block
    # Pixels lie apart by all channels, so that they share some of the cache's sets.
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
    """Width and height of the result; one row where there is but one dimension."""
    pixels = [axis.extent for axis in facts.pixels]
    return pixels[-1], pixels[-2] if len(pixels) > 1 else 1
