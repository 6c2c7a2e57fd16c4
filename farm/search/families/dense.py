"""Dense contractions by register tiles: convolutions of any kernel without groups, and matrix products.

A tile of `rows` x `pixels` results by `vectors` x `lanes` channels stays in registers while the whole reduction runs
around it; what follows the contraction is applied as the tile is written out. How weights are packed for that follows
from the loops and is MetaSchedule's post-processor's doing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families import facts as reading
from farm.search.families import loops
from farm.search.families import loops as steps
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction
from farm.search.graph import dots

# Transfers of a sum for each part: it is read, the part's own is read, and it is written.
_MOVED = 3


def list_parts(facts: Contraction, core: Core) -> dict[str, tuple[int, ...]]:
    """The knob `parts`, where a block of two vectors of channels is too long to be fetched ahead and a part is not."""
    places = [axis.at for axis in (*facts.pixels, *facts.channels, *facts.sums)]
    if facts.group or len(facts.sums) < 2 or places != list(range(len(places))):
        return {}
    pair = 2 * core.lanes(facts.element_bytes) * facts.depth * facts.weight_element_bytes
    rows = facts.sums[0].extent
    fits = 0 < core.prefetched_bytes < pair <= rows * core.prefetched_bytes
    return {"parts": (1, rows)} if rows > 1 and fits else {}


def count_moved(plan: Plan) -> int:
    """How often a sum is read or written beside what a single part does."""
    parts = plan.get("parts", 1)
    return _MOVED * parts if parts > 1 else 0


def apply(schedule: Any, facts: Contraction, plan: Plan, split_tile: Any) -> None:
    """Schedule a contraction with nothing between it and the block that writes the result, but for its pad.

    `split_tile` splits loops of pixels and channels into outer ones and a list of a tile's own.
    """
    main = schedule.get_sblock(facts.main)
    part_sums = schedule.rfactor(schedule.get_loops(main)[facts.sums[0].at], 0)
    last = loops.write_apart(schedule, facts)
    *pixels, channel = schedule.get_loops(last)
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
        loops.pad_first(schedule, schedule.get_sblock(facts.pad), plan["lanes"], apart=False)


# Options of `order`, which loops are outside: rows of pixels, so that the weights serve all channels of a few rows, or
# blocks of channels, so that a block of weights stays in the cache for all pixels.
ROWS_OUTSIDE, CHANNELS_OUTSIDE = 0, 1
# Options of `pad`, when padded data are written: all of them first, or the rows that a part needs next. Skewed: all of
# them first, with a line of the cache left free after each pixel. None: data that are only moved are read in place.
PAD_ALL, PAD_ROWS, PAD_SKEWED, PAD_NONE = 0, 1, 2, 3
MOST_VECTORS, MOST_ROWS = 8, 4
# Share of a cache that one kind of data can count on beside the others.
_SHARE = 0.75
# Data of a tile's pixels that come from the second cache are waited for, other than weights, which lie in order: they
# lie apart by a power of two and push each other out (13x13x512>1000 on Zen 4: 80 GFLOPS of 110).
_SCATTERED = 1.0
# x86's first caches have sets of eight lines or more, found by an address's last twelve bits. Tiles of 13 pixels 8 KiB
# apart took 2.6 times as long as tiles of 7 (1x1/2 14x14x1024>2048 on Zen 3), of 14 pixels 4 KiB apart 2.8 times what
# was predicted.
_WAY_BYTES, _WAYS, _COLLIDING = 4096, 8, 3.0
_LINE_BYTES = 64
# Where lanes are factors: share of the issue's cycles that count although multiply-adds hide them, so that among tiles
# which are equal otherwise the one with the fewest instructions is taken.
_ISSUED = 0.15
# Share of its loads' rate that a core keeps up where every factor is one (Zen 3: tiles of 14 pixels by one vector,
# fifteen loads for fourteen multiply-adds, took 1.19 times as long as four by three).
_LOADED = 0.92
# Steps of a reduction that LLVM unrolls whole: three channels by a kernel of 3x3.
_UNROLLED = 27
# Instructions of the innermost loop itself: its counter, its branch, two addresses.
_LOOP = 4
# Cycles that a tile costs besides its multiply-adds: loop ends, addresses, the first loads.
_TILE_CYCLES = 14.0


class Dense:
    """See the module."""

    name = "dense"
    # Loops inside the lanes' that one instruction takes care of.
    inner = 0

    def read(self, schedule: Any) -> Contraction | None:
        """A contraction with pixels and one loop of channels that is in no batch."""
        return self.read_blocks(schedule, reading.list_blocks(schedule))

    def read_blocks(self, schedule: Any, names: list[str]) -> Contraction | None:
        """The same of some of a function's blocks."""
        found = reading.read_contraction(schedule, names)
        if found is None or not found.pixels or len(found.channels) != 1 or found.batch:
            return None
        return found

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """`lanes`, `vectors`, `pixels`, `rows` of a tile; `order` of the loops; `pad`.

        Where a multiply-add takes a lane as its factor also `steps`: of the reduction, with their data in one vector;
        where channels fill none, a row of the kernel, with the data of all pixels in as few as hold them. Where a block
        of weights is too long to be fetched ahead also `parts` of the reduction, see `reduction_parts`.
        """
        full = core.lanes(facts.element_bytes)
        sizes = [size for size in (full, full // 2, full // 4) if size > 1 and facts.channel % size == 0] or [1]
        height = facts.pixels[-2].extent if len(facts.pixels) > 1 else 1
        return {
            "lanes": tuple(sizes),
            "vectors": tuple(
                v for v in range(1, MOST_VECTORS + 1) if any(facts.channel % (v * size) == 0 for size in sizes)
            ),
            "pixels": tuple(p for p in steps.divisors(facts.pixels[-1].extent) if p < core.vector_registers),
            "rows": tuple(r for r in steps.divisors(height) if r <= MOST_ROWS),
            "order": (ROWS_OUTSIDE, CHANNELS_OUTSIDE),
            "pad": self._list_pads(facts, core),
            **list_steps(core, facts.line, facts.element_bytes, facts.row),
            **({} if self.inner else list_parts(facts, core)),
        }

    @staticmethod
    def _list_pads(facts: Contraction, core: Core) -> tuple[int, ...]:
        if not facts.pad or core.lane_fma:
            return (PAD_ALL, PAD_ROWS) if facts.pad else (PAD_ALL,)
        collide = _count_in_set(facts, core.vector_registers) >= _WAYS
        more = ((PAD_SKEWED, collide), (PAD_NONE, facts.moved))
        return (PAD_ALL, PAD_ROWS, *(pad for pad, suits in more if suits))

    def predict(self, facts: Contraction, plan: Plan, core: Core) -> Prediction | None:
        """Cycles of the tiles' inner loops, and what comes from further away than the second cache."""
        lanes, vectors, tile = plan["lanes"], plan["vectors"], plan["pixels"] * plan["rows"]
        block, held = lanes * vectors, self._count_held(facts, plan, core)
        registers = vectors + 2 if _reads_weights(facts, tile, core) else count_registers(tile, vectors, held)
        if facts.channel % block or registers > core.vector_registers:
            return None
        if plan["pad"] == PAD_ROWS and (plan["order"] == CHANNELS_OUTSIDE or len(facts.pixels) == 1):
            return None
        parts = plan.get("parts", 1)
        if parts > 1 and (plan["order"] == ROWS_OUTSIDE or plan["pad"] == PAD_ROWS):
            return None
        blocks = facts.channel // block
        area = math.prod(axis.extent for axis in facts.pixels)
        tiles = area // tile * blocks
        step = self._step_cycles(facts, plan, core)
        step *= _COLLIDING if self._collides(facts, plan, core) else 1.0
        inner = max(facts.depth * step, self._streamed(facts, plan, core) / core.l2_bytes_per_cycle)
        inner += self._reloads(facts, plan, core) / core.l2_bytes_per_cycle
        moved = 2 + count_moved(plan)
        written = tile * vectors * moved / core.loads_per_cycle(lanes * facts.element_bytes * 8)
        compute = tiles * (inner + written + parts * _TILE_CYCLES)
        shared, weights, others = self._split(facts, plan, core, blocks, area)
        balance = math.ceil(shared / core.threads) * core.threads / shared
        pad = 0.0
        copied = facts.pad is not None and plan["pad"] != PAD_NONE
        if copied:
            # Rows that two neighbouring parts need are padded for both.
            rows, stride = plan["rows"], facts.stride[-2] if len(facts.stride) > 1 else 1
            reach = facts.reach[-2] if len(facts.reach) > 1 else 1
            again = max(1.0, (reach + (rows - 1) * stride) / (rows * stride)) if plan["pad"] == PAD_ROWS else 1.0
            # What all threads wrote first is read again from the second cache, a part's own rows from the first.
            pad = (2 if plan["pad"] == PAD_ROWS else 3) * facts.data_bytes * again / core.l2_bytes_per_cycle
        fetched = weights / core.far_bytes_per_cycle
        if self._fetches(facts, plan, core, blocks, area):
            fetched = max(0.0, fetched - compute * balance) + core.l2_wait * fetched
        fetched += others / core.far_bytes_per_cycle
        cycles = (compute * balance + fetched + pad) / core.threads
        regions = 2 if copied and plan["pad"] != PAD_ROWS else 1
        seconds = cycles / core.freq_hz + (regions * core.region_s if core.threads > 1 else 0.0)
        terms = {"compute": compute, "far": fetched, "pad": pad, "balance": balance, "steps": step / (tile * vectors)}
        return Prediction(seconds, terms)

    def _step_cycles(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Of one step of the reduction for all of a tile."""
        tile, joint = plan["pixels"] * plan["rows"], plan.get("steps", 1)
        factors = self._count_held(facts, plan, core) / joint if joint > 1 else float(tile)
        bits = plan["lanes"] * facts.element_bytes * 8
        direct = _reads_weights(facts, tile, core)
        return step_cycles(core, bits, tile, plan["vectors"], joint, factors, halved=facts.halved, direct=direct)

    def _count_held(self, facts: Contraction, plan: Plan, core: Core) -> int:
        """Registers with data: of one factor, of a vector for each pixel, or of all that a row of the kernel reads."""
        if not _joins_row(facts, plan):
            return plan["pixels"] * plan["rows"] if plan.get("steps", 1) > 1 else 1
        wide = (plan["pixels"] - 1) * facts.stride[-1] + facts.reach[-1]
        # One is left for what LLVM loads early from the next row: thirteen pixels of one channel had 30 spills without.
        return plan["rows"] * math.ceil(wide * facts.line / core.lanes(facts.element_bytes)) + 1

    @staticmethod
    def _collides(facts: Contraction, plan: Plan, core: Core) -> bool:
        """Whether more of a tile's pixels than a set of the first cache holds lie in one set."""
        return not core.lane_fma and plan["pad"] != PAD_SKEWED and _count_in_set(facts, plan["pixels"]) >= _WAYS

    @staticmethod
    def _streamed(facts: Contraction, plan: Plan, core: Core) -> int:
        """Bytes of weights that come from the second cache or beyond for every tile, beside its multiply-adds."""
        weights = facts.depth * plan["lanes"] * plan["vectors"] * facts.weight_element_bytes
        return weights if weights > core.l1_bytes * _SHARE else 0

    def _reloads(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Bytes that a tile waits for because the first cache does not hold what is used again."""
        weights = facts.depth * plan["lanes"] * plan["vectors"] * facts.weight_element_bytes
        sizes = [plan["pixels"], plan["rows"]]
        spans = zip(sizes, reversed(facts.stride), reversed(facts.reach), strict=False)
        data = math.prod((size - 1) * stride + reach for size, stride, reach in spans)
        data *= facts.sums[-1].extent * facts.element_bytes
        waited = steps.wait_share(core, plan, facts.element_bytes) * self._streamed(facts, plan, core)
        # Where blocks of channels are inside, the same data serve all of them, else each tile comes with new data.
        blocks_inside = plan["order"] == ROWS_OUTSIDE and len(facts.pixels) == 1
        if weights + data > core.l1_bytes:
            waited = max(waited, core.l2_wait * weights if blocks_inside else _SCATTERED * data)
        return waited

    @staticmethod
    def _fetches(facts: Contraction, plan: Plan, core: Core, blocks: int, area: int) -> bool:
        """Whether tiles fetch the next block of weights while they share one, see `farm.search.build.prefetch`."""
        sharing = area // (plan["pixels"] * plan["rows"])
        if plan["order"] == ROWS_OUTSIDE:
            sharing = facts.pixels[-1].extent // plan["pixels"] if len(facts.pixels) > 1 else 1
        block = facts.weight_bytes / blocks / plan.get("parts", 1)
        return sharing > 1 and blocks > 1 and block <= core.prefetched_bytes

    @staticmethod
    def _split(facts: Contraction, plan: Plan, core: Core, blocks: int, area: int) -> tuple[int, float, float]:
        """Shares that run side by side, and bytes from beyond the second cache: of weights, and of all others."""
        width = facts.pixels[-1].extent
        rows = area // width // plan["rows"]
        if plan["order"] == ROWS_OUTSIDE:
            # All blocks' weights are read once for each row of tiles, or each tile where pixels are one loop.
            times = rows if len(facts.pixels) > 1 else area // plan["pixels"]
            shares = times if len(facts.pixels) > 1 else times * blocks
            fits = facts.weight_bytes <= core.l2_bytes * _SHARE
            weights, data = facts.weight_bytes * (core.threads if fits else times), facts.data_bytes
        else:
            parts = plan.get("parts", 1)
            shares = blocks * (rows * (width // plan["pixels"]) if parts == 1 else 1)
            fits = facts.data_bytes <= core.l2_bytes * _SHARE
            # A block that the second cache does not hold comes again for every tile.
            held = facts.weight_bytes / blocks / parts <= core.l2_bytes * _SHARE
            tiles = area // (plan["pixels"] * plan["rows"])
            weights = facts.weight_bytes * (1 if held else tiles)
            data = facts.data_bytes * (core.threads if fits else blocks)
        return shares, float(weights), float(data + facts.result_bytes)

    def apply(self, schedule: Any, facts: Contraction, plan: Plan) -> None:
        """Tile what follows the contraction, compute the contraction inside, unroll what is in registers."""
        facts = self.begin(schedule, facts, plan)
        if plan.get("parts", 1) > 1:
            apply(schedule, facts, plan, self._split_tile)
            return
        last = steps.write_apart(schedule, facts)
        parallel, at, tile = self.tile(schedule, schedule.get_loops(last), plan, by_rows=self._pads_rows(facts, plan))
        self.fill(schedule, facts, plan, parallel, at, tile)

    @staticmethod
    def begin(schedule: Any, facts: Contraction, plan: Plan) -> Contraction:
        """Inline what is between, leave a pad out that only moves data, or skew one; returns what is left to do."""
        for name in facts.between:
            schedule.compute_inline(schedule.get_sblock(name))
        if facts.pad and plan["pad"] == PAD_NONE:
            schedule.compute_inline(schedule.get_sblock(facts.pad))
            return dataclasses.replace(facts, pad=None)
        if plan["pad"] == PAD_SKEWED:
            line = _LINE_BYTES // facts.element_bytes
            schedule.storage_align(schedule.get_sblock(facts.pad), 0, -2, facts.line, line)
        return facts

    def fill(self, schedule: Any, facts: Contraction, plan: Plan, share: Any, at: Any, tile: list[Any]) -> None:
        """Compute the contraction at a loop of `write_apart`'s block, of which `tile` are the loops inside.

        `share`: the loop that is parallel, inside which rows are padded that are padded at a time.
        """
        main = schedule.get_sblock(facts.main)
        held, joint = None, plan.get("steps", 1)
        if joint > 1 and len(facts.sums) == 1:
            # By the block's own loops where no kernel moves the data: TVM cannot tell that pixels in one loop are at
            # constant places of a tile whose buffer has rows and columns, and would keep it in memory.
            held = schedule.reindex(main, ("read", facts.data_at))
        schedule.compute_at(main, at, preserve_unit_loops=True)
        if self._pads_rows(facts, plan):
            pad = schedule.get_sblock(facts.pad)
            schedule.compute_at(pad, share, preserve_unit_loops=True)
            steps.copy_pad(schedule, pad, plan["lanes"], apart=joint > 1)
        if facts.last != facts.main:
            schedule.set_scope(main, 0, "global")
        own = schedule.get_loops(main)[-(len(facts.pixels) + 1 + len(facts.sums) + self.inner) :]
        sums, pixels = [own[axis.at] for axis in facts.sums], [own[axis.at] for axis in facts.pixels]
        vector, lane = schedule.split(own[facts.channels[0].at], [None, plan["lanes"]])
        inside = [*pixels, vector]
        if _joins_row(facts, plan):
            sums, inside = sums[:-2], [*sums[-2:], *inside]
        elif joint > 1:
            sums[-1], step = schedule.split(sums[-1], [None, joint])
            inside = [step, *inside]
        schedule.reorder(*sums, *inside, lane)
        if joint > 1:
            held = held or schedule.cache_read(main, facts.data_at, "global")
            hold_data(schedule, held, sums[-1], joined=2 if _joins_row(facts, plan) else 1)
        schedule.vectorize(tile[-1])
        for loop in (*inside, *tile[:-1]):
            schedule.unroll(loop)
        schedule.parallel(share)
        self._compute(schedule, main, sums[0], lane)
        if facts.pad and not self._pads_rows(facts, plan):
            steps.pad_first(schedule, schedule.get_sblock(facts.pad), plan["lanes"], apart=joint > 1)

    def _compute(self, schedule: Any, main: Any, outermost: Any, lane: Any) -> None:
        """Make vectors of the lanes, and set the sums to zero before the outermost loop of the reduction."""
        schedule.vectorize(lane)
        schedule.decompose_reduction(main, outermost)

    @staticmethod
    def _pads_rows(facts: Contraction, plan: Plan) -> bool:
        return facts.pad is not None and plan["pad"] == PAD_ROWS

    @classmethod
    def tile(cls, schedule: Any, loops: Any, plan: Plan, *, by_rows: bool) -> tuple[Any, Any, list[Any]]:
        """Split and order the loops of the block that writes the result.

        Returns the parallel loop, the one inside which a tile is, and the tile's own, the vector last.
        """
        *before, channel = loops
        block, channel = schedule.split(channel, [None, plan["lanes"] * plan["vectors"]])
        *outer, column, tile = cls._split_tile(schedule, [*before, channel], plan)
        rows_first = plan["order"] == ROWS_OUTSIDE
        order = (
            [*outer, block, column]
            if rows_first and outer
            else [column, block]
            if rows_first
            else [block, *outer, column]
        )
        schedule.reorder(*order, *tile)
        if by_rows:
            return schedule.fuse(*outer), column, tile
        parallel = schedule.fuse(*order)
        return parallel, parallel, tile

    @staticmethod
    def _split_tile(schedule: Any, loops: Any, plan: Plan) -> list[Any]:
        """Split loops of pixels and of a block's channels: the outer ones, and last a list of a tile's own."""
        *before, channel = loops
        vector, lane = schedule.split(channel, [None, plan["lanes"]])
        column, pixel = schedule.split(before[-1], [None, plan["pixels"]])
        if len(before) == 1:
            return [column, [pixel, vector, lane]]
        line, row = schedule.split(before[-2], [None, plan["rows"]])
        return [*before[:-2], line, column, [row, pixel, vector, lane]]


def list_steps(core: Core, line: int, element_bytes: int, row: int = 1) -> dict[str, tuple[int, ...]]:
    """The knob `steps` where lanes can be factors: as many as fill a vector where `line` data do, else a `row`."""
    full = core.lanes(element_bytes)
    if not core.lane_fma or full == 1:
        return {}
    return {"steps": (full, 1)} if line % full == 0 else {"steps": (row, 1)} if row > line else {}


def _count_in_set(facts: Contraction, pixels: int) -> int:
    """How many of so many neighbouring pixels' data lie in one set of the first cache."""
    apart = facts.stride[-1] * facts.line * facts.element_bytes
    return -(-pixels * math.gcd(apart, _WAY_BYTES) // _WAY_BYTES)


def _joins_row(facts: Contraction, plan: Plan) -> bool:
    """Whether the steps that are taken together are a row of the kernel."""
    return facts.row > facts.line and plan.get("steps", 1) == facts.row


def count_registers(tile: int, vectors: int, held: int) -> int:
    """What a tile takes: its sums, weights of one step, and the data that are held."""
    return tile * vectors + vectors + held


def _reads_weights(facts: Contraction, tile: int, core: Core) -> bool:
    """Whether multiply-adds read their weights themselves.

    Those of one pixel do on x86, where it pays as long as LLVM unrolls the whole reduction: with 64 steps eight vectors
    took 1.9 times as long as thirteen pixels by one (13x13x64>256 on Zen 3).
    """
    return tile == 1 and not core.lane_fma and facts.depth <= _UNROLLED


def hold_data(schedule: Any, held: Any, loop: Any, joined: int = 1) -> None:
    """Let one step of a loop of sums load what it reads into registers first.

    `held` copies it, so many of its last loops joined and as one vector.
    """
    schedule.compute_at(held, loop, preserve_unit_loops=True)
    own = schedule.get_loops(held)[-len(schedule.get(held).iter_vars) :]
    for each in own[:-joined]:
        schedule.unroll(each)
    schedule.vectorize(schedule.fuse(*own[-joined:]) if joined > 1 else own[-1])


def step_cycles(
    core: Core,
    bits: int,
    tile: int,
    vectors: int,
    steps: int = 1,
    factors: float | None = None,
    *,
    halved: bool = False,
    direct: bool = False,
) -> float:
    """Cycles of one step of the reduction for a tile of `tile` pixels by `vectors` vectors of so many bits.

    The most of: multiply-adds, loads (a vector of weights, and so many `factors`: of each pixel one for so many
    `steps`), instructions issued, and the wait for the sum of the step before. Weights that are `halved` are
    widened by the pipes that multiply: one instruction on Arm (`shll`), two on x86 (`vpmovzxwd`, `vpslld`). On Zen 4
    tiles of 14 multiply-adds and 2 vectors of weights took 1.26 times as long so. With `direct` multiply-adds read
    weights themselves.
    """
    multiply = tile * vectors + (vectors * (1 if core.lane_fma else 2) if halved else 0)
    factors = tile / steps if factors is None else factors
    loads = vectors / core.loads_per_cycle(bits) + factors / core.load_pipes
    loads /= 1.0 if core.lane_fma or direct else _LOADED
    issued = (multiply + vectors + factors) / core.issue_width
    cycles = max(multiply / core.fma_per_cycle(bits), loads, issued, core.fma_latency)
    return cycles + (_ISSUED * (issued + _LOOP / steps / core.issue_width) if core.lane_fma else 0.0)


# On Arm, where a product takes several instructions: how many times as long as the second cache needs for a line it is
# waited for, so 12 cycles on a Cortex-A57, as emulated boards price a line.
_WAITED = 3.0
# On x86, where products, sums and signs crowd each other: eight of each take Zen 3 11.5 cycles, not eight.
_CROWDED = 1.4
# Registers of what is on its way: data of a pixel in two, products in 16 bits; on x86 data, their sizes, ones as well.
_PASSING, _PASSING_X86 = 7, 4


class Dots(Dense):
    """See the module."""

    name = "dots"
    inner = 1

    def read(self, schedule: Any) -> Contraction | None:
        """A contraction that is marked; its four products count as one of a number as wide as the sum."""
        found = super().read(schedule)
        mark = None if found is None else schedule.get(schedule.get_sblock(found.main)).annotations.get(dots.MARK)
        if found is None or mark is None:
            return None
        return dataclasses.replace(found, sums=found.sums[:-1], line=1, row=1, at_once=int(mark))

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """As `dense`, with the lanes that the instruction is there for."""
        found = dict(super().options(facts, core))
        there = dots.list_lanes("aarch64" if core.lane_fma else "x86_64", facts.at_once)
        return found | {"lanes": tuple(lanes for lanes in found["lanes"] if lanes in there)}

    def _compute(self, schedule: Any, main: Any, outermost: Any, lane: Any) -> None:
        """Set the sums to zero first; an instruction takes the place of the lanes."""
        zero = schedule.decompose_reduction(main, outermost)
        schedule.vectorize(schedule.get_loops(zero)[-1])
        kinds = {str(region.source.dtype) for region in schedule.get(main).reads}
        data = "uint8" if "uint8" in kinds else "int8"
        at_once = int(schedule.get(main).annotations[dots.MARK])
        schedule.tensorize(lane, dots.register(data, int(schedule.get(lane).extent), at_once))

    def _count_held(self, facts: Contraction, plan: Plan, core: Core) -> int:
        """Where a product of bytes takes several instructions: on Arm weights are two vectors, and so are data."""
        if facts.at_once == dots.STEP:
            return super()._count_held(facts, plan, core)
        return plan["vectors"] + _PASSING if core.lane_fma else _PASSING_X86

    def _reloads(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Where a product of bytes takes several instructions, on Arm a tile waits for all of its weights."""
        waited = super()._reloads(facts, plan, core)
        if facts.at_once == dots.STEP or not core.lane_fma:
            return waited
        weights = facts.depth * plan["lanes"] * plan["vectors"] * facts.weight_element_bytes
        return waited + (_WAITED * weights if waited else 0.0)

    def _step_cycles(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Of twice as many pipes as multiply-adds have.

        On Arm half of them multiply and half add up, and either makes weights and data ready. On x86 half multiply.
        """
        if facts.at_once == dots.STEP:
            return super()._step_cycles(facts, plan, core)
        pixels, vectors = plan["pixels"] * plan["rows"], plan["vectors"]
        tile = pixels * vectors
        rate = core.fma_per_cycle(plan["lanes"] * facts.element_bytes * 8)
        if not core.lane_fma:
            made, issued = 4 * tile + pixels, (4 * tile + 2 * pixels + vectors) / core.issue_width
            return max(_CROWDED * made / 2 / rate, issued, (pixels + vectors) / core.load_pipes)
        made, issued = 3 * tile + 2 * pixels + 2 * vectors, (3 * tile + 4 * pixels + 3 * vectors) / core.issue_width
        return max(2 * tile / rate, made / 2 / rate, issued, 2 * pixels / core.load_pipes)
