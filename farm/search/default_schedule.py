"""The schedule of a function that nobody tuned: the best plan by prediction that TVM takes.

What families are and how they predict is `farm.search.families`' business.
"""

from __future__ import annotations

import logging
from typing import Any

from farm.search import cores, traces, tvm_env
from farm.search.families import rule
from farm.search.workloads import Workload

_log = logging.getLogger(__name__)

# TVM refuses a plan for what it cannot prove about a shape; others differ enough to be taken soon, or none is.
_MOST_TRIED = 8


def find_default(workload: Workload, entry: Any, target: Any) -> Any | None:
    """A measure candidate of the workload `entry` (MetaSchedule's), scheduled by the rule; None where none fits."""
    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms

    outlook = rule.read_outlook(entry.mod, cores.core_of(workload.target))
    if outlook is None:
        return None
    context = traces.make_context(entry.mod, target)
    for _, plan in outlook.plans()[:_MOST_TRIED]:
        schedule = tvm.s_tir.Schedule(entry.mod, error_render_level="none")
        try:
            outlook.apply(schedule, plan)
            traces.finish(schedule, context)
        except (RuntimeError, ValueError, TypeError) as error:
            _log.debug("%s: %s refuses %s: %s", workload.name, outlook.family.name, dict(plan), error)
            continue
        arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
        return ms.search_strategy.MeasureCandidate(schedule, arguments)
    return None
