"""Other forms of dense contractions: int8 dot products, batched products, grouped convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families import facts as reading
from farm.search.families.dense import Dense
from farm.search.families.facts import Axis, Contraction
from farm.search.families.family import Plan, Prediction
from farm.search.graph import dots

# On Arm, without a dot-product instruction: stall per line from L2 as a multiple of its transfer time, 12 cycles on a
# Cortex-A57 in the estimates of emulated boards.
_WAITED = 3.0

# On x86, multiplications, additions and sign extensions compete for ports: eight of each take Zen 3 11.5 cycles, not 8.
_CROWDED = 1.4

# Temporary registers: a pixel's data in two, 16-bit products; on x86 data, absolute values and ones.
_PASSING, _PASSING_X86 = 7, 4


class Dots(Dense):
    """Family of int8 dot products."""

    name = "dots"
    inner = 1

    def read(self, schedule: Any) -> Contraction | None:
        """Read a marked contraction; its four products count as one of the accumulator's width."""
        found = super().read(schedule)
        mark = None if found is None else schedule.get(schedule.get_sblock(found.main)).annotations.get(dots.MARK)
        if found is None or mark is None:
            return None
        return dataclasses.replace(found, sums=found.sums[:-1], line=1, row=1, at_once=int(mark))

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Restrict the options of `dense` to lanes for which an instruction exists."""
        found = dict(super().options(facts, core))
        there = dots.list_lanes("aarch64" if core.lane_fma else "x86_64", facts.at_once)
        return found | {"lanes": tuple(lanes for lanes in found["lanes"] if lanes in there)}

    def _compute(self, schedule: Any, main: Any, outermost: Any, lane: Any) -> None:
        """Zero the accumulators first, then tensorize the lanes."""
        zero = schedule.decompose_reduction(main, outermost)
        schedule.vectorize(schedule.get_loops(zero)[-1])
        kinds = {str(region.source.dtype) for region in schedule.get(main).reads}
        data = "uint8" if "uint8" in kinds else "int8"
        at_once = int(schedule.get(main).annotations[dots.MARK])
        schedule.tensorize(lane, dots.register(data, int(schedule.get(lane).extent), at_once))

    def _count_held(self, facts: Contraction, plan: Plan, core: Core) -> int:
        """Count temporary registers where a dot product takes several instructions."""
        if facts.at_once == dots.STEP:
            return super()._count_held(facts, plan, core)
        return plan["vectors"] + _PASSING if core.lane_fma else _PASSING_X86

    def _reloads(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Without a dot-product instruction on Arm, a tile stalls for all of its weights."""
        waited = super()._reloads(facts, plan, core)
        if facts.at_once == dots.STEP or not core.lane_fma:
            return waited
        weights = facts.depth * plan["lanes"] * plan["vectors"] * facts.weight_element_bytes
        return waited + (_WAITED * weights if waited else 0.0)

    def _step_cycles(self, facts: Contraction, plan: Plan, core: Core) -> float:
        """Estimate a step without a dot-product instruction.

        On Arm half of the pipes multiply and half add; either prepares weights and data. On x86 half multiply.
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


class Batched(Dense):
    """Batched products whose operands both have the batch dimensions, as in attention."""

    name = "batched"

    def read(self, schedule: Any) -> Contraction | None:
        """Read the batch loops as rows of pixels, which no tile spans."""
        found = reading.read_contraction(schedule)
        if found is None or found.pad or not found.batch or found.group or len(found.channels) != 1:
            return None
        if not found.pixels or max(axis.at for axis in found.batch) > min(axis.at for axis in found.pixels):
            return None
        ones = (1,) * len(found.batch)
        return dataclasses.replace(
            found,
            batch=(),
            pixels=(*found.batch, *found.pixels),
            stride=(*ones, *found.stride),
            reach=(*ones, *found.reach),
        )

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Extend the options of `dense`; tiles have one row."""
        return {**super().options(facts, core), "rows": (1,)}


class Grouped(Dense):
    """Convolutions in groups of several channels."""

    name = "grouped"

    def read(self, schedule: Any) -> Contraction | None:
        """Read the channels of all groups as one loop."""
        found = reading.read_contraction(schedule)
        if found is None or found.group < 2 or found.channels or len(found.batch) != 1 or not found.pixels:
            return None
        return dataclasses.replace(found, channels=found.batch, batch=())

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """Offer the options of `dense` for the channels of one group."""
        one = dataclasses.replace(facts, channels=(Axis(facts.channels[0].at, facts.group),))
        return super().options(one, core)

    def predict(self, facts: Contraction, plan: Plan, core: Core) -> Prediction | None:
        """Reject a tile that spans two groups."""
        if facts.group % (plan["lanes"] * plan["vectors"]):
            return None
        return super().predict(facts, plan, core)
