"""Estimate whole models on an emulated board, on one and four cores, beside the cores' peak.

Models are compiled by prediction alone and run once in the emulator, with every memory access followed. Their outputs
are compared with ONNX Runtime's. `floor` is the time of the model's FMAs at the cores' peak, direct algorithm, int8
counted as float32: an estimate below half of it is an error of the model. Errors are relative to the largest output in
float32. ncnn's published latencies on the same board are of another program: they give the order of magnitude.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import _farm
import _machine
import onnxruntime
from quantised import quantised

from device_agent.board_types import load_board_types
from device_agent.protocol import Engine, Limits, RunSpec, count_seconds
from farm import emulation, settings
from farm.artifacts.compile import compile_model
from farm.artifacts.verify import compare
from farm.inventory.board_types import BoardType, require_board_type
from farm.models.inputs import make_inputs
from farm.search import cores, tvm_env
from farm.search.graph import pipelines
from farm.virtual.agent import VirtualRig
from farm.virtual.emulated.runs import Execution, collect

BOARD_TYPE, MODELS, THREADS = "jetson-nano", "squeezenet1.1,mobilenet_v2,resnet18", (1, 4)
# Tencent/ncnn, benchmark/README.md, "NVIDIA Jetson Nano": ms, by threads.
NCNN_MS = {"squeezenet1.1": {1: 77.3, 4: 29.0}, "mobilenet_v2": {1: 88.7}, "resnet18": {1: 202.5}}
_TIMES = 2
# Functions that are listed.
_LONGEST = 12
# Weights beside those of `farm model compile --weights`.
BYTES = "int8"


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=MODELS, help=f"zoo names or ONNX files (default: {MODELS})")
    parser.add_argument("--board-type", default=BOARD_TYPE, help=f"(default: {BOARD_TYPE})")
    ways = ",".join((*pipelines.KNOWN, BYTES))
    parser.add_argument(
        "--weights", default=pipelines.FLOAT32, help=f"of {ways}: as `farm model` takes them, or 8 bits"
    )
    options = parser.parse_args()
    if options.quick:
        options.models = "tiny-cnn"
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("emulated_price", vars(options), measure(options, folder))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tvm_env.load()
    loaded = settings.load()
    natives = emulation.prepare(dataclasses.replace(loaded, home=str(folder)))
    assert natives is not None
    with VirtualRig() as rig:
        emulator = rig.start_emulator(natives, load_board_types()[options.board_type].clusters)
        assert emulator is not None
        models = [
            measure_model(name, weights, require_board_type(options.board_type), emulator)
            for name in options.models.split(",")
            for weights in options.weights.split(",")
        ]
    return {"board_type": options.board_type, "core": emulator.core["name"], "models": models}


def measure_model(name: str, weights: str, kind: BoardType, emulator: Any) -> dict[str, Any]:
    floats = model = _farm.read_model(name)
    if weights == BYTES:
        model, _ = quantised(model)
    else:
        kind = pipelines.store_weights(kind, weights)
    assert kind.target is not None
    compiled = compile_model(
        model.source.load(), model.shapes, kind.target.to_tvm(), kind.pipeline, (), kind.link_triple
    )
    values = make_inputs(model.inputs, 0)
    wanted = onnxruntime.InferenceSession(floats.source.onnx_bytes).run(None, dict(values))
    core = cores.core_of(kind.target.to_tvm())
    # An FMA is two operations, on four numbers in float32.
    peak = 2 * core.fma_per_cycle(core.vector_bits) * core.lanes(2 if weights == pipelines.FP16 else 4)
    hz = float((kind.clusters[0].freqs_hz or (core.freq_hz,))[-1])
    operations = sum(each.workload.flop * each.workload.weight for each in compiled.served)
    rows = []
    for threads in THREADS:
        took_s, seen = [], []
        for _ in range(_TIMES):
            began = time.perf_counter()
            spec = RunSpec(Engine.RELAX_VM, limits=Limits(memory_bytes=8 << 30))
            program = Execution(
                dataclasses.replace(emulator, tasks=threads, kept=None), spec, compiled.library, [values]
            )
            outputs = collect(program.run())
            took_s.append(time.perf_counter() - began)
            seen.append(tuple(program.count()))
        base_s, _ = count_seconds(seen[0], emulator.core, hz, threads)
        verdict = compare(outputs, wanted)
        # At the core's usual clock.
        spent = {name: _machine.round_to(took * 1e3) for name, (_, took) in program.profile().items()}
        longest = sorted(spent.items(), key=lambda pair: -pair[1])
        rows.append(
            {
                "threads": threads,
                "price_ms": base_s * 1e3,
                "floor_ms": operations / peak / threads / hz * 1e3,
                "ncnn_published_ms": NCNN_MS.get(name, {}).get(threads) if kind.name == BOARD_TYPE else None,
                "same_every_time": all(each == seen[0] for each in seen),
                "largest_error": verdict.max_rel_error,
                "rms_error": verdict.rms_rel_error,
                "host_s": statistics.median(took_s),
                "longest_ms": dict(longest[:_LONGEST]),
            }
        )
        _machine.say(f"{name} {weights} {threads}: {rows[-1]}")
    return {"model": name, "weights": weights, "rows": rows}


if __name__ == "__main__":
    main()
