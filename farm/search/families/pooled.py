"""Convolutions whose result only a pool of maxima reads, strip by strip (`strips`)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tvm import tirx

from farm.search.cores import Core
from farm.search.families import expressions
from farm.search.families import facts as reading
from farm.search.families.dense import CHANNELS_OUTSIDE
from farm.search.families.family import Plan
from farm.search.families.loops import write_apart
from farm.search.families.strips import SlidingWindow, StripFamily, Strips

# Cycles of one of the pool's own tiles beside its loads and maxima.
_TILE_CYCLES = 10.0


@dataclasses.dataclass(frozen=True)
class MaxPool:
    """A pool of maxima: its block, the columns of its result, and rows by columns of its window."""

    block: str
    columns: int
    window: tuple[int, int]


class Pooled(StripFamily):
    """Functions of a convolution and a pool, whose tiles are as wide as the convolution's."""

    name = "pooled"

    def read_window(self, schedule: Any, names: list[str], data: Any) -> SlidingWindow | None:
        block = schedule.get(schedule.get_sblock(names[0]))
        store = block.body
        kinds = [reading.is_sum(v) for v in block.iter_vars]
        if len(names) > 1 or kinds != [False] * 4 + [True] * 2 or not isinstance(store, tirx.BufferStore):
            return None
        variables = [v.var for v in block.iter_vars]
        loads, comparisons = expressions.read_value(store.value)
        loads = [load for load in loads if not load.source.same_as(store.buffer)]
        if (
            not isinstance(store.value, tirx.Max)
            or comparisons
            or [load.source.same_as(data) for load in loads] != [True]
        ):
            return None
        one, row, column, channel, down, _ = variables
        indices = list(loads[0].indices)
        if not all(a.same_as(b) for a, b in zip(store.indices, variables[:4], strict=True)):
            return None
        if not indices[0].same_as(one) or not indices[3].same_as(channel) or expressions.mentions(indices[1], column):
            return None
        stride, extents = expressions.slope(indices[1], row), [int(v.dom.extent) for v in block.iter_vars]
        if stride < 1 or expressions.slope(indices[1], down) != 1:
            return None
        pool = MaxPool(names[0], extents[2], (extents[4], extents[5]))
        return SlidingWindow(extents[1], extents[4], stride, reading.size_of(store.buffer), pool)

    def predict_own(self, facts: Strips, plan: Plan, core: Core) -> float | None:
        pool, contraction = facts.window.step, facts.contraction
        results = facts.window.rows * pool.columns * contraction.channel // plan["lanes"]
        loads = math.prod(pool.window) / core.loads_per_cycle(plan["lanes"] * contraction.element_bytes * 8)
        return float(results * (loads + 2 + _TILE_CYCLES / plan["vectors"]))

    def apply(self, schedule: Any, facts: Strips, plan: Plan) -> None:
        contraction = self._tiles.begin(schedule, facts.contraction, plan)
        last = write_apart(schedule, contraction)
        pool = schedule.get_sblock(facts.window.step.block)
        one, row, column, channel, down, across = schedule.get_loops(pool)
        strip, row = schedule.split(row, [None, plan["strip"]])
        block, vector, lane = schedule.split(channel, [None, plan["vectors"], plan["lanes"]])
        outside = plan["order"] == CHANNELS_OUTSIDE
        order = [one, strip, block, row, column] if outside else [one, strip, row, column, block]
        schedule.reorder(*order, down, across, vector, lane)
        share = schedule.fuse(*order[: 3 if outside else 2])
        for loop in (vector, across):
            schedule.unroll(loop)
        schedule.vectorize(lane)
        self.compute_rows(schedule, contraction, plan, last, share)
        schedule.decompose_reduction(pool, down)
        schedule.unroll(down)
