"""Estimate whole models on virtual boards' GPUs, beside published latencies and the GPU's bounds.

Ours is without a trial. On a Nano, TensorRT's figures are in float16, at twice the rate of float32; on a TX2, TVM's of
2018 are in float32. Models run once on a virtual GPU, to count their launches and to compare their outputs with ONNX
Runtime's; nothing is timed on this machine. Default budget: 20 minutes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _machine
import gpu_models
import numpy as np
import onnx
import onnxruntime

from farm.artifacts.compile import compile_model
from farm.artifacts.verify import compare
from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.models.inputs import InputSpec, make_inputs
from farm.models.onnx_builder import GraphBuilder
from farm.models.zoo import ZOO, ZooModel
from farm.search import gpus, tvm_env
from farm.virtual import gpu_time

# Latency in ms, batch 1, clocks at their highest, None where none is known; by board type and precision.
NANO = dict.fromkeys(("squeezenet1.1", "resnet18", "resnet50", "mobilenet_v2", "yolov4-tiny"))
PUBLISHED_MS: Mapping[tuple[str, str], Mapping[str, float | None]] = {
    ("jetson-nano", "float32"): NANO,
    ("jetson-nano", "float16"): {**NANO, "squeezenet1.1": 4.34, "resnet18": 11.4, "resnet50": 29.8},
    ("jetson-tx2", "float32"): {
        "resnet50": 25.8,
        "mobilenet_v1": 5.1,
        "inception_v3": 45.4,
        "vgg16": 57.2,
        "densenet121": 26.4,
    },
}
SOURCES = {
    "jetson-nano": "NVIDIA-AI-IOT/torch2trt, benchmarks/JETSON_NANO.md",
    "jetson-tx2": "dmlc/tvm, pull request 1892",
}
# The suffix of the graph pipeline and the bytes of a number.
PRECISIONS = {"float32": ("", 4), "float16": ("-fp16", 2)}
# F(6, 3) takes so many times fewer FMAs than a direct 3x3 convolution.
_WINOGRAD = 9 * 36 / 64
# An estimate below this share of the published latency is implausible.
_LEAST = 2 / 3
# Configuration D of arXiv 1409.1556.
_VGG16 = (64, 64, "M", 128, 128, "M", *(256,) * 3, "M", *(512,) * 3, "M", *(512,) * 3, "M")


def mobilenet_v1(g: GraphBuilder, x: str) -> str:
    """MobileNet at width 1.0, 1000 classes (table 1 of arXiv 1704.04861)."""
    x = g.relu(g.batch_norm(g.conv(x, 32, 3, stride=2, pad=1, bias=False)))
    strides = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
    for channels, stride in zip((64, 128, 128, 256, 256, *(512,) * 6, 1024, 1024), strides, strict=True):
        before = g.channels(x)
        x = g.relu(g.batch_norm(g.conv(x, before, 3, stride=stride, pad=1, groups=before, bias=False)))
        x = g.relu(g.batch_norm(g.conv(x, channels, 1, bias=False)))
    return g.dense(g.global_average(x), 1000)


def densenet121(g: GraphBuilder, x: str) -> str:
    """DenseNet-121, 1000 classes (table 1 of arXiv 1608.06993)."""
    x = g.relu(g.batch_norm(g.conv(x, 64, 7, stride=2, pad=3, bias=False)))
    x = g.max_pool(x, 3, stride=2, pad=1)
    for at, layers in enumerate((6, 12, 24, 16)):
        if at:
            x = g.conv(g.relu(g.batch_norm(x)), g.channels(x) // 2, 1, bias=False)
            x = g.average_pool(x, 2, stride=2)
        for _ in range(layers):
            y = g.conv(g.relu(g.batch_norm(x)), 128, 1, bias=False)
            x = g.concat(x, g.conv(g.relu(g.batch_norm(y)), 32, 3, pad=1, bias=False))
    return g.dense(g.global_average(g.relu(g.batch_norm(x))), 1000)


def vgg16(g: GraphBuilder, x: str) -> str:
    """Channels of 3x3 convolutions, and "M" for a pool; 1000 classes."""
    for channels in _VGG16:
        x = g.max_pool(x, 2, stride=2) if isinstance(channels, str) else g.relu(g.conv(x, channels, 3, pad=1))
    x = g.flatten(x, g.channels(x) * 7 * 7)
    for _ in range(2):
        x = g.relu(g.dense(x, 4096, gain=2.0))
    return g.dense(x, 1000)


# Models beside the zoo's, with their parameters and FLOP.
IMAGE, CLASSES = {"data": (1, 3, 224, 224)}, {"scores": (1, 1000)}
MORE = {
    "mobilenet_v1": ZooModel("mobilenet_v1", "", IMAGE, CLASSES, 4_231_976, 1_137_480_704, mobilenet_v1),
    "vgg16": ZooModel("vgg16", "", IMAGE, CLASSES, 138_357_544, 30_940_528_640, vgg16),
    "densenet121": ZooModel("densenet121", "", IMAGE, CLASSES, 7_978_856, 5_668_317_184, densenet121),
}


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--boards", default=",".join(SOURCES), help="of these board types (default)")
    parser.add_argument("--models", default="", help="of those with a published latency (default: all)")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="of these (default)")
    options = parser.parse_args()
    if options.quick:
        options.boards, options.models, options.precisions = "jetson-nano", "squeezenet1.1", "float32"
    with _machine.only_json() as emit:
        emit("gpu_prices", vars(options), measure(options))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for board in options.boards.split(","):
        wanted = [
            (name, precision)
            for precision in options.precisions.split(",")
            for name in PUBLISHED_MS.get((board, precision), ())
            if not options.models or name in options.models.split(",")
        ]
        # A process has one virtual GPU.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            rows += pool.submit(price_all, board, wanted).result()
    return {
        "published": SOURCES,
        "rows": rows,
        "below_a_bound": [
            f"{row['board']} {row['model']} {row['precision']}"
            for row in rows
            if row["price_ms"] < max(row["compute_ms"] / _WINOGRAD, row["memory_ms"])
        ],
        "beats_by_more_than_a_third": [row["model"] for row in rows if (row["price_over_published"] or 1) < _LEAST],
    }


def price_all(board: str, wanted: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """All models of a board type, in this process."""
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        code.prepare(Path(folder))
        return [price(board, *each, Path(folder)) for each in wanted]


def price(board: str, name: str, precision: str, folder: Path) -> dict[str, Any]:
    """One model: its estimate at the highest clocks, the time of its FMAs and of its weights alone, and its error."""
    kind, entry = load_board_types()[board], {**ZOO, **MORE}[name]
    suffix, size = PRECISIONS[precision]
    _machine.say(f"{board}: {name} in {precision}")
    config = gpus.to_config(board, code.plan_gpu(kind), tvm_env.host_target(2), simulated=True)
    data = entry.build()
    made = compile_model(
        onnx.load_model_from_string(data), entry.input_shapes, config, f"{gpus.PIPELINE}{suffix}", [], None
    )
    inputs = make_inputs([InputSpec(*each, "float32") for each in entry.input_shapes.items()], 0)
    gpu_time.take_launches()
    given = gpu_models.run(made.library, inputs, board, folder / f"{name}-{precision}.so")
    kernels = gpu_time.sum_up(gpu_time.take_launches(), 1)
    wanted = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, dict(inputs))
    largest = max(float(np.abs(each).max()) for each in wanted)
    facts, gpu_hz = gpu_models.describe(board)
    seconds, computing, moving = gpu_time.compute_seconds(kernels, facts, gpu_hz, 1.0)
    products = entry.flop / 2
    per_s = gpu_models.count_peak(board) / 2 * 4 / size
    published = PUBLISHED_MS[board, precision][name]
    return {
        "board": board,
        "model": name,
        "precision": precision,
        "error": _machine.round_to(compare(given, wanted).max_abs_error / largest, 2),
        "launches": sum(kernel.times for kernel in kernels),
        "price_ms": _machine.round_to(seconds * 1e3),
        "published_ms": published,
        "price_over_published": _machine.round_to(seconds * 1e3 / published, 3) if published else None,
        "compute_ms": _machine.round_to(products / per_s * 1e3),
        "memory_ms": _machine.round_to(size * entry.parameters / facts["memory_bytes_per_s"] * 1e3),
        "share_of_peak": _machine.round_to(products / per_s / seconds, 3),
        "slowest": [
            {"kernel": k.name, "times": k.times, "ms_each": _machine.round_to(k.cycles / gpu_hz * 1e3, 3)}
            for k in sorted(kernels, key=lambda k: -k.cycles * k.times)[:8]
        ],
        "busy": {"processors": _machine.round_to(computing, 3), "memory": _machine.round_to(moving, 3)},
    }


if __name__ == "__main__":
    main()
