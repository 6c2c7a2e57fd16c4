"""A candidate's trace as text, and the way back to the scheduled function.

The text is a MetaSchedule tuning record, as its own database files hold them, with the decisions alone: what
MetaSchedule's post-processors add (parallel loops, packed weight layouts) is left out and done again on the way back.
A full trace does not survive as JSON: its layout maps come back as something else, and the function differs.
"""

from __future__ import annotations

import json
from typing import Any

from farm.errors import InternalError
from farm.search import tvm_env


def dump(item: Any, entry: Any, target: Any) -> str:
    """The text of a measure candidate of the workload `entry` (MetaSchedule's)."""
    import tvm.s_tir.meta_schedule as ms

    trace = item.sch.trace.simplified(True)
    return json.dumps(ms.database.TuningRecord(trace, entry, None, target, item.args_info).as_json())


def restore(text: str, entry: Any, target: Any) -> Any:
    """The measure candidate of a text. Raises InternalError where the trace does not fit the workload any more."""
    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms

    try:
        trace, _, recorded_target, arguments = json.loads(text)
        record = ms.database.TuningRecord.from_json([trace, [1.0], recorded_target, arguments], entry)
        schedule = tvm.s_tir.Schedule(entry.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=True)
        # Marks where decisions end: without it the search, which replays decisions alone, would post-process twice.
        schedule.enter_postproc()
        for postprocessor in _postprocessors(entry.mod, target):
            if not postprocessor.apply(schedule):
                raise InternalError(f"{type(postprocessor).__name__} refuses a trace that it once took")
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:  # what TVM raises for a misfit
        reason = str(error).strip().splitlines()
        raise InternalError(f"a trace does not fit its workload: {reason[-1] if reason else error!r}") from error
    return ms.search_strategy.MeasureCandidate(schedule, record.args_info)


def replay(module_json: str, text: str, target: Any) -> str:
    """The scheduled function, in TVM's JSON, that a text leads to from an unscheduled one. Raises InternalError."""
    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms

    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(module_json))
    return str(tvm.ir.save_json(restore(text, entry, target).sch.mod))


def _postprocessors(module: Any, target: Any) -> list[Any]:
    import tvm.s_tir.meta_schedule as ms

    context = ms.TuneContext(module, target=target, space_generator="post-order-apply", num_threads=1)
    return list(context.space_generator.postprocs)


def as_record(item: Any, entry: Any, target: Any, latency_s: float) -> Any:
    """A tuning record that can be applied: with the full trace of a measure candidate."""
    import tvm.s_tir.meta_schedule as ms

    return ms.database.TuningRecord(item.sch.trace, entry, [latency_s], target, item.args_info)
