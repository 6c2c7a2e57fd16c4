"""What a schedule family is: it reads a function, offers knobs, predicts what a choice costs, and brings it about.

A plan is one option for each knob. Families are stateless; which plan is tried is the search's business, and which is
the default that of `rule`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from farm.search.cores import Core
from farm.search.gpus import TargetGpu

# What computes.
Unit = Core | TargetGpu
Plan = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a plan is expected to cost: seconds in all, and the cycles of one core that go where, by name.

    Terms are for the cost model and for people; `seconds` alone orders plans.
    """

    seconds: float
    terms: Mapping[str, float]


class Family(Protocol):
    """One kind of function and the ways to schedule it.

    `read` gives what the other methods work with, or None where the function is none of this family's. All options of
    a knob are integers, so that a plan can be written down anywhere.
    """

    name: str

    def read(self, schedule: Any) -> Any | None:
        """Facts of the only function of an unscheduled `tvm.s_tir.Schedule`; changes nothing."""

    def options(self, facts: Any, core: Any) -> Mapping[str, tuple[int, ...]]:
        """The knobs of such a function by name, each with its options, for a target's `Unit`: a core, or a GPU."""

    def predict(self, facts: Any, plan: Plan, core: Any) -> Prediction | None:
        """What a plan costs on `core.threads` cores, or a GPU; None for one that makes no sense."""

    def apply(self, schedule: Any, facts: Any, plan: Plan) -> None:
        """Schedule the function with primitives whose traces survive as JSON: no layout maps.

        Raises what TVM raises where it refuses.
        """
