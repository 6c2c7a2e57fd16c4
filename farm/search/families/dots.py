"""Products of bytes as `farm.search.graph.dots` writes them: register tiles as in `dense`, four products a lane."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families.dense import Dense
from farm.search.families.facts import Contraction
from farm.search.families.family import Plan
from farm.search.graph import dots

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
