"""The families of schedules, and the plans that a function has, the best predicted first."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import tvm

from farm.search.families.batched import Batched, Grouped
from farm.search.families.dense import Dense, Dots
from farm.search.families.depthwise import Depthwise
from farm.search.families.elementwise import Elementwise
from farm.search.families.family import Family, Plan, Prediction, Unit
from farm.search.families.gpu_flat import GpuFlat, GpuNorms, GpuSums
from farm.search.families.gpu_tiles import GpuTiles
from farm.search.families.norm import Norms
from farm.search.families.reduce import Reduce
from farm.search.families.strips import Pooled, Separable
from farm.search.families.winograd import Winograd
from farm.search.gpus import TargetGpu

# What a schedule of a family is marked with, on its root block, so that its trace tells the plan.
MARK = "farm.plan"
# Past so many combinations of options a function's plans are not listed.
_MOST_PLANS = 100_000

# A function belongs to the first family that reads it.
FAMILIES: tuple[Family, ...] = (
    Dots(),
    Dense(),
    Pooled(),
    Separable(),
    Winograd(),
    Depthwise(),
    Grouped(),
    Batched(),
    Reduce(),
    Norms(),
    Elementwise(),
)

GPU_FAMILIES: tuple[Family, ...] = (GpuTiles(), GpuNorms(), GpuSums(), GpuFlat())


def list_families(unit: Unit) -> tuple[Family, ...]:
    """Those for cores, or for a GPU."""
    return GPU_FAMILIES if isinstance(unit, TargetGpu) else FAMILIES


@dataclasses.dataclass(frozen=True)
class Outlook:
    """A function as one family sees it."""

    family: Family
    facts: Any
    core: Unit
    options: Mapping[str, tuple[int, ...]]

    def plans(self) -> list[tuple[Prediction, Plan]]:
        """All plans that make sense, the best predicted first; equal ones in the order of the options."""
        return sorted(self._list_plans(), key=lambda pair: pair[0].seconds)

    def has_plans(self) -> bool:
        """Whether any plan makes sense."""
        return any(True for _ in self._list_plans())

    def _list_plans(self) -> Iterator[tuple[Prediction, Plan]]:
        for combination in itertools.islice(itertools.product(*self.options.values()), _MOST_PLANS):
            plan = dict(zip(self.options, combination, strict=True))
            prediction = self.predict(plan)
            if prediction is not None:
                yield prediction, plan

    def predict(self, plan: Plan) -> Prediction | None:
        """What a plan costs; None for one that makes no sense."""
        return self.family.predict(self.facts, plan, self.core)

    def apply(self, schedule: Any, plan: Plan) -> None:
        """Schedule the function and leave the plan's mark. Raises what TVM raises where it refuses."""
        self.family.apply(schedule, self.facts, plan)
        words = [self.family.name, *(f"{knob}={option}" for knob, option in plan.items())]
        schedule.annotate(schedule.get_sblock("root"), MARK, " ".join(words))


def list_outlooks(module: Any, core: Unit) -> list[Outlook]:
    """The only function of a module as each family sees it that knows it, in the order of the families."""
    schedule = tvm.s_tir.Schedule(module, error_render_level="none")
    read = ((family, family.read(schedule)) for family in list_families(core))
    return [Outlook(family, facts, core, family.options(facts, core)) for family, facts in read if facts is not None]


def read_outlook(module: Any, core: Unit) -> Outlook | None:
    """The first family's that knows the only function of a module and has plans for it, None where none has."""
    return next((outlook for outlook in list_outlooks(module, core) if outlook.has_plans()), None)


def is_marked(trace_json: str) -> bool:
    """Whether a recorded trace is a plan of a family; that is told without parsing it."""
    return f'"{MARK}"' in trace_json


def read_mark(instructions: Any) -> tuple[str, Plan] | None:
    """Family and plan from a trace's instructions in JSON; None where no family made it."""
    for kind, inputs, attributes, _ in instructions:
        if kind == "Annotate" and list(attributes) == [MARK]:
            name, *words = str(inputs[1]).strip('"').split()
            pairs = (word.partition("=") for word in words)
            return name, {knob: int(option) for knob, _, option in pairs}
    return None
