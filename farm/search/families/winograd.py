"""Winograd convolutions as `farm.search.graph.winograd` writes them: a few rows of tiles go through all steps together.

Data are padded as they are read and transformed one vector of channels at a time, products have a register tile as
dense contractions do, and what follows the convolution is applied as the last transform writes its result.
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
    step_cycles,
)
from farm.search.families.family import Plan, Prediction
from farm.search.families.loops import divisors, wait_share
from farm.search.graph import winograd

_MOST_VECTORS = 6
# Share of a cache that one kind of data can count on beside the others.
_SHARE = 0.75
# The same for transformed data beside a stream of weights: from half of the cache on they come from the third.
_HELD = 0.45
# Cycles that a tile waits for the first of its weights where no tile before it read them, as a share that streams are
# waited for: 27x27x32>128 in rows of seven tiles took 1.4 times what was predicted on a core that waits for 0.6. Of x86
# alone: no board has told.
_BEGUN = 180.0
# Of the first cache, what is still there when it is read again (those of two ways).
_KEPT, _LINE_BYTES = 0.5, 64
# Where so few sums are under way that a core can look no further ahead than a sum's latency, and each weight is loaded
# for one or two of them: 28x28x128 in tiles of one pixel by four vectors was priced at 0.9 of seven by two, with 1.4
# times the instructions, all loads coming in time.
_FEW_SUMS = 1.5
# Cycles of a register tile besides its multiply-adds, and how much longer than its instructions a transform takes.
_TILE_CYCLES, _TRANSFORM = 12.0, 1.5


@dataclasses.dataclass(frozen=True)
class WinogradFacts:
    """A convolution F(m, 3) of `batch` images of `tall` x `wide` tiles each, `depth` channels to `channels`.

    `blocks` are the function's own six, from the pad to the convolution's result; `between` all others but `last`,
    which writes the result. `cut` is a block after it that copies a part: channels that only filled vectors up go.
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
        """Of the transformed weights."""
        return self.alpha**2 * self.depth * self.channels * self.element_bytes


def count_direct_flop(module: Any) -> float | None:
    """FLOP of the convolution that a Winograd function computes, as a direct one would take; None for any other."""
    schedule = tvm.s_tir.Schedule(module)
    facts = Winograd().read(schedule)
    if facts is None:
        return None
    results = math.prod(_extents(schedule.get(schedule.get_sblock(facts.blocks[-1]))))
    return 2.0 * winograd.KERNEL**2 * facts.depth * results


class Winograd:
    """See the module."""

    name = "winograd"

    def read(self, schedule: Any) -> WinogradFacts | None:
        """A function whose fourth block is marked as Winograd's products, with element-wise blocks after them."""
        names = reading.list_blocks(schedule)
        if len(names) < len(winograd.BLOCKS) or len(set(names)) < len(names):
            return None
        blocks = [schedule.get(schedule.get_sblock(name)) for name in names]
        m = blocks[3].annotations.get(winograd.MARK)
        if m is None:
            return None
        _, _, batch, tall, wide, channels, depth = _extents(blocks[3])
        count = len(winograd.BLOCKS)
        cut = names.pop() if len(names) > count and reading.is_cut(schedule, names[-1]) else None
        if cut and len(_extents(blocks.pop())) != len(_extents(blocks[-1])):
            return None
        if any(_extents(block) != _extents(blocks[count - 1]) for block in blocks[count:]):
            return None
        own, between = tuple(names[:count]), tuple(names[count - 1 : -1])
        size = reading.bytes_of(blocks[3].writes[0].source.dtype)
        return WinogradFacts(int(m), batch, tall, wide, depth, channels, size, own, between, names[-1], cut)

    def options(self, facts: WinogradFacts, core: Core) -> Mapping[str, tuple[int, ...]]:
        """`lanes`, `vectors`, `pixels`, `rows` of a register tile of products; `unit`: rows of tiles together; `order`.

        `steps` as in `dense`. Pixels and rows of the products are tiles of the result.
        """
        full = core.lanes(facts.element_bytes)
        sizes = [size for size in (full, full // 2, full // 4) if size > 1 and facts.channels % size == 0] or [1]
        return {
            "lanes": tuple(sizes),
            "vectors": tuple(
                v for v in range(1, _MOST_VECTORS + 1) if any(facts.channels % (v * size) == 0 for size in sizes)
            ),
            "pixels": tuple(p for p in divisors(facts.wide) if p < core.vector_registers),
            "rows": tuple(r for r in divisors(facts.tall) if r < core.vector_registers),
            "unit": tuple(divisors(facts.tall)),
            "order": (ROWS_OUTSIDE, CHANNELS_OUTSIDE),
            **list_steps(core, facts.depth, facts.element_bytes),
        }

    def predict(self, facts: WinogradFacts, plan: Plan, core: Core) -> Prediction | None:
        """Cycles of the products' inner loops, of the transforms, and what comes from beyond the second cache."""
        lanes, vectors, tile, unit = plan["lanes"], plan["vectors"], plan["pixels"] * plan["rows"], plan["unit"]
        block, bits, joint = lanes * vectors, lanes * facts.element_bytes * 8, plan.get("steps", 1)
        if facts.channels % block or unit % plan["rows"]:
            return None
        if count_registers(tile, vectors, tile if joint > 1 else 1) > core.vector_registers:
            return None
        blocks, units = facts.channels // block, facts.batch * facts.tall // unit
        if units == 1 and plan["order"] == ROWS_OUTSIDE and core.prefetched_bytes:
            # TVM puts sums beside what else is made where the loop around all is gone, and nothing is fetched then:
            # 28x28x128>128 took 655 us in place of 509 with channels outside.
            return None
        together = unit * facts.wide
        # The products: their data and weights come from the second cache, weights once for neighbouring tiles.
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
        # Streams are fetched ahead while there is something to compute.
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
        """Whether weights come while tiles compute: one product's that tiles share, or those of a block's products.

        By themselves where no code asks for them (`farm.search.build.prefetch`).
        """
        if not core.prefetched_bytes or sharing > 1:
            return True
        block = facts.weight_bytes * plan["lanes"] * plan["vectors"] // facts.channels
        return plan["order"] == CHANNELS_OUTSIDE and plan["unit"] < facts.tall and block <= core.prefetched_bytes

    @staticmethod
    def _traffic(facts: WinogradFacts, plan: Plan, core: Core, held: int, panel: int) -> tuple[float, float]:
        """Bytes beyond the second cache: streams; and what is waited for: buffers, and data that weights drove out.

        A unit's transformed data are `held` bytes, weights of a block of channels for one product `panel`.
        """
        block = plan["lanes"] * plan["vectors"]
        units, blocks = facts.batch * facts.tall // plan["unit"], facts.channels // block
        # Products of a block of channels, written and read again; both buffers are cold when the function begins.
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
        """Cycles of the four one-dimensional transforms."""
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
        """Tile what is written by rows of tiles, compute the steps inside, unroll each tile's own loops."""
        pad, strips, tiles, products, lines, _ = (schedule.get_sblock(name) for name in facts.blocks)
        for name in facts.between:
            schedule.compute_inline(schedule.get_sblock(name))
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
        """Compute all products of a block of channels there, a register tile at a time; returns the loop of sums."""
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
        """Strips of a tile's height for each vector of channels, then their tiles; `alone`: in parallel, all first."""
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
    """Lines that the first cache lacks: of data, of what is kept between the steps, of weights, and of the result."""
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
    """The longest vector, of at most so many lanes, that divides the channels."""
    return next(size for size in (most, most // 2, most // 4, 1) if size and channels % size == 0)


def _unroll(schedule: Any, loops: Sequence[Any]) -> None:
    """Unroll loops, and make a vector of the last."""
    *outer, lane = loops
    for loop in outer:
        schedule.unroll(loop)
    schedule.vectorize(lane)
