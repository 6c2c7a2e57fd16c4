"""Write a candidate's trace as text and restore the scheduled function from it.

The text is a MetaSchedule tuning record with the decisions alone. MetaSchedule's post-processors (parallel loops,
packed weights) are left out and applied again on restoring: their layout maps do not survive JSON. Blocks have
canonical names (`farm.search.workloads`), independent of the function's own names.

An untuned function gets the best predicted plan that TVM accepts (`find_default`). Imported workloads and candidates
are checked to be the functions that their hashes name (`find_mismatched`), in a confined process: malicious
input can crash TVM.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx

from farm.errors import InternalError, UsageError
from farm.processes import confined
from farm.search import gpus, tvm_env, workloads
from farm.search.families import expressions, facts, rule
from farm.search.families.family import Plan
from farm.search.graph import dots
from farm.search.graph.pipelines import is_canonical
from farm.search.tvm_env import make_target, ms
from farm.search.tvm_errors import find_reason
from farm.values import Workload

_Instructions = list[list[Any]]
# TVM refuses plans whose shapes it cannot prove; one of the first few is usually accepted, or none is.
_MOST_TRIED = 8
# Rows per process: small enough to report progress and to find a row that crashes TVM.
_BATCH = 200
_LIMITS = confined.ConfinedLimits(memory_bytes=4 << 30, timeout_s=300.0, answer_bytes=64 << 20)
# The deepest function of the zoo has 49 levels; TVM reads them recursively on a stack of 8 MB.
_MOST_DEPTH = 2000
# MetaSchedule nests nothing deeper.
_MOST_NESTED = 100
_LEAVES = frozenset({"None", "bool", "int", "float", "ffi.String", "ffi.Bytes", "DataType"})
# Fields that hold a number; all others hold the index of a node.
_NUMBERS = frozenset({"data_alignment", "offset_factor"})
_log = logging.getLogger(__name__)


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


def find_mismatched(stored: Sequence[Workload], candidates: Iterable[tuple[str, str, str]] = ()) -> dict[str, str]:
    """Return the faults of workloads by hash. A candidate is its workload's hash, its own, and its trace.

    A valid workload's module loads, has its hash for its target and pipeline, and takes its arguments. The trace of a
    valid candidate makes the function that its hash names. Raises UnavailableError where this machine cannot confine a
    process.
    """
    traced = collections.defaultdict(list)
    for workload, *candidate in sorted(set(candidates)):
        traced[workload].append(candidate)
    found: dict[str, str] = {}
    for start in range(0, len(stored), _BATCH):
        found |= dict(_judge_apart(stored[start : start + _BATCH], traced))
    return found


def _judge_apart(stored: Sequence[Workload], traced: Mapping[str, list[list[str]]]) -> Iterator[tuple[str, str]]:
    payload = json.dumps([[each.to_row(), traced.get(each.hash, [])] for each in stored]).encode()
    try:
        answer = confined.call(f"{__name__}:judge", payload, "its module cannot be read", _LIMITS)
        problems = [str(each) for each in json.loads(answer)]
    except (UsageError, ValueError) as error:
        if len(stored) == 1:
            message = error.message if isinstance(error, UsageError) else "its module cannot be read"
            yield stored[0].hash, message
        else:
            middle = len(stored) // 2
            yield from _judge_apart(stored[:middle], traced)
            yield from _judge_apart(stored[middle:], traced)
        return
    yield from ((each.hash, problem) for each, problem in zip(stored, problems, strict=True) if problem)


def judge(payload: bytes) -> bytes:
    """Return each row's fault as JSON, "" for none. Runs in the confined process and loads TVM's compiler."""
    return json.dumps([_judge_one(Workload.from_row(row), known) for row, known in json.loads(payload)]).encode()


def _judge_one(workload: Workload, candidates: Sequence[tuple[str, str]]) -> str:
    tvm_env.load()
    try:
        require_graph(workload.module_json)
        module = tvm.ir.load_json(workload.module_json)
        own = workloads.workload_hash(module, workload.target, workload.pipeline)
        arguments = workloads.list_arguments(module)
    except Exception as error:  # noqa: BLE001 - malformed JSON makes TVM raise errors of any type
        return f"its module cannot be read: {' '.join(str(error).split())[:200]}"
    if own != workload.hash:
        return f"its module is another function, whose hash is {own}"
    if arguments != workload.arguments:
        return "its arguments are not those of its module"
    entry = ms.database.MemoryDatabase().commit_workload(module) if candidates else None
    for candidate, trace_json in candidates:
        try:
            made = restore(trace_json, entry, tvm_env.make_target(workload.target))
        except Exception as error:  # noqa: BLE001 - as above
            return f"the trace of its candidate {candidate} cannot be read: {' '.join(str(error).split())[:200]}"
        if (own := workloads.hash_structure(made.sch.mod)) != candidate:
            return f"the trace of its candidate {candidate} makes another function, whose hash is {own}"
    return ""


def require_graph(text: str) -> None:
    """Raise ValueError for JSON that is no TVM object, or whose nodes are cyclic, dangling or nested too deep.

    TVM writes a node after its parts, so that every reference points back.
    """
    graph = json.loads(text)
    # TVM had other keys until 0.20, and types of `tir` until 0.24.
    if re.search(r'"type_key": ?"|"type": ?"tir\.', text):
        version = re.search(r'"tvm_version": ?"([\w.]{1,20})', text)
        raise ValueError(f"TVM {version[1] if version else 'of old'} wrote it, which this TVM cannot read: tune again")
    nodes, root = (graph.get("nodes"), graph.get("root_index")) if isinstance(graph, dict) else (None, None)
    fine = isinstance(nodes, list) and isinstance(root, int) and 0 <= root < len(nodes)
    if not isinstance(nodes, list) or not fine:
        raise ValueError("it is no TVM object")
    depths: list[int] = []
    for number, node in enumerate(nodes):
        typed = isinstance(node, dict) and isinstance(node.get("type"), str)
        if not typed:
            raise ValueError(f"its node {number} has no type")
        depth = 0
        for reference in _list_references(node):
            if not 0 <= reference < number:
                raise ValueError(f"its node {number} contains node {reference}, which does not come before it")
            depth = max(depth, depths[reference] + 1)
        if depth > _MOST_DEPTH:
            raise ValueError(f"its node {number} is more than {_MOST_DEPTH:,} levels deep")
        depths.append(depth)


def require_objects(value: Any) -> None:
    """Raise ValueError where a string within plain JSON, such as an index map in a trace, is no valid TVM object."""
    for text in _list_texts(value, 0):
        if text.lstrip().startswith("{"):
            require_graph(text)


def _list_texts(value: Any, depth: int) -> Iterator[str]:
    if depth > _MOST_NESTED:
        raise ValueError("it is nested too deep")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _list_texts(each, depth + 1)


def _list_references(node: Mapping[str, Any]) -> Iterator[int]:
    data = node.get("data")
    if node["type"] in _LEAVES:
        return
    values = data if isinstance(data, list) else ()
    if isinstance(data, dict):
        values = [value for name, value in data.items() if name not in _NUMBERS]
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            yield value
