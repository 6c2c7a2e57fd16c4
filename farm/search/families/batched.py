"""Several dense contractions in one function: batched matrix products and grouped convolutions.

The register tile is `dense`'s; it never spans two products of a batch or two groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.search.cores import Core
from farm.search.families import dense
from farm.search.families import facts as reading
from farm.search.families.facts import Axis, Contraction
from farm.search.families.family import Plan, Prediction


class Batched(dense.Dense):
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


class Grouped(dense.Dense):
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
