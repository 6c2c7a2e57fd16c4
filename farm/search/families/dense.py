"""Dense contractions with a register tile: convolutions of any kernel, matrix products, batched ones.

A tile of `rows` x `pixels` results by `vectors` x `lanes` channels is kept in registers while the whole reduction runs
around it; what follows the contraction is applied as the tile is written out. Depthwise convolutions, whose channels
are not summed over, are not here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families import facts as reading
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan, Prediction

# Options of `order`: which loops are outside. Rows outside keep the weights in use for all pixels of a few rows,
# channels outside keep a block of weights in the cache for all pixels.
ROWS_OUTSIDE, CHANNELS_OUTSIDE = 0, 1
# Options of `pad`: a copy of all data first, or of the rows that are needed next.
PAD_COPY, PAD_ROWS = 0, 1


class Dense:
    name = "dense"

    def read(self, schedule: Any) -> Contraction | None:
        found = reading.read_contraction(schedule)
        if found is None or not found.pixels or len(found.channels) != 1 or found.batch:
            return None
        return found

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        lanes = core.lanes(facts.element_bytes)
        sizes = [size for size in (lanes, lanes // 2, lanes // 4) if size > 1 and facts.channel % size == 0] or [1]
        width = facts.pixels[-1].extent
        height = facts.pixels[-2].extent if len(facts.pixels) > 1 else 1
        return {
            "lanes": tuple(sizes),
            "vectors": tuple(v for v in range(1, 7) if any(facts.channel % (v * s) == 0 for s in sizes)),
            "pixels": tuple(p for p in _divisors(width) if p <= core.vector_registers),
            "rows": tuple(r for r in _divisors(height) if r <= 4),
            "order": (ROWS_OUTSIDE, CHANNELS_OUTSIDE),
            "pad": (PAD_COPY, PAD_ROWS) if facts.pad else (PAD_COPY,),
        }

    def predict(self, facts: Contraction, plan: Plan, core: Core) -> Prediction | None:
        lanes, vectors, pixels, rows = plan["lanes"], plan["vectors"], plan["pixels"], plan["rows"]
        block = lanes * vectors
        if facts.channel % block:
            return None
        tile = pixels * rows
        if tile * vectors + vectors + 1 > core.vector_registers:
            return None
        if plan["pad"] == PAD_ROWS and plan["order"] == CHANNELS_OUTSIDE:
            return None
        blocks = facts.channel // block
        area = math.prod(a.extent for a in facts.pixels)
        tiles = area // tile * blocks
        # One step of the reduction for one tile, in cycles.
        share = lanes / core.lanes(facts.element_bytes)
        fma = tile * vectors
        factors = tile / (lanes if core.lane_fma else 1)
        loads = vectors + factors
        steps = max(fma / core.fma_per_cycle, loads / core.loads_per_cycle, core.fma_latency, (fma + loads) / core.issue_width)
        inner = facts.depth * steps
        panel = facts.depth * block * facts.element_bytes
        if panel > core.l1_bytes * 0.75:  # weights come from the second level for every tile
            inner = max(inner, panel / core.l2_bytes_per_cycle) + 0.15 * panel / core.l2_bytes_per_cycle
        out = tile * vectors * 2 / core.loads_per_cycle
        entry = 12 + 2 * vectors * tile / core.issue_width
        compute = tiles * (inner + out + entry)
        # What comes from further away than the second level, in bytes.
        width = facts.pixels[-1].extent
        units = area // width // rows
        if plan["order"] == ROWS_OUTSIDE:
            again = units if facts.weight_bytes > core.l2_bytes * 0.75 else core.threads
            far = facts.weight_bytes * again + facts.data_bytes
            parallel = units if units > 1 or area != width else tiles // blocks
        else:
            far = facts.weight_bytes + facts.data_bytes * (blocks if facts.data_bytes > core.l2_bytes * 0.5 else core.threads)
            parallel = blocks * units
        if len(facts.pixels) == 1:
            parallel = tiles
        far += facts.result_bytes
        balance = math.ceil(parallel / core.threads) * core.threads / parallel
        cycles = compute * balance / core.threads + far / core.l3_bytes_per_cycle / core.threads
        pad = 0.0
        if facts.pad:
            reach = facts.reach[-2] if len(facts.reach) > 1 else 1
            again = (reach + (rows - 1) * facts.stride[-2]) / (rows * facts.stride[-2]) if plan["pad"] == PAD_ROWS else 1.0
            pad = facts.data_bytes * 2 * again / core.l2_bytes_per_cycle / core.threads
        seconds = (cycles + pad) / core.freq_hz
        regions = 1 + (1 if facts.pad and plan["pad"] == PAD_COPY else 0)
        seconds += regions * core.region_s * (core.threads > 1)
        return Prediction(seconds, {"compute": compute, "pad": pad, "far": far, "balance": balance, "steps": steps / fma})

    def apply(self, schedule: Any, facts: Contraction, plan: Plan) -> None:
        lanes, vectors, pixels, rows = plan["lanes"], plan["vectors"], plan["pixels"], plan["rows"]
        main = schedule.get_sblock(facts.main)
        for name in facts.between:
            schedule.compute_inline(schedule.get_sblock(name))
        if facts.last == facts.main:
            last = schedule.get_consumers(schedule.cache_write(main, 0, "local"))[0] if False else None
            cached = schedule.cache_write(main, 0, "local")
            last = cached
        else:
            last = schedule.get_sblock(facts.last)
        *before, channel = schedule.get_loops(last)
        block, inner = schedule.split(channel, [None, lanes * vectors])
        vector, lane = schedule.split(inner, [None, lanes])
        column, pixel = schedule.split(before[-1], [None, pixels])
        if len(before) > 1:
            line, row = schedule.split(before[-2], [None, rows])
            outer, tile = [*before[:-2], line], [row, pixel]
        else:
            outer, tile = [], [pixel]
        if plan["order"] == ROWS_OUTSIDE:
            loops = [*outer, block, column] if outer else [column, block]
            fused = len(outer) if outer else 2
        else:
            loops = [block, *outer, column]
            fused = len(loops)
        schedule.reorder(*loops, *tile, vector, lane)
        if plan["pad"] == PAD_ROWS and facts.pad:
            parallel = schedule.fuse(*loops[:fused])
        else:
            parallel = schedule.fuse(*loops)
            loops, fused = [parallel], 1
        at = parallel if len(loops) == fused else loops[-1]
        schedule.compute_at(main, at, preserve_unit_loops=True)
        if plan["pad"] == PAD_ROWS and facts.pad:
            schedule.compute_at(schedule.get_sblock(facts.pad), parallel, preserve_unit_loops=True)
            _vectorise(schedule, schedule.get_loops(schedule.get_sblock(facts.pad))[-1], lanes)
        if facts.last != facts.main:
            schedule.set_scope(main, 0, "local")
        own = schedule.get_loops(main)
        own = own[-_rank(facts):]
        sums = [own[a.at] for a in facts.sums]
        spatial = [own[a.at] for a in facts.pixels]
        channel = own[facts.channels[0].at]
        v, l = schedule.split(channel, [None, lanes])
        schedule.reorder(*sums, *spatial, v, l)
        schedule.vectorize(l)
        for loop in (*spatial, v):
            schedule.unroll(loop)
        schedule.vectorize(lane)
        for loop in (*tile, vector):
            schedule.unroll(loop)
        schedule.parallel(parallel)
        schedule.decompose_reduction(main, sums[0])
        if facts.pad and plan["pad"] == PAD_COPY:
            pad_loops = schedule.get_loops(schedule.get_sblock(facts.pad))
            schedule.parallel(schedule.fuse(*pad_loops[:-2]))
            _vectorise(schedule, schedule.get_loops(schedule.get_sblock(facts.pad))[-1], lanes)


def _rank(facts: Contraction) -> int:
    return len(facts.batch) + len(facts.pixels) + len(facts.channels) + len(facts.sums)


def _vectorise(schedule: Any, loop: Any, lanes: int) -> None:
    extent = int(schedule.get(loop).extent)
    if extent % lanes == 0 and extent > lanes:
        _, loop = schedule.split(loop, [None, lanes])
        schedule.vectorize(loop)
    elif extent <= 64:
        schedule.vectorize(loop)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
