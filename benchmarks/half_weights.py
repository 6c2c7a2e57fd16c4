"""Weights stored in 16 bits against float32 (`farm model compile --weights`): latency in turns, library, error.

All programs as compiled when nothing was measured. `dense` is what follows VGG's convolutions but for its first layer:
dense layers of 4096, 4096 and 1000 channels. A ratio below 1 says that 16 bits are faster. Errors are against ONNX
Runtime's outputs, relative to the largest of them. Default budget: about 10 minutes on two cores.
"""

from __future__ import annotations

import hashlib
import statistics
from typing import Any

import _farm
import _machine

import farm.settings
from device_agent.protocol import Engine
from farm.artifacts.verify import compare
from farm.inventory.board_types import require_board_type
from farm.models.inputs import read_inputs, resolve_inputs
from farm.models.onnx_builder import GraphBuilder
from farm.models.source import ModelSource
from farm.search.graph import pipelines

DENSE = "dense"
_FEATURES = 4096


def main() -> None:
    parser = _machine.parser(__doc__)
    models = f"{DENSE},resnet18,resnet50,mobilenet_v2"
    parser.add_argument("--models", default=models, help=f"{DENSE}, zoo names or ONNX files (default: {models})")
    parser.add_argument("--runs", type=int, default=60, help="timed runs of each program (default: 60)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    options = parser.parse_args()
    if options.quick:
        options.models, options.runs = "mlp", 8
    with _machine.only_json() as emit, _machine.scratch():
        emit("half_weights", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    settings = farm.settings.load()
    models = [read_model(name) for name in options.models.split(",")]
    built: list[dict[str, _farm.Built]] = [{} for _ in models]
    for weights in pipelines.KNOWN:
        kind = pipelines.store_weights(require_board_type("local"), weights)
        with _farm.builder(settings, kind, 0) as build:
            for model, ways in zip(models, built, strict=True):
                ways[weights] = build(model)
                _machine.say(f"{model.source.name}, {weights}: {len(ways[weights].library) / 1e6:.1f} MB")
    rows = []
    with _farm.quiet_board(settings) as session:
        quiet = _machine.wait_until_quiet(options.quick)
        for model, ways in zip(models, built, strict=True):
            row: dict[str, Any] = {"name": model.source.name, "library_bytes": {}, "error": {}, "threads": {}}
            for count in (int(text) for text in options.threads.split(",")):
                programs = {
                    weights: _farm.Program(Engine.RELAX_VM, each.library, count) for weights, each in ways.items()
                }
                programs["onnxruntime"] = _farm.Program(Engine.ONNXRUNTIME, model.source.onnx_bytes, count)
                timed = _farm.time_in_turns(session, settings, model, programs, options.runs)
                row["threads"][str(count)] = describe(timed)
                _machine.say(f"{model.source.name}, {count} threads: {row['threads'][str(count)]['ratio']}")
            for weights, each in ways.items():
                verdict = compare(timed[weights].outputs, timed["onnxruntime"].outputs)
                row["library_bytes"][weights] = len(each.library)
                row["error"][weights] = {
                    "largest": _machine.round_to(verdict.max_rel_error, 3),
                    "rms": _machine.round_to(verdict.rms_rel_error, 3),
                }
            rows.append(row)
    return {"machine_quiet": quiet, "models": rows}


def describe(timed: dict[str, _farm.Timing]) -> dict[str, Any]:
    """Latencies of all programs, and those of 16 bits over float32's."""
    medians = {name: statistics.median(timing.samples) for name, timing in timed.items()}
    return {
        "latency_ms": {name: _machine.spread(timing.samples, 1e3) for name, timing in timed.items()},
        "ratio": {
            weights: _machine.round_to(medians[weights] / medians[pipelines.FLOAT32], 3)
            for weights in (pipelines.BF16, pipelines.BF16_ALL)
        },
    }


def read_model(name: str) -> _farm.Model:
    """A model by name, or the dense layers."""
    if name != DENSE:
        return _farm.read_model(name)
    graph = GraphBuilder(0)
    x = graph.input("x", (1, _FEATURES))
    for _ in range(2):
        x = graph.relu(graph.dense(x, _FEATURES, gain=2.0))
    data = graph.finish(DENSE, {"y": (graph.dense(x, 1000), (1, 1000))})
    source = ModelSource(DENSE, data, hashlib.sha256(data).hexdigest(), "benchmark")
    return _farm.Model(source, resolve_inputs(read_inputs(source.load()), {}))


if __name__ == "__main__":
    main()
