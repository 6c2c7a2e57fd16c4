"""Compare whole models with ONNX Runtime and ncnn, in turns, in float32, with outputs checked.

`--trials 0` compiles the prediction; with more, each model is tuned from nothing, and the prediction is timed too
(`untried`). Ratios are ours over the other's, of medians; below 1, ours is faster. `ratio_of_least` compares the least
times, when all cores are equally fast: ours splits work evenly, so one slow core delays all. ncnn comes with the extra
`rivals`; without it its columns are null and `ncnn` has the reason.
Default budget: about 7 minutes on two cores; with 512 trials about 15 more per model.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import _farm
import _machine
import _peak

import farm.settings
from device_agent.protocol import Engine
from farm.artifacts import bench
from farm.artifacts.verify import compare
from farm.errors import UnavailableError
from farm.measure.blocking import BlockingSession
from farm.measure.statistics import SampleSummary, summarise
from farm.models import zoo
from farm.search.tvm_env import host_target
from farm.settings import Settings

MODELS = "squeezenet1.1,resnet18,resnet50,mobilenet_v2"
ENGINES = ("ours", "onnxruntime", "ncnn", "untried")


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"zoo names or ONNX files (default: {MODELS})")
    parser.add_argument("--trials", type=int, default=0, help="per model (default: 0, nothing is measured)")
    parser.add_argument("--runs", type=int, default=100, help="timed runs of each engine (default: 100)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    options = parser.parse_args()
    if options.quick:
        options.models, options.runs = "squeezenet1.1", 8
    with _machine.only_json() as emit, _machine.scratch():
        emit("vs_engines_tuned" if options.trials else "vs_engines", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    settings = farm.settings.load()
    models = {model.source.name: model for model in map(_farm.read_model, options.models.split(","))}
    threads = [int(text) for text in options.threads.split(",")]
    ncnn = find_ncnn()
    built = _farm.build_all(settings, models, options.trials)
    untried = _farm.build_all(settings, models, 0) if options.trials else {}
    peaks = _peak.Peaks(host_target(_machine.cores()), threads)
    rows = []
    with _farm.quiet_board(settings) as session:
        quiet = _machine.wait_until_quiet(options.quick)
        for name, model in models.items():
            compiled = built[name]
            if isinstance(compiled, str):
                rows.append({"name": name, "error": compiled, "threads": {}})
                continue
            row: dict[str, Any] = {"name": name, "compiled": dict(compiled.summary), "threads": {}}
            tried = {"ours": compiled, "untried": untried.get(name)}
            libraries = {engine: each for engine, each in tried.items() if isinstance(each, _farm.Built)}
            for count in threads:
                peaks.measure(session, settings)
                try:
                    figures = compare_engines(
                        session, settings, model, libraries, count, ncnn is not None, options.runs
                    )
                except _farm.ProgramFailed as error:
                    figures = {"latency_ms": {}, "ratio_to": None, "error": str(error)}
                row["threads"][str(count)] = figures
                _machine.say(f"{name}, {count} threads: {figures.get('error') or figures['ratio_to']}")
            rows.append(row)
    return {
        "machine_quiet": quiet,
        "ncnn": {"version": ncnn, "reason": None if ncnn else "ncnn is not installed"},
        "ratio_is": "ours / the other's, medians; below 1 ours is the faster one",
        "interval_is": "95 % confidence of the median, bootstrap",
        "peak": peaks.summary,
        "models": [with_shares(row, peaks) for row in rows],
    }


def find_ncnn() -> str | None:
    """Ncnn's version, None if it is not installed."""
    try:
        return importlib.metadata.version("ncnn")
    except importlib.metadata.PackageNotFoundError:
        return None


def compare_engines(
    session: BlockingSession,
    settings: Settings,
    model: _farm.Model,
    libraries: Mapping[str, _farm.Built],
    threads: int,
    has_ncnn: bool,
    runs: int,
) -> dict[str, Any]:
    """All engines in turns with so many threads; what cannot run ncnn says why."""
    programs = {
        **{name: _farm.Program(Engine.RELAX_VM, built.library, threads) for name, built in libraries.items()},
        "onnxruntime": _farm.Program(Engine.ONNXRUNTIME, model.source.onnx_bytes, threads),
    }
    reason = ""
    if has_ncnn:
        try:
            shapes = [spec.static_shape for spec in model.inputs]
            network = bench.convert(Engine.NCNN, model.source.onnx_bytes, shapes)
            programs["ncnn"] = _farm.Program(Engine.NCNN, network, threads)
        except UnavailableError as error:
            reason = str(error)
    timed = _farm.time_in_turns(session, settings, model, programs, runs)
    medians = {name: summarise(timing.samples) for name, timing in timed.items()}
    return {
        "latency_ms": {name: _latency(medians.get(name)) for name in ENGINES},
        "ratio_to": {
            name: _machine.round_to(medians["ours"].median / medians[name].median, 3) if name in medians else None
            for name in ENGINES[1:]
        },
        "ratio_of_least": {
            name: _machine.round_to(medians["ours"].min / medians[name].min, 3) if name in medians else None
            for name in ENGINES[1:]
        },
        "outputs": _outputs(timed),
        "ncnn_reason": reason or None,
    }


def _latency(summary: SampleSummary | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    return {
        "median": _machine.round_to(summary.median * 1e3),
        "least": _machine.round_to(summary.min * 1e3),
        "interval": [_machine.round_to(summary.ci_low * 1e3), _machine.round_to(summary.ci_high * 1e3)],
    }


def _outputs(timed: Mapping[str, _farm.Timing]) -> dict[str, Any]:
    """How far the others' outputs are from ONNX Runtime's, as a share of the peak."""
    reference = timed["onnxruntime"].outputs
    compared = {name: compare(timing.outputs, reference) for name, timing in timed.items() if name != "onnxruntime"}
    return {
        name: {"match": one.matches, "error": _machine.round_to(one.max_rel_error, 3)} for name, one in compared.items()
    }


def with_shares(row: dict[str, Any], peaks: _peak.Peaks) -> dict[str, Any]:
    """Add which share of the machine's peak each engine reaches, counting the FLOP of direct convolutions."""
    entry = zoo.ZOO.get(row["name"])
    if entry is None:
        return row
    for count, figures in row["threads"].items():
        least_ms = entry.flop / peaks.flop_per_s(int(count)) * 1e3
        figures["share_of_peak"] = {
            name: latency and _machine.round_to(least_ms / latency["median"], 3)
            for name, latency in figures["latency_ms"].items()
        }
    return row


if __name__ == "__main__":
    main()
