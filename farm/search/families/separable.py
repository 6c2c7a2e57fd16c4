"""Convolutions whose result only a depthwise convolution reads, strip by strip (`strips`): blocks of MobileNets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families.dense import CHANNELS_OUTSIDE
from farm.search.families.depthwise import PAD_NONE, UNROLL_COLUMNS, VECTORS, Depthwise
from farm.search.families.facts import read_contraction
from farm.search.families.family import Plan
from farm.search.families.loops import divisors, write_apart
from farm.search.families.strips import SlidingWindow, StripFamily, Strips

# Most pixels of a row that are a tile of the depthwise convolution.
_MOST_PIXELS = 14


class Separable(StripFamily):
    """Functions of a convolution and a depthwise one, whose tiles are of one row."""

    name = "separable"

    def __init__(self) -> None:
        super().__init__()
        self._depthwise = Depthwise()

    def find_first(self, schedule: Any, names: list[str], main: int) -> int:
        """The block before the one that sums up where that pads: it compares where it reads."""
        value = getattr(schedule.get(schedule.get_sblock(names[main - 1])).body, "value", None)
        pads = str(getattr(getattr(value, "op", None), "name", "")).endswith(".if_then_else")
        return main - 1 if pads else main

    def read_window(self, schedule: Any, names: list[str], data: Any) -> SlidingWindow | None:
        found = read_contraction(schedule, names)
        if found is None or found.group != 1 or found.channels or len(found.batch) != 1 or len(found.pixels) != 3:
            return None
        block = schedule.get(schedule.get_sblock(found.pad or found.main))
        if not any(region.source.same_as(data) for region in block.reads):
            return None
        return SlidingWindow(found.pixels[1].extent, found.reach[1], found.stride[1], found.result_bytes, found)

    def list_own(self, facts: Strips, core: Core) -> Mapping[str, tuple[int, ...]]:
        """`own_vectors` and `own_pixels` of a tile of the depthwise convolution."""
        columns = facts.window.step.pixels[-1].extent
        return {
            "own_vectors": VECTORS,
            "own_pixels": tuple(divisors(columns, _MOST_PIXELS)),
        }

    @staticmethod
    def _own_plan(plan: Plan) -> dict[str, int]:
        own = {"vectors": plan["own_vectors"], "pixels": plan["own_pixels"], "lanes": plan["lanes"]}
        return {**own, "rows": 1, "pad": PAD_NONE, "unroll": UNROLL_COLUMNS}

    def predict_own(self, facts: Strips, plan: Plan, core: Core) -> float | None:
        if plan["vectors"] % plan["own_vectors"]:
            return None
        prediction = self._depthwise.predict(facts.window.step, self._own_plan(plan), core)
        return None if prediction is None else prediction.terms["compute"]

    def apply(self, schedule: Any, facts: Strips, plan: Plan) -> None:
        contraction = self._tiles.begin(schedule, facts.contraction, plan)
        step, own = facts.window.step, self._own_plan(plan)
        last = write_apart(schedule, contraction)
        result = self._depthwise.begin(schedule, step, own)
        (one, line, block), column, tile = self._depthwise.tile(schedule, step, schedule.get_loops(result), own)
        strip, line = schedule.split(line, [None, plan["strip"]])
        block, part = schedule.split(block, [None, plan["vectors"] // plan["own_vectors"]])
        outside = plan["order"] == CHANNELS_OUTSIDE
        order = [one, strip, block, line, part, column] if outside else [one, strip, line, block, part, column]
        schedule.reorder(*order, *tile)
        share = schedule.fuse(*order[: 3 if outside else 2])
        first = self._depthwise.fill(schedule, step, own, column, tile)
        self.compute_rows(schedule, contraction, plan, last, share)
        schedule.decompose_reduction(schedule.get_sblock(step.main), first)
