"""Products of bytes as `farm.search.graph.dots` writes them: register tiles as in `dense`, four products a lane."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families.dense import Dense
from farm.search.families.facts import Contraction
from farm.search.graph import dots


class Dots(Dense):
    """See the module."""

    name = "dots"
    inner = 1

    def read(self, schedule: Any) -> Contraction | None:
        """A contraction that is marked; its four products count as one of a number as wide as the sum."""
        found = super().read(schedule)
        if found is None or dots.MARK not in schedule.get(schedule.get_sblock(found.main)).annotations:
            return None
        return dataclasses.replace(found, sums=found.sums[:-1], line=1, row=1)

    def options(self, facts: Contraction, core: Core) -> Mapping[str, tuple[int, ...]]:
        """As `dense`, with the lanes that the instruction is there for."""
        found = dict(super().options(facts, core))
        # A register of one lane is no vector.
        return found | {"lanes": tuple(lanes for lanes in found["lanes"] if lanes >= dots.STEP)}

    def _compute(self, schedule: Any, main: Any, outermost: Any, lane: Any) -> None:
        """Set the sums to zero first; an instruction takes the place of the lanes."""
        zero = schedule.decompose_reduction(main, outermost)
        schedule.vectorize(schedule.get_loops(zero)[-1])
        kinds = {str(region.source.dtype) for region in schedule.get(main).reads}
        data = "uint8" if "uint8" in kinds else "int8"
        schedule.tensorize(lane, dots.register(data, int(schedule.get(lane).extent)))
