"""Estimate whole models on a virtual Nano's GPU, beside TensorRT's published latencies and the GPU's bounds.

Ours is without a trial, in float32 and float16; TensorRT's is in float16, at twice the rate on a Nano. Models run once
on a virtual GPU, to count their launches and to compare their outputs with ONNX Runtime's; nothing is timed on this
machine. Default budget: 15 minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import _machine
import gpu_models
import numpy as np
import onnx
import onnxruntime

from device_agent.protocol import find_processor
from device_agent.virtual import gpu_time
from farm.artifacts.compile import compile_model
from farm.artifacts.verify import compare
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.models.inputs import InputSpec, make_inputs
from farm.models.zoo import ZOO
from farm.search import gpus, target

BOARD = "jetson-nano"
# Latency in ms, float16, batch 1, clocks at their highest.
SOURCE = "NVIDIA-AI-IOT/torch2trt, benchmarks/JETSON_NANO.md"
PUBLISHED_MS = {"squeezenet1.1": 4.34, "resnet18": 11.4, "resnet50": 29.8, "mobilenet_v2": None, "yolov4-tiny": None}
# The suffix of the graph pipeline and the bytes of a number.
PRECISIONS = {"float32": ("", 4), "float16": ("-fp16", 2)}
# An estimate below this share of TensorRT's latency is implausible.
_LEAST = 2 / 3


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--models", default=",".join(PUBLISHED_MS), help="of these (default)")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="of these (default)")
    options = parser.parse_args()
    if options.quick:
        options.models = "squeezenet1.1"
    with _machine.only_json() as emit, tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        emit("gpu_prices", vars(options), measure(options, Path(folder)))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    code.prepare(folder)
    precisions = options.precisions.split(",")
    rows = [price(name, each, folder) for name in options.models.split(",") for each in precisions]
    return {
        "published": SOURCE,
        "rows": rows,
        "below_a_bound": [
            f"{row['model']} {row['precision']}"
            for row in rows
            if row["price_ms"] < max(row["compute_ms"], row["memory_ms"])
        ],
        "beats_by_more_than_a_third": [row["model"] for row in rows if (row["price_over_published"] or 1) < _LEAST],
    }


def price(name: str, precision: str, folder: Path) -> dict[str, Any]:
    """One model: its estimate at the highest clocks, the time of its FMAs and of its weights alone, and its error."""
    kind, entry = load_board_types()[BOARD], ZOO[name]
    gpu = kind.gpu
    assert gpu is not None
    assert gpu.processors is not None
    assert gpu.memory_bytes_per_s is not None
    suffix, size = PRECISIONS[precision]
    _machine.say(f"{name} in {precision}: compiling")
    config = gpus.to_config(BOARD, code.plan_gpu(kind), target.host_target(2), simulated=True)
    data = entry.build()
    made = compile_model(
        onnx.load_model_from_string(data), entry.input_shapes, config, f"{gpus.PIPELINE}{suffix}", [], None
    )
    inputs = make_inputs([InputSpec(*each, "float32") for each in entry.input_shapes.items()], 0)
    _machine.say(f"{name} in {precision}: running once")
    gpu_time.take_launches()
    given = gpu_models.run(made.library, inputs, BOARD, folder / f"{name}-{precision}.so")
    kernels = gpu_time.sum_up(gpu_time.take_launches(), 1)
    wanted = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, dict(inputs))
    largest = max(float(np.abs(each).max()) for each in wanted)
    facts = {"arch": gpu.arch, "processors": gpu.processors, "memory_bytes_per_s": gpu.memory_bytes_per_s, "stretch": 1}
    gpu_hz = float(max(gpu.freqs_hz))
    seconds, computing, moving = gpu_time.compute_seconds(kernels, facts, gpu_hz, 1.0)
    products = entry.flop / 2
    per_s = find_processor(gpu.arch).lanes * gpu.processors * gpu_hz * 4 / size
    published = PUBLISHED_MS.get(name)
    return {
        "model": name,
        "precision": precision,
        "error": _machine.round_to(compare(given, wanted).max_abs_error / largest, 2),
        "launches": sum(kernel.times for kernel in kernels),
        "price_ms": _machine.round_to(seconds * 1e3),
        "published_ms": published,
        "price_over_published": _machine.round_to(seconds * 1e3 / published, 3) if published else None,
        "compute_ms": _machine.round_to(products / per_s * 1e3),
        "memory_ms": _machine.round_to(size * entry.parameters / gpu.memory_bytes_per_s * 1e3),
        "share_of_peak": _machine.round_to(products / per_s / seconds, 3),
        "slowest": [
            {"kernel": k.name, "times": k.times, "ms_each": _machine.round_to(k.cycles / gpu_hz * 1e3, 3)}
            for k in sorted(kernels, key=lambda k: -k.cycles * k.times)[:8]
        ],
        "busy": {"processors": _machine.round_to(computing, 3), "memory": _machine.round_to(moving, 3)},
    }


if __name__ == "__main__":
    main()
