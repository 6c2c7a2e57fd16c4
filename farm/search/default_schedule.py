"""The schedule of an untuned function: the best predicted plan that TVM accepts.

`farm.search.families` defines families and their predictions.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import tvm

from farm.search import gpus, traces
from farm.search.families import rule
from farm.search.families.family import Plan
from farm.search.graph.pipelines import is_canonical
from farm.search.target import make_target
from farm.search.tvm_env import ms
from farm.values import Workload

_log = logging.getLogger(__name__)

# TVM refuses plans whose shapes it cannot prove; one of the first few is usually accepted, or none is.
_MOST_TRIED = 8


@dataclasses.dataclass(frozen=True)
class Default:
    """The predicted schedule as MetaSchedule's measure candidate, with its family, plan and predicted time of a call.

    `refused` lists matching families none of whose plans TVM accepted.
    """

    candidate: Any
    family: str
    plan: Plan
    seconds: float
    refused: tuple[str, ...] = ()


def find_default(workload: Workload, entry: Any, target: Any) -> Default | None:
    """Find the default schedule of the workload `entry` (MetaSchedule's); None where no family matches."""
    context = traces.make_context(entry.mod, target)
    refused: list[str] = []
    for outlook in rule.list_outlooks(entry.mod, gpus.unit_of(workload.target)):
        for prediction, plan in outlook.plans()[:_MOST_TRIED]:
            schedule = tvm.s_tir.Schedule(entry.mod, error_render_level="none")
            try:
                outlook.apply(schedule, plan)
                traces.finish(schedule, context)
            except (RuntimeError, ValueError, TypeError) as error:
                _log.debug("%s: %s refuses %s: %s", workload.name, outlook.family.name, dict(plan), error)
                continue
            arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
            candidate = ms.search_strategy.MeasureCandidate(schedule, arguments)
            return Default(candidate, outlook.family.name, plan, prediction.seconds, tuple(refused))
        refused.append(outlook.family.name)
    return None


def predict_seconds(workload: Workload) -> float | None:
    """Return the predicted time of one untuned call (s); None where no family matches.

    Schedules nothing: it is the best plan's time, even if TVM refuses that plan (`find_default`).
    """
    if not is_canonical(workload.pipeline):
        return None
    outlook = rule.read_outlook(tvm.ir.load_json(workload.module_json), gpus.unit_of(workload.target))
    return None if outlook is None else outlook.plans()[0][0].seconds


def describe_default(workload: Workload) -> str:
    """Describe which family serves an untuned workload, and which ones TVM refused."""
    if not is_canonical(workload.pipeline):
        return "none"
    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(workload.module_json))
    found = find_default(workload, entry, make_target(workload.target))
    if found is None:
        return "none"
    return found.family + (f" ({', '.join(found.refused)} refused)" if found.refused else "")
