"""Models in 8 bits against float32: the farm's code and ONNX Runtime's, all four in turns.

Calibrated on random inputs, which is all that latency needs. A ratio below 1 says that the first named is the faster
one. `--trials 0` is what the farm compiles when it has measured nothing. Default budget: about 2 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from typing import Any

import _farm
import _machine

import farm.settings
from device_agent.protocol import Engine
from farm.artifacts import given_model
from farm.inventory.board_types import require_board_type
from farm.models import quantise

EXAMPLES = 8
PAIRS = (("int8", "float32"), ("int8", "onnxruntime int8"), ("onnxruntime int8", "onnxruntime float32"))


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default="resnet18", help="zoo names or ONNX files (default: resnet18)")
    parser.add_argument("--trials", type=int, default=0, help="per model (default: 0, nothing is measured)")
    parser.add_argument("--runs", type=int, default=100, help="timed runs of each program (default: 100)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    options = parser.parse_args()
    if options.quick:
        options.models, options.runs = "tiny-cnn", 8
    with _machine.only_json() as emit, _machine.scratch():
        emit("quantised", vars(options), measure(options))


def measure(options: Any) -> dict[str, Any]:
    settings = farm.settings.load()
    models = [_farm.read_model(name) for name in options.models.split(",")]
    made = {model.source.name: quantised(model) for model in models}
    built = {}
    with _farm.builder(settings, require_board_type("local"), options.trials) as build:
        for model in models:
            name = model.source.name
            built[name] = (build(model), build(made[name][0]))
            _machine.say(f"{name}: {built[name][1].summary}")
    rows = []
    with _farm.quiet_board(settings) as session:
        quiet = _machine.wait_until_quiet(options.quick)
        for model in models:
            name = model.source.name
            small, losses = made[name]
            row: dict[str, Any] = {
                "name": name,
                "loss": losses,
                "compiled": dict(built[name][1].summary),
                "threads": {},
            }
            for count in (int(text) for text in options.threads.split(",")):
                floats, bytes_ = (each.library for each in built[name])
                programs = {
                    "float32": _farm.Program(Engine.RELAX_VM, floats, count),
                    "int8": _farm.Program(Engine.RELAX_VM, bytes_, count),
                    "onnxruntime float32": _farm.Program(Engine.ONNXRUNTIME, model.source.onnx_bytes, count),
                    "onnxruntime int8": _farm.Program(Engine.ONNXRUNTIME, small.source.onnx_bytes, count),
                }
                timed = _farm.time_in_turns(session, settings, model, programs, options.runs)
                medians = {each: statistics.median(timing.samples) for each, timing in timed.items()}
                row["threads"][str(count)] = {
                    "latency_ms": {each: _machine.spread(timing.samples, 1e3) for each, timing in timed.items()},
                    "ratio": {f"{a} / {b}": _machine.round_to(medians[a] / medians[b], 3) for a, b in PAIRS},
                }
                _machine.say(f"{name}, {count} threads: {row['threads'][str(count)]['ratio']}")
            rows.append(row)
    return {"machine_quiet": quiet, "models": rows}


def quantised(model: _farm.Model) -> tuple[_farm.Model, list[dict[str, Any]]]:
    """The model in 8 bits, and what its outputs lost."""
    done = quantise.quantise(model.source, given_model.read_calibration(given_model.RANDOM, model.inputs, EXAMPLES))
    digest = hashlib.sha256(done.onnx_bytes).hexdigest()
    source = dataclasses.replace(model.source, onnx_bytes=done.onnx_bytes, sha256=digest)
    return _farm.Model(source, model.inputs), [dataclasses.asdict(loss) for loss in done.losses]


if __name__ == "__main__":
    main()
