"""The document of a quickstart, which `--json` prints and the report is made from."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farm.artifacts import compile
from farm.artifacts.contenders import PREDICTED
from farm.campaign.tune import Tuned
from farm.report import campaign_rows
from farm.report.quickstart_page import LABELS
from farm.values import Record
from farm.version import __version__

# A compiled model this much slower than the sum of its parts does not consist of what was measured.
_SUSPICIOUS = 1.5
_FILES = {
    "page": "report.html",
    "markdown": "report.md",
    "json": "report.json",
    "plot": "latency.png",
    "progress_plot": "progress.png",
    "artifact": "model.so",
}


def make_document(
    model: str,
    since: float,
    out: Path,
    isolation: str,
    tuned: Tuned,
    final: Mapping[str, Any],
    compiled: compile.Compiled,
    records: Sequence[Record],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Make the document of a tuned and compiled model. `since`: the command's start, in monotonic seconds."""
    board = tuned.board
    variants = {**final["variants"], "tuned": final["variants"][final["taken"]]}
    ours, stock, theirs = variants["tuned"], variants.get("untuned"), variants.get("onnxruntime")
    check = final["compared"].get(final["taken"]) or final["compared"].get("untuned") or {}
    reason = [check["reason"]] if check.get("reason") else []
    doubts = _doubts(variants.get("recorded"), compiled, tuned.workloads, records, len(final["left_out"]))
    return {
        "model": model,
        "board": {"name": board["name"], "type": board["board_type"], "simulated": board["simulated"]},
        "trials": tuned.trials,
        "seconds_to_first_trial": tuned.seconds_to_first_trial,
        "seconds_total": time.monotonic() - since,
        "latency_ms": {name: _milliseconds(variants[name]) if name in variants else None for name in LABELS},
        "doubt": final.get("doubt", ""),
        "gain": final["gain"],
        "gained": final["said"],
        "speedup_vs_untuned": None if stock is None else stock["median"] / ours["median"],
        "ratio_to_onnxruntime": None if theirs is None else ours["median"] / theirs["median"],
        "max_abs_error": check.get("max_abs_error"),
        "max_rel_error": check.get("max_rel_error"),
        "outputs_match": check.get("matches"),
        "overhead_per_trial_ms": float(np.median(tuned.overheads_s)) * 1e3 if tuned.overheads_s else None,
        "shipped": final["taken"],
        "records_reused": tuned.recalled,
        "records": {"used": compiled.applied, "workloads": compiled.workloads, "new": tuned.verdict.get("records", 0)},
        "workloads": [_describe_task(task) for task in tuned.tasks],
        "measurement": {
            "runs": final["runs"],
            "threads": final["threads"],
            "interval": "95 % bootstrap confidence interval of the median",
            "untuned": f"TVM's own default schedules, graph pipeline {compile.UNTUNED_PIPELINE}",
            "predicted": f"graph pipeline {compiled.pipeline}, every function scheduled by prediction, no trial",
            "tuned": f"graph pipeline {compiled.pipeline}, {_say_sources(final, compiled)}",
            "isolation": isolation,
        },
        "environment": _describe_environment(tuned),
        "notes": [*notes, *reason, *doubts],
        "report": {name: str(out / file) for name, file in _FILES.items()},
    }


def _describe_task(task: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": task["name"],
        "flop": task["flop"],
        "weight": task["weight"],
        "best_gflops": campaign_rows.find_gflops(task),
        "latency_us": task["best_s"] * 1e6 if task["best_s"] else None,
        "trials": task["counted"],
    }


def _describe_environment(tuned: Tuned) -> dict[str, Any]:
    about = tuned.board.get("description") or {}
    return {
        "tvm-farm": __version__,
        "cpu": about.get("cpu_model"),
        "cores": len(about.get("cores_online") or ()) or None,
        "target": json.dumps(dict(tuned.target)),
        "python": platform.python_version(),
        "engines": ", ".join(f"{k} {v}" for k, v in dict(about.get("engine_versions") or {}).items()),
    }


def _say_sources(final: Mapping[str, Any], compiled: compile.Compiled) -> str:
    """Describe the sources of the compiled schedules; a record that equals the prediction counts as predicted."""
    differing = 0 if final["taken"] == PREDICTED else final["differing"] - len(final["left_out"])
    if not differing:
        return "every function scheduled as predicted"
    return f"{differing} of {compiled.workloads} functions scheduled by records, the others as predicted"


def _milliseconds(summary: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value * 1e3 for name, value in summary.items() if name != "count"}
    low, high = values.pop("ci_low"), values.pop("ci_high")
    return {**values, "ci": [low, high], "runs": summary["count"]}


def _doubts(
    recorded: Mapping[str, Any] | None,
    compiled: compile.Compiled,
    workloads: Sequence[Any],
    records: Sequence[Record],
    left_out: int = 0,
) -> list[str]:
    """List the caveats of the figures.

    `recorded` is the model's latency from all records, of which `left_out` are not in the compiled model.
    """
    notes = []
    if (unfit := len(records) - left_out - compiled.applied) > 0:
        notes.append(f"{unfit} of {len(records)} records could not be applied to the model")
    if missing := compiled.workloads - len(records):
        notes.append(f"{missing} of {compiled.workloads} functions have no record: scheduled by prediction alone")
        return notes  # there is no sum to compare with
    weights = {workload.hash: workload.weight for workload in workloads}
    expected = math.fsum(record.median_s * weights[record.workload] for record in records)
    if recorded is not None and recorded["median"] > _SUSPICIOUS * expected > 0:
        took_s = recorded["median"]
        notes.append(
            f"the whole model takes {took_s / expected:.1f} times as long as its functions did one by one "
            f"({took_s * 1e3:.3f} ms, {expected * 1e3:.3f} ms)"
        )
    return notes
