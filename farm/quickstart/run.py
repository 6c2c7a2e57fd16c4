"""The main job end to end on one machine: tune a model, compile it, check it, time it against others, report."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.protocol import Engine as Runner
from farm.artifacts.compile import UNTUNED_PIPELINE, Compiled, compile_model
from farm.artifacts.on_board import HeldForModels, hold_type
from farm.artifacts.timing import Timed, Variant, describe_runs, ordered, time_in_turns
from farm.artifacts.verify import compare
from farm.campaign import one_model
from farm.campaign.plan_models import to_variant
from farm.campaign.tune import Listener, Tuned, tuning
from farm.errors import FarmError
from farm.inventory.board_types import BoardType
from farm.measure.statistics import Summary
from farm.models.inputs import InputSpec, make_inputs
from farm.models.source import ModelSource
from farm.quickstart import sweep as quickstart_sweep
from farm.report import markdown, plots
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT, Record
from farm.version import __version__

# A compiled model this much slower than the sum of its parts was not made of what was measured.
_SUSPICIOUS = 1.5


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for. `since` is when the command began (monotonic seconds).

    Another farm that measures on this machine is waited for `wait_s`.
    """

    source: ModelSource
    inputs: tuple[InputSpec, ...]
    trials: int
    out: Path
    fresh: bool
    since: float
    sweep: bool = True
    wait_s: float = 0.0


def run(
    request: Request, settings: Settings, store: Store, board_type: BoardType, listener: Listener
) -> dict[str, Any]:
    """Do it; returns the document that `--json` prints, after writing it and the report into `request.out`."""
    source = request.source
    listener.note("starting the local farm: tracker, agent, Ray")
    order = one_model.Request(
        "quickstart", to_variant(source, request.inputs), board_type, request.trials, fresh=request.fresh,
        wait_s=request.wait_s, since=request.since,
    )  # fmt: skip
    with tuning(order, settings, store, listener) as tuned:
        target, workloads = tuned.target, tuned.workloads
        records = store.fetch_records(
            workloads=[w.hash for w in workloads], board_type=board_type.name, operating_point=DEFAULT_POINT
        )
        listener.note("compiling the model: untuned, by prediction alone, and from the records")
        shapes = {spec.name: spec.static_shape for spec in request.inputs}
        model = source.load()
        pipeline = workloads[0].pipeline if workloads else board_type.pipeline
        untuned = compile_model(model, shapes, target, UNTUNED_PIPELINE, [], board_type.link_triple)
        by_rule = compile_model(model, shapes, target, pipeline, [], board_type.link_triple)
        compiled = compile_model(model, shapes, target, pipeline, records, board_type.link_triple)
        programs = {"untuned": untuned, "predicted": by_rule, "tuned": compiled}
        with hold_type(settings, store, board_type, 0.0, "quickstart", listener.note) as held:
            listener.note(f"timing untuned, predicted, tuned and ONNX Runtime in turns on {held.name}")
            timed = _time_variants(held, settings, request, programs, int(target["num-cores"]))
            board = held.description.to_dict()
    swept = _sweep(request, settings, store, listener, {"untuned": untuned, "tuned": compiled}, timed)
    document = _document(request, settings, board, target, tuned, compiled, timed, workloads, records)
    document["sweep"] = swept
    _write(request.out, document, tuned, programs[document["shipped"]], timed)
    return document


# What is timed, as reports call it: as TVM comes, with no trial at all, tuned, and the engine to beat.
LABELS = {
    "untuned": "TVM, untuned",
    "predicted": "tvm-farm, no trial",
    "tuned": "tvm-farm, tuned",
    "onnxruntime": "ONNX Runtime",
}


def _time_variants(
    held: HeldForModels, settings: Settings, request: Request, programs: Mapping[str, Compiled], threads: int
) -> Timed:
    """Run all of them and ONNX Runtime on the board, in turns, with the same inputs and threads."""
    inputs = make_inputs(request.inputs, settings.seed)
    variants = [
        Variant(
            name, Runner.RELAX_VM, program.library, ordered(inputs), needed=name == "tuned", baseline=name == "untuned"
        )
        for name, program in programs.items()
    ]
    missing = {}
    if str(Runner.ONNXRUNTIME) in held.description.engines:
        variants.append(Variant("onnxruntime", Runner.ONNXRUNTIME, request.source.onnx_bytes, inputs))
    else:
        missing["onnxruntime"] = "ONNX Runtime is not installed on the board"
    timed = time_in_turns(held.run, variants, settings.model_runs, held.limits(threads))
    timed.missing |= missing
    return timed


def _sweep(
    request: Request,
    settings: Settings,
    store: Store,
    listener: Listener,
    compiled: Mapping[str, Compiled],
    timed: Timed,
) -> dict[str, Any] | None:
    """Both variants over the clocks of a virtual board; None where that was not wanted or not possible, and noted."""
    if not request.sweep:
        return None
    untuned = timed.summary("untuned")
    if untuned is None or untuned.median > quickstart_sweep.SLOWEST_S:
        why = "untuned code does not run" if untuned is None else f"untuned code takes {untuned.median:.1f} s here"
        timed.missing["clocks"] = f"no sweep of a virtual board: {why}; see `farm sweep run`"
        return None
    listener.note(f"sweeping both over the CPU clocks of a virtual {quickstart_sweep.BOARD_TYPE} (simulated)")
    arrays = ordered(make_inputs(request.inputs, settings.seed))
    try:
        return quickstart_sweep.sweep_virtual_board(
            request.source, arrays, compiled, settings, store, listener, request.out / "sweep"
        )
    except FarmError as error:  # the job itself is done
        timed.missing["clocks"] = f"the sweep of a virtual board failed: {error.message}"
        return None


def _document(
    request: Request,
    settings: Settings,
    board: Mapping[str, Any],
    target: Mapping[str, Any],
    tuned: Tuned,
    compiled: Compiled,
    timed: Timed,
    workloads: Sequence[Any],
    records: Sequence[Record],
) -> dict[str, Any]:
    summaries = {name: timed.summary(name) for name in ("untuned", "predicted", "tuned", "onnxruntime")}
    latency = {name: None if s is None else _milliseconds(s) for name, s in summaries.items()}
    ours, stock, theirs = summaries["tuned"], summaries["untuned"], summaries["onnxruntime"]
    assert ours is not None  # `_time_variants` raises otherwise
    # Without ONNX Runtime, untuned TVM is the reference: the same importer, but none of the schedules.
    reference = timed.outputs.get("onnxruntime") or timed.outputs.get("untuned")
    shipped = choose_program(timed)
    check = compare(timed.outputs[shipped], reference) if reference else None
    overhead = float(np.median(tuned.overheads_s)) if tuned.overheads_s else None
    notes = [f"{name}: {reason}" for name, reason in timed.missing.items()]
    if check is not None and check.reason:
        notes.append(check.reason)
    notes += _doubts(ours, compiled, workloads, records)
    if shipped != "tuned":
        notes.append("as a whole the model is faster by prediction, with no trial: model.so holds that code")
    return {
        "model": request.source.name,
        "board": {"name": board["name"], "type": board["board_type"], "simulated": board["simulated"]},
        "trials": tuned.trials,
        "seconds_to_first_trial": tuned.seconds_to_first_trial,
        "seconds_total": time.monotonic() - request.since,
        "latency_ms": latency,
        "speedup_vs_untuned": None if stock is None else stock.median / ours.median,
        "ratio_to_onnxruntime": None if theirs is None else ours.median / theirs.median,
        "max_abs_error": None if check is None else _finite(check.max_abs_error),
        "max_rel_error": None if check is None else _finite(check.max_rel_error),
        "outputs_match": None if check is None else check.matches,
        "overhead_per_trial_ms": None if overhead is None else overhead * 1e3,
        "shipped": shipped,
        "records_reused": tuned.recalled,
        "records": {"used": compiled.applied, "workloads": compiled.workloads, "new": tuned.verdict.get("records", 0)},
        "workloads": [
            {
                "name": task["name"],
                "flop": task["flop"],
                "weight": task["weight"],
                "best_gflops": task["flop"] / task["best_s"] / 1e9 if task["best_s"] else None,
                "latency_us": task["best_s"] * 1e6 if task["best_s"] else None,
                "trials": task["counted"],
            }
            for task in tuned.tasks
        ],
        "measurement": {
            "runs": describe_runs(settings.model_runs),
            "threads": int(target["num-cores"]),
            "interval": "95 % bootstrap confidence interval of the median",
            "untuned": f"TVM's own default schedules, graph pipeline {UNTUNED_PIPELINE}",
            "predicted": f"graph pipeline {compiled.pipeline}, every function scheduled by prediction, no trial",
            "tuned": f"graph pipeline {compiled.pipeline}, "
            f"{compiled.applied} of {compiled.workloads} functions from records",
            "isolation": settings.isolation,
        },
        "environment": {
            "tvm-farm": __version__,
            "cpu": board.get("cpu_model"),
            "cores": len(board.get("cores_online", ())),
            "target": json.dumps(dict(target)),
            "python": platform.python_version(),
            "engines": ", ".join(f"{k} {v}" for k, v in dict(board.get("engine_versions", {})).items()),
        },
        "notes": notes,
        "report": {
            "markdown": str(request.out / "report.md"),
            "json": str(request.out / "report.json"),
            "plot": str(request.out / "latency.png"),
            "progress_plot": str(request.out / "progress.png"),
            "artifact": str(request.out / "model.so"),
        },
    }


def choose_program(timed: Timed) -> str:
    """Name the program to ship: the tuned one, unless the one that nobody tuned is surely faster as a whole.

    Functions that are fast one by one need not be in a model, where their data come from another core's cache.
    """
    tuned, predicted = timed.summary("tuned"), timed.summary("predicted")
    surely = tuned is not None and predicted is not None and predicted.ci_high < tuned.ci_low
    return "predicted" if surely else "tuned"


def _milliseconds(summary: Summary) -> dict[str, Any]:
    values = summary.scaled(1e3)
    low, high, runs = values.pop("ci_low"), values.pop("ci_high"), values.pop("count")
    return {**values, "ci": [low, high], "runs": runs}


def _finite(value: float) -> float | None:
    """JSON has no infinity: the error of an output that is not a number has no size."""
    return value if math.isfinite(value) else None


def _doubts(ours: Summary, compiled: Compiled, workloads: Sequence[Any], records: Sequence[Record]) -> list[str]:
    """What the reader must know before believing the figures."""
    notes = []
    if compiled.applied < len(records):
        notes.append(f"{len(records) - compiled.applied} of {len(records)} records could not be applied to the model")
    if missing := compiled.workloads - len(records):
        notes.append(f"{missing} of {compiled.workloads} functions have no record: scheduled by prediction alone")
        return notes  # there is no sum to compare with
    weights = {workload.hash: workload.weight for workload in workloads}
    expected = math.fsum(record.median_s * weights[record.workload] for record in records)
    if ours.median > _SUSPICIOUS * expected > 0:
        notes.append(
            f"the whole model takes {ours.median / expected:.1f} times as long as its functions did one by one "
            f"({ours.median * 1e3:.3f} ms, {expected * 1e3:.3f} ms)"
        )
    return notes


def _write(out: Path, document: dict[str, Any], tuned: Tuned, compiled: Compiled, timed: Timed) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "model.so").write_bytes(compiled.library)
    board = document["board"]
    title = f"{document['model']} on {board['type']}/{board['name']}"
    roles = {
        "untuned": plots.Role.BASELINE,
        "predicted": plots.Role.OURS,
        "tuned": plots.Role.OURS,
        "onnxruntime": plots.Role.RIVAL,
    }
    rows, references = [], []
    for name, label in LABELS.items():
        if (summary := timed.summary(name)) is not None:
            rows.append(plots.LatencyRow(label, summary.median, roles[name], summary.ci_low, summary.ci_high))
            if name == "onnxruntime":
                references.append(plots.Reference(label, summary.median, plots.Role.RIVAL))
    threads = document["measurement"]["threads"]
    runs = {name: latency["runs"] for name, latency in document["latency_ms"].items() if latency}
    fewer = f" (untuned: {runs['untuned']})" if runs.get("untuned", runs["tuned"]) < runs["tuned"] else ""
    plots.plot_latency(
        out / "latency.png",
        rows,
        title,
        f"median of {runs['tuned']} runs{fewer} with 95 % confidence interval, {threads} threads",
        simulated=board["simulated"],
    )
    document["plots"] = {"Latency": "latency.png"}
    if len(tuned.history) >= 2:
        points = [plots.ProgressPoint(trials, latency) for trials, latency in tuned.history]
        plots.plot_progress(
            out / "progress.png",
            points,
            title,
            "sum of the best latencies of its workloads",
            references=references,
            simulated=board["simulated"],
        )
        document["plots"]["Progress"] = "progress.png"
    else:
        del document["report"]["progress_plot"]
    (out / "report.md").write_text(markdown.write_report(document))  # type: ignore[arg-type]
    (out / "report.json").write_text(json.dumps(document, indent=2) + "\n")
