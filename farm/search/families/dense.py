"""Register tiles for dense contractions: convolutions (also grouped), matrix products (also batched), int8 products.

A tile of `rows` x `pixels` results by `vectors` x `lanes` channels stays in registers during the whole reduction; the
blocks after the contraction are fused into its write-back. MetaSchedule's post-processor packs the weights to match.
One module: the four families share the tile, its schedule and its estimate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families import facts as reading
from farm.search.families import loops as steps
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction

# Values of `order`, the outer loops: rows of pixels share all weights, or blocks of channels stay in the cache.
ROWS_OUTSIDE, CHANNELS_OUTSIDE = 0, 1
# Values of `pad`: pad everything first, pad the rows that a part needs next, pad everything with a skew of one cache
# line per pixel, or read unpadded data in place (only where the pad block merely moves data).
PAD_ALL, PAD_ROWS, PAD_SKEWED, PAD_NONE = 0, 1, 2, 3
MOST_VECTORS, MOST_ROWS = 8, 4
# Fraction of a cache that one kind of data can count on.
_SHARE = 0.75
# Strided pixel loads from L2 stall: power-of-two strides alias in L1. Weights are contiguous and do not (13x13x512>1000
# on Zen 4: 80 GFLOPS of 110).
_SCATTERED = 1.0
# L1d of x86 cores has eight ways or more and is indexed by the low twelve address bits. Tiles of 13 pixels 8 KiB apart
# took 2.6 times as long as tiles of 7 (1x1/2 14x14x1024>2048 on Zen 3); 14 pixels 4 KiB apart, 2.8 times the estimate.
_WAY_BYTES, _WAYS, _COLLIDING = 4096, 8, 3.0
_LINE_BYTES = 64
# With lane FMAs: weight of issue cycles that FMAs hide, so that among equal tiles the fewest instructions win.
_ISSUED = 0.15
# Achievable fraction of peak load throughput when every operand is loaded (Zen 3: tiles of 14 pixels by one vector,
# 15 loads for 14 FMAs, took 1.19 times as long as four by three).
_LOADED = 0.92
# Reduction steps that LLVM unrolls completely: three channels of a 3x3 kernel.
_UNROLLED = 27
# Instructions of the innermost loop: counter, branch, two addresses.
_LOOP = 4
# Cycles of a tile besides its FMAs: loop ends, addresses, first loads.
_TILE_CYCLES = 14.0


class Dense:
    """Family of dense contractions."""

    name = "dense"
    # Loops inside the lane loop that one instruction replaces.
    inner = 0

    def read(self, schedule: Any) -> Contraction | None:
        """Read a contraction with pixels and one loop of channels, without a batch."""
        return self.read_blocks(schedule, reading.list_blocks(schedule))

    def read_blocks(self, schedule: Any, names: list[str]) -> Contraction | None:
        """Like `read`, for some of a function's blocks."""
        found = reading.read_contraction(schedule, names)
        if found is None or not found.pixels or len(found.channels) != 1 or found.batch:
            return None
        return found

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Offer `lanes`, `vectors`, `pixels` and `rows` of a tile, the loop `order` and `pad`.

        With lane FMAs also `steps`: reduction steps whose data share a vector or, where channels do not fill one, a
        kernel row for all pixels. Where a block of weights is too long to prefetch also `parts` of the reduction.
        """
        height = facts.pixels[-2].extent if len(facts.pixels) > 1 else 1
        return {
            **list_vectors(core.lanes(facts.element_bytes), facts.channel, MOST_VECTORS),
            "pixels": tuple(p for p in steps.divisors(facts.pixels[-1].extent) if p < core.vector_registers),
            "rows": tuple(r for r in steps.divisors(height) if r <= MOST_ROWS),
            "order": (ROWS_OUTSIDE, CHANNELS_OUTSIDE),
            "pad": self._list_pads(facts, core),
            **list_steps(core, facts.line, facts.element_bytes, facts.row),
            **({} if self.inner else steps.list_parts(facts, core)),
        }

    @staticmethod
    def _list_pads(facts: Contraction, core: Core) -> tuple[int, ...]:
        if not facts.pad or core.lane_fma:
            return (PAD_ALL, PAD_ROWS) if facts.pad else (PAD_ALL,)
        collide = _count_in_set(facts, core.vector_registers) >= _WAYS
        more = ((PAD_SKEWED, collide), (PAD_NONE, facts.moved))
        return (PAD_ALL, PAD_ROWS, *(pad for pad, suits in more if suits))

    def predict(self, facts: Contraction, plan: Plan, core: Core) -> Prediction | None:
        """Estimate the cycles of the tiles' inner loops and of the traffic beyond L2."""
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
        # The pixels of a tile may exceed the ways of one L1 set.
        if not core.lane_fma and plan["pad"] != PAD_SKEWED and _count_in_set(facts, plan["pixels"]) >= _WAYS:
            step *= _COLLIDING
        inner = max(facts.depth * step, self._streamed(facts, plan, core) / core.l2_bytes_per_cycle)
        inner += self._reloads(facts, plan, core) / core.l2_bytes_per_cycle
        near = tiles * (inner - facts.depth * step)
        moved = 2 + steps.count_moved_parts(plan)
        written = tile * vectors * moved / core.loads_per_cycle(lanes * facts.element_bytes * 8)
        compute = tiles * (inner + written + parts * _TILE_CYCLES)
        shared, weights, others = self._split(facts, plan, core, blocks, area)
        balance = math.ceil(shared / core.threads) * core.threads / shared
        pad = 0.0
        copied = facts.pad is not None and plan["pad"] != PAD_NONE
        if copied:
            # Neighbouring parts both pad the rows that they share.
            rows, stride = plan["rows"], facts.stride[-2] if len(facts.stride) > 1 else 1
            reach = facts.reach[-2] if len(facts.reach) > 1 else 1
            again = max(1.0, (reach + (rows - 1) * stride) / (rows * stride)) if plan["pad"] == PAD_ROWS else 1.0
            # Data padded by all threads is read again from L2, a part's own rows from L1.
            pad = (2 if plan["pad"] == PAD_ROWS else 3) * facts.data_bytes * again / core.l2_bytes_per_cycle
        fetched = weights / core.far_bytes_per_cycle
        if self._fetches(facts, plan, core, blocks, area):
            fetched = max(0.0, fetched - compute * balance) + core.l2_wait * fetched
        fetched += others / core.far_bytes_per_cycle
        cycles = (compute * balance + fetched + pad) / core.threads
        regions = 2 if copied and plan["pad"] != PAD_ROWS else 1
        seconds = cycles / core.freq_hz + (regions * core.region_s if core.threads > 1 else 0.0)
        terms = {"compute": compute, "far": fetched, "pad": pad, "balance": balance, "steps": step / (tile * vectors)}
        return Prediction(seconds, {**terms, "near": near})

    def _step_cycles(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Estimate the cycles of one reduction step of a tile."""
        tile, joint = plan["pixels"] * plan["rows"], plan.get("steps", 1)
        factors = self._count_held(facts, plan, core) / joint if joint > 1 else float(tile)
        bits = plan["lanes"] * facts.element_bytes * 8
        direct = _reads_weights(facts, tile, core)
        return step_cycles(core, bits, tile, plan["vectors"], joint, factors, halved=facts.halved, direct=direct)

    def _count_held(self, facts: Contraction, plan: Plan, core: Core) -> int:
        """Count the registers for data: one factor, a vector per pixel, or a whole kernel row's."""
        if not _joins_row(facts, plan):
            return plan["pixels"] * plan["rows"] if plan.get("steps", 1) > 1 else 1
        wide = (plan["pixels"] - 1) * facts.stride[-1] + facts.reach[-1]
        # One more for loads that LLVM hoists from the next row; without it 13 pixels of one channel had 30 spills.
        return plan["rows"] * math.ceil(wide * facts.line / core.lanes(facts.element_bytes)) + 1

    @staticmethod
    def _streamed(facts: Contraction, plan: Plan, core: Core) -> int:
        """Return the bytes of weights that each tile streams from L2 or beyond during its FMAs."""
        weights = facts.depth * plan["lanes"] * plan["vectors"] * facts.weight_element_bytes
        return weights if weights > core.l1_bytes * _SHARE else 0

    def _reloads(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Return the bytes of stalled reloads of data that L1 does not keep."""
        weights = facts.depth * plan["lanes"] * plan["vectors"] * facts.weight_element_bytes
        sizes = [plan["pixels"], plan["rows"]]
        spans = zip(sizes, reversed(facts.stride), reversed(facts.reach), strict=False)
        data = math.prod((size - 1) * stride + reach for size, stride, reach in spans)
        data *= facts.sums[-1].extent * facts.element_bytes
        waited = steps.wait_share(core, plan, facts.element_bytes) * self._streamed(facts, plan, core)
        # With the blocks of channels inside they share data, else each tile loads new data.
        blocks_inside = plan["order"] == ROWS_OUTSIDE and len(facts.pixels) == 1
        if weights + data > core.l1_bytes:
            waited = max(waited, core.l2_wait * weights if blocks_inside else _SCATTERED * data)
        return waited

    @staticmethod
    def _fetches(facts: Contraction, plan: Plan, core: Core, blocks: int, area: int) -> bool:
        """Say whether tiles that share a weight block prefetch the next, see `farm.search.codegen.prefetch`."""
        sharing = area // (plan["pixels"] * plan["rows"])
        if plan["order"] == ROWS_OUTSIDE:
            sharing = facts.pixels[-1].extent // plan["pixels"] if len(facts.pixels) > 1 else 1
        block = facts.weight_bytes / blocks / plan.get("parts", 1)
        return sharing > 1 and blocks > 1 and block <= core.prefetched_bytes

    @staticmethod
    def _split(facts: Contraction, plan: Plan, core: Core, blocks: int, area: int) -> tuple[int, float, float]:
        """Return the parallel chunks, and the bytes from beyond L2: of weights, and of everything else."""
        width = facts.pixels[-1].extent
        rows = area // width // plan["rows"]
        if plan["order"] == ROWS_OUTSIDE:
            # All weights are read once per row of tiles, or per tile where pixels are one loop.
            times = rows if len(facts.pixels) > 1 else area // plan["pixels"]
            shares = times if len(facts.pixels) > 1 else times * blocks
            fits = facts.weight_bytes <= core.l2_bytes * _SHARE
            weights, data = facts.weight_bytes * (core.threads if fits else times), facts.data_bytes
        else:
            parts = plan.get("parts", 1)
            shares = blocks * (rows * (width // plan["pixels"]) if parts == 1 else 1)
            fits = facts.data_bytes <= core.l2_bytes * _SHARE
            # A block that L2 does not hold is read again for every tile.
            held = facts.weight_bytes / blocks / parts <= core.l2_bytes * _SHARE
            tiles = area // (plan["pixels"] * plan["rows"])
            weights = facts.weight_bytes * (1 if held else tiles)
            data = facts.data_bytes * (core.threads if fits else blocks)
        return shares, float(weights), float(data + facts.result_bytes)

    def apply(self, schedule: Any, facts: Contraction, plan: Plan) -> None:
        """Tile the block that writes the result, compute the contraction inside, unroll the register tile."""
        facts = self.begin(schedule, facts, plan)
        if plan.get("parts", 1) > 1:
            steps.apply_parts(schedule, facts, plan, self._split_tile)
            return
        last = steps.write_apart(schedule, facts)
        parallel, at, tile = self.tile(schedule, schedule.get_loops(last), plan, by_rows=self._pads_rows(facts, plan))
        self.fill(schedule, facts, plan, parallel, at, tile)

    @staticmethod
    def begin(schedule: Any, facts: Contraction, plan: Plan) -> Contraction:
        """Inline the blocks between and handle the pad as planned; return the remaining facts."""
        steps.inline_blocks(schedule, facts.between)
        if facts.pad and plan["pad"] == PAD_NONE:
            schedule.compute_inline(schedule.get_sblock(facts.pad))
            return dataclasses.replace(facts, pad=None)
        if plan["pad"] == PAD_SKEWED:
            line = _LINE_BYTES // facts.element_bytes
            schedule.storage_align(schedule.get_sblock(facts.pad), 0, -2, facts.line, line)
        return facts

    def fill(self, schedule: Any, facts: Contraction, plan: Plan, share: Any, at: Any, tile: list[Any]) -> None:
        """Compute the contraction at a loop of `write_apart`'s block; `tile` are the loops inside it.

        `share` is the parallel loop, where `PAD_ROWS` pads its rows.
        """
        main = schedule.get_sblock(facts.main)
        held, joint = None, plan.get("steps", 1)
        if joint > 1 and len(facts.sums) == 1:
            # Index by the block's own loops where no kernel moves the data: TVM cannot prove constant positions for
            # fused pixels in a buffer of rows and columns, and would keep it in memory.
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
        """Vectorise the lanes, and zero the accumulators before the outermost reduction loop."""
        schedule.vectorize(lane)
        schedule.decompose_reduction(main, outermost)

    @staticmethod
    def _pads_rows(facts: Contraction, plan: Plan) -> bool:
        return facts.pad is not None and plan["pad"] == PAD_ROWS

    @classmethod
    def tile(cls, schedule: Any, loops: Any, plan: Plan, *, by_rows: bool) -> tuple[Any, Any, list[Any]]:
        """Split and order the loops of the block that writes the result.

        Return the parallel loop, the loop around a tile, and the tile's own loops with the vector last.
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
        """Split the loops of pixels and of a block's channels into outer loops and, last, a list of the tile's own."""
        *before, channel = loops
        vector, lane = schedule.split(channel, [None, plan["lanes"]])
        column, pixel = schedule.split(before[-1], [None, plan["pixels"]])
        if len(before) == 1:
            return [column, [pixel, vector, lane]]
        line, row = schedule.split(before[-2], [None, plan["rows"]])
        return [*before[:-2], line, column, [row, pixel, vector, lane]]


def list_vectors(full: int, channels: int, most: int) -> dict[str, tuple[int, ...]]:
    """Return the knobs `lanes` and `vectors` of a tile: lanes of a full vector or a part, and up to `most` vectors."""
    sizes = [size for size in (full, full // 2, full // 4) if size > 1 and channels % size == 0] or [1]
    fitting = (v for v in range(1, most + 1) if any(channels % (v * size) == 0 for size in sizes))
    return {"lanes": tuple(sizes), "vectors": tuple(fitting)}


def list_steps(core: Core, line: int, element_bytes: int, row: int = 1) -> dict[str, tuple[int, ...]]:
    """Return the knob `steps` for lane FMAs: a full vector where `line` fills vectors, else a kernel `row`."""
    full = core.lanes(element_bytes)
    if not core.lane_fma or full == 1:
        return {}
    return {"steps": (full, 1)} if line % full == 0 else {"steps": (row, 1)} if row > line else {}


def _count_in_set(facts: Contraction, pixels: int) -> int:
    """Count how many of `pixels` neighbouring pixels map to one L1 set."""
    apart = facts.stride[-1] * facts.line * facts.element_bytes
    return -(-pixels * math.gcd(apart, _WAY_BYTES) // _WAY_BYTES)


def _joins_row(facts: Contraction, plan: Plan) -> bool:
    """Say whether the joint reduction steps are a kernel row."""
    return facts.row > facts.line and plan.get("steps", 1) == facts.row


def count_registers(tile: int, vectors: int, held: int) -> int:
    """Count a tile's registers: accumulators, weights of one step, and held data."""
    return tile * vectors + vectors + held


def _reads_weights(facts: Contraction, tile: int, core: Core) -> bool:
    """Say whether FMAs read weights as memory operands.

    On x86, tiles of one pixel do. It pays while LLVM unrolls the whole reduction: with 64 steps, eight vectors took 1.9
    times as long as thirteen pixels by one (13x13x64>256 on Zen 3).
    """
    return tile == 1 and not core.lane_fma and facts.depth <= _UNROLLED


def hold_data(schedule: Any, held: Any, loop: Any, joined: int = 1) -> None:
    """Load the data of one reduction step into registers first.

    The block `held` copies them; its last `joined` loops form one vector.
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
    """Estimate the cycles of one reduction step for a tile of `tile` pixels by `vectors` vectors of `bits`.

    It is the maximum of FMAs, loads (weights and `factors`, one per pixel for `steps` steps), issue slots, and FMA
    latency. Widening `halved` weights takes FMA slots: one instruction on Arm (`shll`), two on x86 (`vpmovzxwd`,
    `vpslld`); on Zen 4 tiles of 14 FMAs and 2 weight vectors took 1.26 times as long. With `direct`, FMAs read weights
    from memory.
    """
    multiply = tile * vectors + (vectors * (1 if core.lane_fma else 2) if halved else 0)
    factors = tile / steps if factors is None else factors
    loads = vectors / core.loads_per_cycle(bits) + factors / core.load_pipes
    loads /= 1.0 if core.lane_fma or direct else _LOADED
    issued = (multiply + vectors + factors) / core.issue_width
    cycles = max(multiply / core.fma_per_cycle(bits), loads, issued, core.fma_latency)
    return cycles + (_ISSUED * (issued + _LOOP / steps / core.issue_width) if core.lane_fma else 0.0)
