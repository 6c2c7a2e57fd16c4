"""Check that imported workloads and candidates are the functions that their hashes name.

TVM's JSON is validated, loaded and hashed in a confined process, since malicious input can crash TVM.
`farm.metaschedule.exchange` moves records between farms.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tvm

from farm.errors import UsageError
from farm.processes import confined
from farm.search import traces, tvm_env, workloads
from farm.search.tvm_env import ms
from farm.values import Workload

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
            made = traces.restore(trace_json, entry, tvm_env.make_target(workload.target))
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
