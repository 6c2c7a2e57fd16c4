"""The contract of a schedule family: read a function, offer knobs, predict a plan's time, apply it.

A plan is one option per knob. Families are stateless; the search chooses plans and `rule` the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from farm.search.cores import Core
from farm.search.gpus import TargetGpu

# The CPU cores or GPU that a function runs on.
Unit = Core | TargetGpu
Plan = Mapping[str, int]
# Annotation of the root block, so that the trace names the plan.
MARK = "farm.plan"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted cost of a plan: seconds, and the cycles of one core by cause.

    `seconds` alone orders plans; `terms` serve the cost model and explanations. Of the cycles `compute`, `near` stall
    for L2; `kernels` is the number of launches where it is not one.
    """

    seconds: float
    terms: Mapping[str, float]


class Family(Protocol):
    """One kind of function and its schedules.

    `read` returns the facts for the other methods, or None for a function of another family. All options are integers,
    so that plans are easy to store.
    """

    name: str

    def read(self, schedule: Any) -> Any | None:
        """Read the only function of an unscheduled `tvm.s_tir.Schedule`; change nothing."""

    def options(self, facts: Any, core: Any) -> Mapping[str, tuple[int, ...]]:
        """Return the knobs of a function by name, each with its options, for a target's `Unit`."""

    def predict(self, facts: Any, plan: Plan, core: Any) -> Prediction | None:
        """Predict a plan's cost on `core.threads` cores or a GPU; None for an invalid plan."""

    def apply(self, schedule: Any, facts: Any, plan: Plan) -> None:
        """Schedule the function with primitives whose traces survive JSON: no layout maps.

        Raises TVM's errors where it refuses.
        """


def read_mark(instructions: Any) -> tuple[str, Plan] | None:
    """Read family and plan from a trace's instructions in JSON; None where no family made it."""
    for kind, inputs, attributes, _ in instructions:
        if kind == "Annotate" and list(attributes) == [MARK]:
            name, *words = str(inputs[1]).strip('"').split()
            pairs = (word.partition("=") for word in words)
            return name, {knob: int(option) for knob, _, option in pairs}
    return None
