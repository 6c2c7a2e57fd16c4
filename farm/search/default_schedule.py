"""The schedule of a function that nobody tuned: the best plan by prediction that TVM takes.

What families are and how they predict is `farm.search.families`' business.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import tvm

from farm.search import gpus, traces
from farm.search.families import rule
from farm.search.families.family import Plan
from farm.search.graph.pipeline import PIPELINES
from farm.search.target import make_target
from farm.search.tvm_env import ms
from farm.search.workloads import Workload

_log = logging.getLogger(__name__)

# TVM refuses a plan for what it cannot prove about a shape; others differ enough to be taken soon, or none is.
_MOST_TRIED = 8


@dataclasses.dataclass(frozen=True)
class Default:
    """The schedule by prediction as MetaSchedule's measure candidate, its family, plan and predicted time of a call.

    `refused` are families that know the function and none of whose plans TVM took.
    """

    candidate: Any
    family: str
    plan: Plan
    seconds: float
    refused: tuple[str, ...] = ()


def find_default(workload: Workload, entry: Any, target: Any) -> Default | None:
    """How the rule schedules the workload `entry` (MetaSchedule's); None where no family does."""
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
    """What a call takes by prediction where nothing was tuned (s); None where no family knows the function.

    Nothing is scheduled for it: that of the best plan is told, though TVM may refuse that one (`find_default`).
    """
    if not _is_canonical(workload):
        return None
    outlook = rule.read_outlook(tvm.ir.load_json(workload.module_json), gpus.unit_of(workload.target))
    return None if outlook is None else outlook.plans()[0][0].seconds


def _is_canonical(workload: Workload) -> bool:
    pipeline = PIPELINES.get(workload.pipeline)
    return pipeline is not None and pipeline.canonical


def describe_default(workload: Workload) -> str:
    """Which family serves a workload where nothing was tuned, and which ones TVM refused, for people."""
    if not _is_canonical(workload):
        return "none"
    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(workload.module_json))
    found = find_default(workload, entry, make_target(workload.target))
    if found is None:
        return "none"
    return found.family + (f" ({', '.join(found.refused)} refused)" if found.refused else "")
