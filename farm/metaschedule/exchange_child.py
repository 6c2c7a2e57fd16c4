"""The confined process of `exchange`: read MetaSchedule's two files, possibly malicious, as workloads and trials."""

from __future__ import annotations

import base64
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.metaschedule import database as ours
from farm.metaschedule import tvm_objects
from farm.search import proof, traces, tvm_env, workloads
from farm.search.tvm_env import ms
from farm.values import Workload

_WORKLOADS, _TUNING_RECORDS = Path("database_workload.json"), Path("database_tuning_record.json")
# MetaSchedule writes a module's length before its text, and its reader trusts it.
_LENGTH_BYTES = 8


def read(payload: bytes) -> bytes:
    """Return workloads as rows and trials without a campaign, as JSON; works in the current folder.

    Traces keep the decisions only, as the farm's own do. Loads TVM's compiler. Raises UsageError.
    """
    given = json.loads(payload)
    lines = given["workloads"].splitlines(), given["tuning_records"].splitlines()
    for number, line in enumerate(lines[0], 1):
        _require(_WORKLOADS, number, line, _check_workload)
    for number, line in enumerate(lines[1], 1):
        _require(_TUNING_RECORDS, number, line, proof.require_objects)
    _WORKLOADS.write_text(given["workloads"])
    _TUNING_RECORDS.write_text(given["tuning_records"])
    workloads, trials = _read(given["pipeline"])
    return json.dumps({"workloads": [each.to_row() for each in workloads], "trials": trials}, allow_nan=False).encode()


def _require(path: Path, number: int, line: str, check: Callable[[Any], None]) -> None:
    try:
        check(json.loads(line))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} line {number}: {str(error)[:200]}") from error


def _check_workload(entry: Any) -> None:
    data = base64.b64decode(entry[1], validate=True)
    if int.from_bytes(data[:_LENGTH_BYTES], "little") != len(data) - _LENGTH_BYTES:
        raise ValueError("its module has another length than stated")
    proof.require_graph(data[_LENGTH_BYTES:].decode())


def _read(pipeline: str) -> tuple[list[Workload], list[dict[str, Any]]]:
    found: dict[str, Workload] = {}
    trials: dict[tuple[str, str], dict[str, Any]] = {}
    known = ms.database.JSONDatabase(path_workload=str(_WORKLOADS), path_tuning_record=str(_TUNING_RECORDS))
    for record in known.get_all_tuning_records():
        samples = [float(each) for each in record.run_secs or ()]
        if not samples or not all(0 < each < 1e9 for each in samples):
            continue
        module, config = record.workload.mod, tvm_objects.to_plain_target(record.target)
        key = workloads.workload_hash(module, config, pipeline)
        if key not in found:
            found[key] = ours.describe(module, key, config, pipeline)
        target = tvm_env.make_target(config)
        text = traces.dump(record.as_measure_candidate(), record.workload, target)
        # Hash what the farm restores from this text, where post-processors run again.
        candidate = workloads.hash_structure(traces.restore(text, record.workload, target).sch.mod)
        best = trials.get((key, candidate))
        if best is None or statistics.median(samples) < statistics.median(best["samples"]):
            trials[key, candidate] = {"workload": key, "candidate": candidate, "samples": samples, "trace_json": text}
    return list(found.values()), list(trials.values())
