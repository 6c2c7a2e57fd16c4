"""Winograd convolutions as written by `farm.search.graph.winograd`: a few rows of tiles pass all steps together.

Data are padded on reading and transformed one vector of channels at a time. Products use register tiles like dense
contractions. The blocks after the convolution are fused into the last transform.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tvm

from farm.search.cores import Core
from farm.search.families import facts as reading
from farm.search.families.dense import (
    CHANNELS_OUTSIDE,
    ROWS_OUTSIDE,
    count_registers,
    hold_data,
    list_steps,
    list_vectors,
    step_cycles,
)
from farm.search.families.family import Plan, Prediction
from farm.search.families.loops import divisors, inline_blocks, wait_share
from farm.search.graph import winograd

_MOST_VECTORS = 6
# Fraction of a cache that one kind of data can count on.
_SHARE = 0.75
# The same for transformed data beside a stream of weights: from half of L2 on they come from L3.
_HELD = 0.45
# Cycles that a tile stalls for its first weights where no tile before it read them, per unit of `l2_wait`: 27x27x32>128
# in rows of seven tiles took 1.4 times the prediction at an `l2_wait` of 0.6. Measured on x86 only.
_BEGUN = 180.0
# Fraction of L1 still valid on a second read (two-way caches).
_KEPT, _LINE_BYTES = 0.5, 64
# Step factor where few accumulators limit the out-of-order window to the FMA latency and each weight serves one or two
# of them: 28x28x128 in tiles of one pixel by four vectors was estimated at 0.9 of seven by two, with 1.4 times the
# instructions.
_FEW_SUMS = 1.5
# Cycles of a register tile besides its FMAs; time of a transform relative to its instructions.
_TILE_CYCLES, _TRANSFORM = 12.0, 1.5


@dataclasses.dataclass(frozen=True)
class WinogradFacts:
    """A convolution F(m, 3) of `batch` images of `tall` x `wide` tiles each, from `depth` to `channels` channels.

    `blocks` are the six of the algorithm, from the pad to the convolution's result; `between` are all others before
    `last`, which writes the result. `cut` is a block after it that drops padded channels.
    """

    m: int
    batch: int
    tall: int
    wide: int
    depth: int
    channels: int
    element_bytes: int = 4
    blocks: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    last: str = ""
    cut: str | None = None

    @property
    def alpha(self) -> int:
        """Rows and columns of a transformed tile."""
        return self.m + winograd.KERNEL - 1

    @property
    def weight_bytes(self) -> int:
        """Size of the transformed weights."""
        return self.alpha**2 * self.depth * self.channels * self.element_bytes


def count_direct_flop(module: Any) -> float | None:
    """Return the FLOP of the equivalent direct convolution; None for a function that is not Winograd."""
    schedule = tvm.s_tir.Schedule(module)
    found = read_blocks(schedule)
    if found is None:
        return None
    _, _, _, products, _, result, *_ = (_extents(schedule.get(schedule.get_sblock(name))) for name in found[0])
    return 2.0 * winograd.KERNEL**2 * products[-1] * math.prod(result)


def read_blocks(schedule: Any) -> tuple[list[str], int] | None:
    """Return the names of a function's blocks, and m; None where the fourth block has no mark of Winograd's."""
    names = reading.list_blocks(schedule)
    if len(names) < len(winograd.BLOCKS) or len(set(names)) < len(names):
        return None
    m = schedule.get(schedule.get_sblock(names[3])).annotations.get(winograd.MARK)
    return None if m is None else (names, int(m))


class Winograd:
    """Family of Winograd convolutions."""

    name = "winograd"

    def read(self, schedule: Any) -> WinogradFacts | None:
        """Read a function whose fourth block has Winograd's mark, with element-wise blocks after the sixth."""
        found = read_blocks(schedule)
        if found is None:
            return None
        names, m = found
        blocks = [schedule.get(schedule.get_sblock(name)) for name in names]
        _, _, batch, tall, wide, channels, depth = _extents(blocks[3])
        count = len(winograd.BLOCKS)
        cut = names.pop() if len(names) > count and reading.is_cut(schedule, names[-1]) else None
        if cut and len(_extents(blocks.pop())) != len(_extents(blocks[-1])):
            return None
        if any(_extents(block) != _extents(blocks[count - 1]) for block in blocks[count:]):
            return None
        own, between = tuple(names[:count]), tuple(names[count - 1 : -1])
        size = reading.bytes_of(blocks[3].writes[0].source.dtype)
        return WinogradFacts(m, batch, tall, wide, depth, channels, size, own, between, names[-1], cut)

    def options(self, facts: WinogradFacts, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Offer `lanes`, `vectors`, `pixels` and `rows` of a register tile, rows of tiles per `unit`, and `order`.

        `steps` is as in `dense`. Pixels and rows of the products are tiles of the result.
        """
        return {
            **list_vectors(core.lanes(facts.element_bytes), facts.channels, _MOST_VECTORS),
            "pixels": tuple(p for p in divisors(facts.wide) if p < core.vector_registers),
            "rows": tuple(r for r in divisors(facts.tall) if r < core.vector_registers),
            "unit": tuple(divisors(facts.tall)),
            "order": (ROWS_OUTSIDE, CHANNELS_OUTSIDE),
            **list_steps(core, facts.depth, facts.element_bytes),
        }

    def predict(self, facts: WinogradFacts, plan: Plan, core: Core) -> Prediction | None:
        """Estimate the cycles of the products, of the transforms, and of the traffic beyond L2."""
        lanes, vectors, tile, unit = plan["lanes"], plan["vectors"], plan["pixels"] * plan["rows"], plan["unit"]
        block, bits, joint = lanes * vectors, lanes * facts.element_bytes * 8, plan.get("steps", 1)
        if facts.channels % block or unit % plan["rows"]:
            return None
        if count_registers(tile, vectors, tile if joint > 1 else 1) > core.vector_registers:
            return None
        blocks, units = facts.channels // block, facts.batch * facts.tall // unit
        if units == 1 and plan["order"] == ROWS_OUTSIDE and core.prefetched_bytes:
            # Without an outer loop TVM places accumulators in a shared allocation, and nothing is prefetched:
            # 28x28x128>128 took 655 us instead of 509 us with channels outside.
            return None
        together = unit * facts.wide
        # Products read data and weights from L2; neighbouring tiles share the weights.
        panel = facts.depth * block * facts.element_bytes
        shared = together / tile if panel <= core.l1_bytes * _SHARE else 1
        near = (tile * facts.depth * facts.element_bytes + panel / shared) / core.l2_bytes_per_cycle
        step = step_cycles(core, bits, tile, vectors, joint)
        if core.line_wait and tile * vectors < 2 * core.fma_latency:
            step *= _FEW_SUMS
        inner = max(facts.depth * step, near) + wait_share(core, plan, facts.element_bytes) * near
        inner += 2 * tile * vectors / core.loads_per_cycle(bits)
        inner += core.l2_wait * _BEGUN if shared == 1 and core.prefetched_bytes else 0.0
        products = facts.alpha**2 * blocks * units * (together / tile) * (inner + _TILE_CYCLES)
        transforms = self._transforms(facts, core, lanes)
        held = facts.alpha**2 * together * facts.depth * facts.element_bytes
        far, driven = self._traffic(facts, plan, core, held, panel)
        parts = units if plan["order"] == ROWS_OUTSIDE else units * blocks
        balance = math.ceil(parts / core.threads) * core.threads / parts
        # Streams are prefetched during computation.
        fetched = far / core.far_bytes_per_cycle
        waited = fetched * (core.l2_wait if self._fetches(facts, plan, core, together // tile) else 1.0)
        waited += driven / core.far_bytes_per_cycle
        waits = core.line_wait * _count_lines(facts, plan, core)
        cycles = max((products + transforms + waits) * balance, fetched) + waited
        regions = (1 if plan["order"] == ROWS_OUTSIDE else 2) if core.threads > 1 else 0
        seconds = cycles / core.threads / core.freq_hz + regions * core.region_s
        terms = {"compute": products + waits, "transforms": transforms, "far": fetched + waited, "balance": balance}
        return Prediction(seconds, terms)

    @staticmethod
    def _fetches(facts: WinogradFacts, plan: Plan, core: Core, sharing: int) -> bool:
        """Say whether weights arrive during computation: shared, prefetched for the next block, or by hardware."""
        if not core.prefetched_bytes or sharing > 1:
            return True
        block = facts.weight_bytes * plan["lanes"] * plan["vectors"] // facts.channels
        return plan["order"] == CHANNELS_OUTSIDE and plan["unit"] < facts.tall and block <= core.prefetched_bytes

    @staticmethod
    def _traffic(facts: WinogradFacts, plan: Plan, core: Core, held: int, panel: int) -> tuple[float, float]:
        """Return the bytes beyond L2: streams, and stalled accesses to buffers and evicted data.

        A unit's transformed data are `held` bytes; `panel` is one product's weights for a block of channels.
        """
        block = plan["lanes"] * plan["vectors"]
        units, blocks = facts.batch * facts.tall // plan["unit"], facts.channels // block
        # Products of a block are written and read again; both buffers start cold.
        made = held * block // facts.depth
        stream = (
            facts.batch * facts.tall * facts.wide * facts.m**2 * (facts.depth + facts.channels) * facts.element_bytes
        )
        driven = (held + made) * core.threads
        if held + made > core.held_bytes * _SHARE:
            driven += 2 * made * units * blocks
        if plan["order"] == ROWS_OUTSIDE:
            fits = facts.weight_bytes <= core.held_bytes * _SHARE
            stream += facts.weight_bytes * (min(units, core.threads) if fits else units)
            driven += held * units * blocks if held > core.held_bytes * _HELD else 0
        else:
            fits = panel * facts.alpha**2 <= core.held_bytes * _SHARE
            stream += facts.weight_bytes * (1 if fits else units) + held * units
            driven += held * units * (blocks if held * units > core.held_bytes * _HELD else core.threads - 1)
        return float(stream), float(driven)

    @staticmethod
    def _transforms(facts: WinogradFacts, core: Core, lanes: int) -> float:
        """Estimate the cycles of the four one-dimensional transforms."""
        m, alpha, rows = facts.m, facts.alpha, facts.batch * facts.tall
        tiles = rows * facts.wide
        forth, back = winograd.count_operations(m)

        def cost(lanes: int, loads: int, operations: float, stores: int) -> float:
            bits = lanes * facts.element_bytes * 8
            moved = (loads + 2 * stores) / core.loads_per_cycle(bits)
            issued = (loads + operations + stores) / core.issue_width
            return _TRANSFORM * max(moved, issued, operations / core.fma_per_cycle(bits))

        inside = _lanes_of(facts.depth, core.lanes(facts.element_bytes))
        data = rows * (facts.wide * m + 2) * cost(inside, alpha, forth, alpha)
        data += tiles * alpha * cost(inside, alpha, forth, alpha)
        result = tiles * (alpha * cost(lanes, alpha, back, m) + m * cost(lanes, alpha, back, m))
        return data * facts.depth / inside + result * facts.channels / lanes

    def apply(self, schedule: Any, facts: WinogradFacts, plan: Plan) -> None:
        """Tile the result by rows of tiles, compute the steps inside, unroll each tile's own loops."""
        pad, strips, tiles, products, lines, _ = (schedule.get_sblock(name) for name in facts.blocks)
        inline_blocks(schedule, facts.between)
        lanes, rows_first = plan["lanes"], plan["order"] == ROWS_OUTSIDE
        image, height, width, channel = schedule.get_loops(schedule.get_sblock(facts.last))
        group, line, y = schedule.split(height, [None, plan["unit"], facts.m])
        column, x = schedule.split(width, [None, facts.m])
        block, vector, lane = schedule.split(channel, [None, plan["vectors"], lanes])
        outer = [image, group, block] if rows_first else [block, image, group]
        schedule.reorder(*outer, line, column, vector, y, x, lane)
        parallel = schedule.fuse(*outer[:2]) if rows_first else schedule.fuse(*outer)
        schedule.compute_at(lines, vector, preserve_unit_loops=True)
        schedule.set_scope(lines, 0, "global")
        _unroll(schedule, (y, x, lane))
        _unroll(schedule, schedule.get_loops(lines)[-6:])
        depth = self._tile_products(schedule, products, block if rows_first else parallel, plan)
        if rows_first:
            schedule.compute_at(tiles, parallel, preserve_unit_loops=True)
        self._transform_data(schedule, facts, (pad, strips, tiles), lanes, alone=not rows_first)
        schedule.parallel(parallel)
        schedule.decompose_reduction(products, depth)
        if facts.cut:
            image, row, *_ = schedule.get_loops(schedule.get_sblock(facts.cut))
            schedule.parallel(schedule.fuse(image, row))

    @staticmethod
    def _tile_products(schedule: Any, products: Any, at: Any, plan: Plan) -> Any:
        """Compute a block's products at `at`, one register tile at a time; return the reduction loop."""
        written = schedule.cache_write(products, 0, "global")
        schedule.compute_at(written, at, preserve_unit_loops=True)
        i, j, image, line, column, channel = schedule.get_loops(written)[-6:]
        line, row = schedule.split(line, [None, plan["rows"]])
        column, pixel = schedule.split(column, [None, plan["pixels"]])
        vector, lane = schedule.split(channel, [None, plan["lanes"]])
        schedule.reorder(i, j, image, line, column, row, pixel, vector, lane)
        schedule.compute_at(products, column, preserve_unit_loops=True)
        _unroll(schedule, (row, pixel, vector, lane))
        row, pixel, channel, depth = schedule.get_loops(products)[-4:]
        vector, lane = schedule.split(channel, [None, plan["lanes"]])
        if plan.get("steps", 1) == 1:
            schedule.reorder(depth, row, pixel, vector, lane)
            _unroll(schedule, (row, pixel, vector, lane))
            return depth
        depth, step = schedule.split(depth, [None, plan["steps"]])
        schedule.reorder(depth, step, row, pixel, vector, lane)
        hold_data(schedule, schedule.cache_read(products, 0, "global"), depth)
        _unroll(schedule, (step, row, pixel, vector, lane))
        return depth

    @staticmethod
    def _transform_data(schedule: Any, facts: WinogradFacts, blocks: Any, lanes: int, *, alone: bool) -> None:
        """Transform strips of a tile's height per vector of channels, then their tiles; `alone`: in parallel first."""
        pad, strips, tiles = blocks
        i, j, image, line, column, channel = schedule.get_loops(tiles)[-6:]
        channel, lane = schedule.split(channel, [None, _lanes_of(facts.depth, lanes)])
        schedule.reorder(image, line, channel, column, i, j, lane)
        _unroll(schedule, (j, lane))
        if alone:
            channel = schedule.fuse(image, line, channel)
            schedule.parallel(channel)
        schedule.compute_at(strips, channel, preserve_unit_loops=True)
        i, _, _, column, lane = schedule.get_loops(strips)[-5:]
        schedule.reorder(column, i, lane)
        _unroll(schedule, (i, lane))
        schedule.compute_at(pad, column, preserve_unit_loops=True)
        schedule.set_scope(pad, 0, "global")
        _unroll(schedule, schedule.get_loops(pad)[-4:])


def _count_lines(facts: WinogradFacts, plan: Plan, core: Core) -> float:
    """Estimate the L1 misses in lines: data, buffers between the steps, weights and the result."""
    unit, block, room = plan["unit"], plan["lanes"] * plan["vectors"], core.l1_bytes * _KEPT
    units, blocks = facts.batch * facts.tall // unit, facts.channels // block
    tiles = facts.alpha**2 * unit * facts.wide * facts.element_bytes
    held, made = tiles * facts.depth, tiles * block
    weights = facts.weight_bytes // blocks
    part = max(1.0, _LINE_BYTES / (block * facts.element_bytes))
    total: float = units * facts.wide * unit * facts.m * facts.alpha * facts.depth * facts.element_bytes
    total += units * facts.wide * unit * facts.m**2 * facts.channels * facts.element_bytes * part
    total += units * held * (1 + blocks) if held > room else 0
    total += units * blocks * 2 * made if made > room else 0
    total += units * blocks * weights if weights > room else facts.weight_bytes
    return total / _LINE_BYTES


def _extents(block: Any) -> list[int]:
    return [int(variable.dom.extent) for variable in block.iter_vars]


def _lanes_of(channels: int, most: int) -> int:
    """Return the longest vector of at most `most` lanes that divides the channels."""
    return next(size for size in (most, most // 2, most // 4, 1) if size and channels % size == 0)


def _unroll(schedule: Any, loops: Sequence[Any]) -> None:
    """Unroll all loops but the last and vectorise that."""
    *outer, lane = loops
    for loop in outer:
        schedule.unroll(loop)
    schedule.vectorize(lane)
