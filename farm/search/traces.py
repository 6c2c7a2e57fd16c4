"""Write a candidate's trace as text and restore the scheduled function from it.

The text is a MetaSchedule tuning record with the decisions alone. MetaSchedule's post-processors (parallel loops,
packed weights) are left out and applied again on restoring: their layout maps do not survive JSON. Blocks have
canonical names (`farm.search.workloads`), independent of the function's own names.

An untuned function gets the best predicted plan that TVM accepts (`find_default`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx

from farm.errors import InternalError
from farm.search import gpus, tvm_env, workloads
from farm.search.families import expressions, facts, rule
from farm.search.families.family import Plan
from farm.search.graph import dots
from farm.search.graph.pipelines import is_canonical
from farm.search.tvm_env import make_target, ms
from farm.search.tvm_errors import find_reason
from farm.values import Workload

_Instructions = list[list[Any]]


def dump(item: Any, entry: Any, target: Any) -> str:
    """Return the text of a measure candidate of the workload `entry` (MetaSchedule's)."""
    # A record's own JSON leaves index maps as objects, so it is made without the trace.
    record = ms.database.TuningRecord(tvm.s_tir.schedule.Trace([], {}), entry, None, target, item.args_info)
    document = json.loads(json.dumps(record.as_json()))
    instructions, decisions = _to_plain(item.sch.trace.simplified(True).as_json())
    document[0] = [_rename(instructions, workloads.number_blocks(workloads.list_blocks(entry.mod))), decisions]
    return json.dumps(document)


def _to_plain(value: Any) -> Any:
    """Return a trace's JSON in Python's own types."""
    if isinstance(value, str | int | float) or value is None:
        return str(value) if isinstance(value, str) else value
    return value.value if hasattr(value, "value") else [_to_plain(each) for each in value]


def restore(text: str, entry: Any, target: Any) -> Any:
    """Restore the measure candidate of a text. Raises InternalError where the trace does not fit the workload."""
    tvm_env.load()

    try:
        [instructions, decisions], _, recorded_target, arguments = json.loads(text)
        context = make_context(entry.mod, target)
        names = {number: name for name, number in workloads.number_blocks(workloads.list_blocks(entry.mod)).items()}
        own = _rename(instructions, names)
        record = ms.database.TuningRecord.from_json([[own, decisions], [1.0], recorded_target, arguments], entry)
        schedule = tvm.s_tir.Schedule(entry.mod)
        if any(kind == "Tensorize" for kind, *_ in instructions):
            dots.register_all()
        record.trace.apply_to_schedule(schedule, remove_postproc=True)
        finish(schedule, context)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:  # what TVM raises for a misfit
        raise InternalError(f"a trace does not fit its workload: {find_reason(error)}") from error
    return ms.search_strategy.MeasureCandidate(schedule, record.args_info)


def make_context(module: Any, target: Any) -> Any:
    """Make a context with MetaSchedule's rules and post-processors for a function."""
    tvm_env.load_for(target)

    return ms.TuneContext(module, target=target, space_generator="post-order-apply", num_threads=1)


def finish(schedule: Any, context: Any) -> None:
    """Apply a context's post-processors to a schedule of its function. Raises RuntimeError where one refuses."""
    # Marks the end of the decisions; without it the search, which replays decisions, would post-process twice.
    schedule.enter_postproc()
    for postprocessor in context.space_generator.postprocs:
        if isinstance(postprocessor, ms.postproc.RewriteLayout) and not _packs_whole(
            postprocessor, schedule, context.mod
        ):
            continue
        if not postprocessor.apply(schedule):
            raise RuntimeError(f"{type(postprocessor).__name__} refuses the schedule")


def _packs_whole(rewrite: Any, schedule: Any, module: Any) -> bool:
    """Say whether packing keeps all weights, and can be lifted out of the function.

    TVM packs the wrong elements of a partly read weight, and inside a part of a parted loop where that reads one.
    """
    is_parted = any(instruction.kind.name == "LoopPartition" for instruction in schedule.trace.insts)
    if not _cuts(module) and not is_parted:
        return True  # a trial would double the time
    trial = schedule.copy()
    if not rewrite.apply(trial):
        return True  # the real run fails the same way
    for name in facts.list_blocks(trial):
        block = trial.get_sblock(name)
        if _packs(trial, block):
            [read], [written] = trial.get(block).reads, trial.get(block).writes
            if facts.size_of(read.source) != facts.size_of(written.source):
                return False
        elif any(_packs(trial, inner) for inner in _list_inner(trial, block)):
            return False
    return True


def _packs(schedule: Any, block: Any) -> bool:
    return "meta_schedule.layout_rewrite_preproc" in schedule.get(block).annotations


def _list_inner(schedule: Any, block: Any) -> Iterator[Any]:
    for inner in schedule.get_child_blocks(block):
        yield inner
        yield from _list_inner(schedule, inner)


@functools.lru_cache(maxsize=8)
def _cuts(module: Any) -> bool:
    """Say whether an unscheduled function reads a part of something; cached, since every candidate asks."""
    plain = tvm.s_tir.Schedule(module)
    return any(_reads_part(plain.get(plain.get_sblock(name))) for name in facts.list_blocks(plain))


def _reads_part(block: Any) -> bool:
    """Say whether a load, also in an index, has more elements than a block has steps, or one fixed index."""
    steps = math.prod(int(variable.dom.extent) for variable in block.iter_vars)
    value = getattr(block.body, "value", None)
    for load in [] if value is None else expressions.read_value(value)[0]:
        sizes = [int(size) for size in load.source.shape]
        fixed = (isinstance(index, tirx.IntImm) and size > 1 for index, size in zip(load.indices, sizes, strict=True))
        if steps < math.prod(sizes) or any(fixed):
            return True
    return False


def replay(module_json: str, text: str, target: Any) -> str:
    """Return the scheduled function that a text makes of an unscheduled one, in TVM's JSON. Raises InternalError."""
    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(module_json))
    return str(tvm.ir.save_json(restore(text, entry, target).sch.mod))


def as_record(item: Any, entry: Any, target: Any, latency_s: float) -> Any:
    """Make an applicable tuning record with the full trace of a measure candidate."""
    return ms.database.TuningRecord(item.sch.trace, entry, [latency_s], target, item.args_info)


def shape(instructions: Sequence[Any]) -> str:
    """Return the instructions without names, sizes and target-dependent numbers."""
    return json.dumps(
        [[kind, [v for v in inputs if isinstance(v, str)], outputs] for kind, inputs, _, outputs in instructions]
    )


def _rename(instructions: _Instructions, names_by_name: Mapping[str, str]) -> _Instructions:
    return [
        [kind, inputs, [names_by_name.get(attributes[0], attributes[0]), *attributes[1:]], outputs]
        if kind == "GetSBlock"
        else [kind, inputs, attributes, outputs]
        for kind, inputs, attributes, outputs in instructions
    ]


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
    context = make_context(entry.mod, target)
    refused: list[str] = []
    for outlook in rule.list_outlooks(entry.mod, gpus.unit_of(workload.target)):
        for prediction, plan in outlook.plans()[:_MOST_TRIED]:
            schedule = tvm.s_tir.Schedule(entry.mod, error_render_level="none")
            try:
                outlook.apply(schedule, plan)
                finish(schedule, context)
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
