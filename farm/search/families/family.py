"""The contract of a schedule family: read a function, offer knobs, predict a plan's time, apply it.

A plan is one option per knob. Families are stateless; the search chooses plans and `rule` the default.
`describe_plan` says a plan in words, for people who read a model's report. Loads no compiler.
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
# What limits a layer: the largest part of its estimate.
LIMITS = ("compute", "shared memory", "L2 bandwidth", "L3 bandwidth", "DRAM bandwidth", "launch overhead")
# By option: words with its value, or words for each value; options that are off are left out.
_WORDS: dict[str, str | dict[int, str]] = {
    "order": {0: "rows outside", 1: "channels outside"},
    "steps": "{} reduction steps at once",
    "parts": "reduction in {} parts",
    "unit": "{} rows of Winograd tiles at a time",
    "lines": "{} rows padded together",
    "pieces": "{} chunks",
    "beside": "{} results beside each other",
    "shares": "{} threads share a result",
    "threads": "{} threads",
    "each": "{} results per thread",
    "held": {1: "values held in registers"},
    "cut": {1: "cut where inputs join"},
    "write": "{} written",
    "read": "{} read at once",
}
# By option: what it decides.
_NAMES = {
    "lanes": "vector width",
    "vectors": "vectors of a tile",
    "pixels": "pixels of a tile",
    "rows": "rows of a tile",
    "order": "loop order",
    "pad": "padding",
    "steps": "reduction steps at once",
    "parts": "parts of the reduction",
    "unit": "rows of Winograd tiles",
    "lines": "rows padded together",
    "wide": "threads along channels",
    "far": "threads along pixels",
    "channels": "channels of a thread",
    "columns": "pixels of a thread",
    "pieces": "chunks",
    "each": "results of a thread",
    "shares": "threads of a result",
    "beside": "results beside each other",
}
_DENSE_PADS = {0: "padded first", 1: "padded by rows", 2: "padded with a skew", 3: "read in place"}
_DEPTHWISE = {
    "pad": {0: "padded first", 1: "padded by rows", 2: "padded by rows, borders apart", 3: "read in place"},
    "unroll": {0: "columns unrolled", 1: "kernel unrolled"},
}


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


def name_option(name: str) -> str:
    """Return what an option decides, in words."""
    return _NAMES.get(name, name)


def describe_plan(family: str, plan: Plan) -> str:
    """Return a family's plan in words, such as `4x2 pixels by 3 vectors of 4, padded by rows`."""
    left, said = dict(plan), list[str]()
    if {"wide", "far", "columns", "channels"} <= left.keys():
        wide, far, columns, channels = (left.pop(name) for name in ("wide", "far", "columns", "channels"))
        said = [f"{wide}x{far} threads, {channels} channels by {columns} pixels each"]
    elif {"pixels", "vectors", "lanes"} <= left.keys():
        rows, pixels, vectors, lanes = (left.pop(name, 1) for name in ("rows", "pixels", "vectors", "lanes"))
        said = [f"{rows}x{pixels} pixels by {vectors} vectors of {lanes}"]
    elif "lanes" in left:
        said = [f"vectors of {left.pop('lanes')}"]
    if "own_pixels" in left:
        said.append(f"then {left.pop('own_pixels')} pixels by {left.pop('own_vectors')} vectors")
    if {"columns", "rows"} <= left.keys() and (window := (left.pop("rows"), left.pop("columns"))) != (1, 1):
        said.append(f"windows of {window[0]}x{window[1]}")
    known = {**_WORDS, **(_DEPTHWISE if family == "depthwise" else {"pad": _DENSE_PADS})}
    for name, value in left.items():
        words = known.get(name, f"{name} {{}}")
        if isinstance(words, dict):
            said.append(words.get(value, ""))
        elif value > 1:
            said.append(words.format(value))
    return ", ".join(filter(None, said)) or "one thread"
