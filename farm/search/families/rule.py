"""The registered schedule families, and the plans of a function in order of predicted time.

A function that a family cannot read, predict or schedule is left to the next family, and last to TVM's default.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import tvm

from farm.search.families.dense import Dense
from farm.search.families.dense_forms import Batched, Dots, Grouped
from farm.search.families.depthwise import Depthwise
from farm.search.families.elementwise import Elementwise
from farm.search.families.family import MARK, Family, Plan, Prediction, Unit
from farm.search.families.gpu import GpuFlat, GpuNorms, GpuSums
from farm.search.families.gpu_tiles import GpuTiles, GpuWinograd
from farm.search.families.norm import Norms
from farm.search.families.reduce import Reduce
from farm.search.families.winograd import Winograd
from farm.search.gpus import TargetGpu

_log = logging.getLogger(__name__)

# Limit on listed combinations of options.
_MOST_PLANS = 100_000

# A function belongs to the first family that reads it.
FAMILIES: tuple[Family, ...] = (
    Dots(), Dense(), Winograd(), Depthwise(), Grouped(), Batched(), Reduce(), Norms(),
    Elementwise(),
)  # fmt: skip

GPU_FAMILIES: tuple[Family, ...] = (GpuWinograd(), GpuTiles(), GpuNorms(), GpuSums(), GpuFlat())


@dataclasses.dataclass(frozen=True)
class Outlook:
    """A function as read by one family."""

    family: Family
    facts: Any
    core: Unit
    options: Mapping[str, tuple[int, ...]]

    def plans(self) -> list[tuple[Prediction, Plan]]:
        """List all valid plans, the best predicted first; ties keep the order of the options."""
        return sorted(self._list_plans(), key=lambda pair: pair[0].seconds)

    def has_plans(self) -> bool:
        """Say whether any plan is valid."""
        return any(True for _ in self._list_plans())

    def _list_plans(self) -> Iterator[tuple[Prediction, Plan]]:
        for combination in itertools.islice(itertools.product(*self.options.values()), _MOST_PLANS):
            plan = dict(zip(self.options, combination, strict=True))
            prediction = self.predict(plan)
            if prediction is not None:
                yield prediction, plan

    def predict(self, plan: Plan) -> Prediction | None:
        """Predict a plan's cost; None for an invalid plan."""
        try:
            return self.family.predict(self.facts, plan, self.core)
        except Exception as error:  # noqa: BLE001 - see `_read`
            _log.debug("%s cannot predict %s: %r", self.family.name, dict(plan), error)
            return None

    def apply(self, schedule: Any, plan: Plan) -> None:
        """Schedule the function and annotate the plan. Raises RuntimeError where TVM or the family cannot."""
        try:
            self.family.apply(schedule, self.facts, plan)
        except Exception as error:
            raise RuntimeError(str(error)) from error
        words = [self.family.name, *(f"{knob}={option}" for knob, option in plan.items())]
        schedule.annotate(schedule.get_sblock("root"), MARK, " ".join(words))


def list_outlooks(module: Any, core: Unit) -> list[Outlook]:
    """Read the only function of a module by each family that matches, in the order of the families."""
    schedule = tvm.s_tir.Schedule(module, error_render_level="none")
    read = (_read(family, schedule, core) for family in (GPU_FAMILIES if isinstance(core, TargetGpu) else FAMILIES))
    return [outlook for outlook in read if outlook is not None]


def _read(family: Family, schedule: Any, core: Unit) -> Outlook | None:
    """Read a function by one family; None where it does not match, or is of a form that the family cannot read."""
    try:
        facts = family.read(schedule)
        return None if facts is None else Outlook(family, facts, core, family.options(facts, core))
    except Exception as error:  # noqa: BLE001 - functions have any form, and TVM's default schedules each of them
        _log.debug("%s cannot read a function: %r", family.name, error)
        return None


def read_outlook(module: Any, core: Unit) -> Outlook | None:
    """Return the first family's outlook that has plans, or None."""
    return next((outlook for outlook in list_outlooks(module, core) if outlook.has_plans()), None)


def is_marked(trace_json: str) -> bool:
    """Say whether a recorded trace is a family's plan, without parsing it."""
    return f'"{MARK}"' in trace_json
