"""Compare thirty held-out small models (`_small_models.py`) with ONNX Runtime, in turns.

`--trials 0` compiles the prediction; with more, each model is tuned from nothing, and the prediction is timed too:
`over_untried` is tuned over predicted. Ratios below 1 mean that ours is faster. A model that does not compile or run is
a row with its error; wrong outputs never count as faster. Default budget: about 10 minutes on two cores, most of it
compiling; with 32 trials about 30.
"""

from __future__ import annotations

import contextlib
import hashlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import _farm
import _machine
import _small_models
from _small_models import SmallModel

import farm.settings
from device_agent.protocol import Engine
from farm.artifacts.verify import compare
from farm.models.inputs import read_inputs, resolve_inputs
from farm.models.source import ModelSource

# Both medians and least times of the same code differ by less, in turns on a machine that does nothing else.
_SLOWER = 1.03


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--trials", type=int, default=0, help="per model (default: 0, nothing is measured)")
    parser.add_argument("--runs", type=int, default=200, help="timed runs of each program (default: 200)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    parser.add_argument("--models", default="", help="these only, with commas between (default: all)")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.models = 8, options.models or "odd_channels,mlp"
    with _machine.only_json() as emit, _machine.scratch():
        emit("thirty_models", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    _small_models.check()
    settings = farm.settings.load()
    names = options.models.split(",") if options.models else list(_small_models.MODELS)
    models = {name: _small_models.MODELS[name] for name in names}
    threads = [int(text) for text in options.threads.split(",")]
    compilable = {name: as_model(model) for name, model in models.items()}
    built = _farm.build_all(settings, compilable, options.trials)
    untried = _farm.build_all(settings, compilable, 0) if options.trials else {}
    rows = []
    with _farm.quiet_board(settings) as session:
        quiet = _machine.wait_until_quiet(options.quick)
        for name, model in models.items():
            rows.append(row(session, settings, model, built[name], untried.get(name), threads, options.runs))
            _machine.say(f"{name}: {rows[-1].get('ratio', rows[-1].get('error'))}")
    return {
        "machine_quiet": quiet,
        "ratio_is": "ours / ONNX Runtime's, medians; below 1 ours is the faster one",
        "summary": {str(count): summarise(rows, str(count)) for count in threads},
        "models": rows,
    }


def as_model(model: SmallModel) -> _farm.Model:
    data = model.build()
    source = ModelSource(model.name, data, hashlib.sha256(data).hexdigest(), model.name)
    return _farm.Model(source, resolve_inputs(read_inputs(source.load()), {}))


def row(
    session: Any,
    settings: Any,
    small: SmallModel,
    built: _farm.Built | str,
    untried: _farm.Built | str | None,
    threads: Sequence[int],
    runs: int,
) -> dict[str, Any]:
    """All programs in turns at each number of threads, checked."""
    model = as_model(small)
    result: dict[str, Any] = {"name": small.name, "input": list(small.shape)}
    if isinstance(built, str):
        return result | {"error": built}
    result |= {"compiled": dict(built.summary), "latency_ms": {}, "ratio": {}}
    errors = []
    for count in threads:
        programs = {
            "ours": _farm.Program(Engine.RELAX_VM, built.library, count),
            "onnxruntime": _farm.Program(Engine.ONNXRUNTIME, model.source.onnx_bytes, count),
        }
        if isinstance(untried, _farm.Built):
            programs["untried"] = _farm.Program(Engine.RELAX_VM, untried.library, count)
        try:
            timed = _farm.time_in_turns(session, settings, model, programs, runs)
        except _farm.ProgramFailed as error:
            return result | {"error": str(error)}
        errors.append(compare(timed["ours"].outputs, timed["onnxruntime"].outputs).max_rel_error)
        medians = {name: statistics.median(timing.samples) for name, timing in timed.items()}
        result["latency_ms"][str(count)] = {
            name: _machine.spread(timing.samples, 1e3) for name, timing in timed.items()
        }
        result["ratio"][str(count)] = _machine.round_to(medians["ours"] / medians["onnxruntime"], 3)
        if "untried" in medians:
            ratios = {
                "median": medians["ours"] / medians["untried"],
                "least": min(timed["ours"].samples) / min(timed["untried"].samples),
            }
            gained = result.setdefault("over_untried", {})
            gained[str(count)] = {name: _machine.round_to(ratio, 3) for name, ratio in ratios.items()}
    return result | {"max_rel_error": max(errors), "outputs_match": max(errors) <= small.tolerance}


def summarise(rows: Sequence[Mapping[str, Any]], threads: str) -> dict[str, Any]:
    """Over the models that compute the right thing; the others are counted."""
    good = {row["name"]: row["ratio"][threads] for row in rows if row.get("outputs_match")}
    wrong = [row["name"] for row in rows if "error" not in row and not row["outputs_match"]]
    summary: dict[str, Any] = {
        "models": len(rows),
        "failed": [row["name"] for row in rows if "error" in row],
        "wrong": wrong,
        "faster": sum(ratio < 1 for ratio in good.values()),
    }
    with contextlib.suppress(ValueError):  # there is none
        worst = max(good, key=lambda name: good[name])
        summary |= {"median": _machine.round_to(statistics.median(good.values()), 3), "worst": good[worst]}
        summary["worst_is"] = worst
    gained = {row["name"]: row["over_untried"][threads] for row in rows if row.get("over_untried")}
    if gained:
        slower = {name: ratios for name, ratios in gained.items() if min(ratios.values()) > _SLOWER}
        median = _machine.round_to(statistics.median(ratios["median"] for ratios in gained.values()), 3)
        summary["over_untried"] = {"median": median, "slower": slower}
    return summary


if __name__ == "__main__":
    main()
