"""Winograd convolutions on a virtual GPU: right results without races, for sizes that nothing divides; the choice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from farm.gpu import code
from farm.inventory.board_types import load_board_types
from farm.search import gpus, traces, tvm_env, workloads
from farm.search.codegen import lowering
from farm.search.families import rule
from farm.search.families.winograd import count_direct_flop
from farm.search.graph import half_precision, pipelines, winograd
from farm.search.graph.pipelines import PIPELINES
from farm.search.graph.winograd import Padding, Shape
from tests.integration.test_gpu_families import _RUN
from tests.integration.test_winograd import ONES, convolve, error_of, make_data

tvm = tvm_env.load()

HOST = tvm_env.host_target(2)
NANO = gpus.to_config("jetson-nano", code.plan_gpu(load_board_types()["jetson-nano"]), HOST, simulated=True)
# m, the shape of the data, channels, padding, type.
CASES: list[tuple[int, Shape, int, Padding, str]] = [
    (2, (1, 8, 8, 3), 5, (0, 0, 0, 0), "float32"),
    (2, (2, 9, 10, 8), 8, ONES, "float32"),
    (2, (1, 14, 14, 16), 24, ONES, "float32"),
    (4, (1, 13, 11, 12), 20, ONES, "float32"),
    (4, (2, 7, 9, 20), 20, ONES, "float32"),
    (4, (1, 12, 17, 8), 7, (0, 1, 2, 1), "float32"),
    (6, (1, 15, 15, 16), 16, ONES, "float32"),
    (2, (1, 9, 7, 16), 24, ONES, "float16"),
    (4, (1, 9, 9, 8), 8, ONES, "float16"),
]


def make_function(m: int, shape: Shape, channels: int, padding: Padding, dtype: str) -> tuple[Any, dict[str, Any]]:
    """The workload of a convolution with bias, where shapes allow a residual, and ReLU; its other arguments by name."""
    from tvm import relax

    data, weights = (each.astype(dtype) for each in make_data(shape, channels))
    bias = np.linspace(-1, 1, channels, dtype=dtype).reshape(1, 1, 1, channels)
    expected = convolve(data, weights, padding) + bias
    x = relax.Var("x", relax.TensorType(shape, dtype))
    block = relax.BlockBuilder()
    with block.function("main", [x]):
        with block.dataflow():
            layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
            made = block.emit(relax.op.nn.conv2d(x, relax.const(weights), padding=list(padding), **layouts))
            made = block.emit(relax.op.add(made, relax.const(bias)))
            if expected.shape == shape:
                made = block.emit(relax.op.add(made, x))
                expected += data
            made = block.emit_output(relax.op.nn.relu(made))
        block.emit_func_output(made)
    made = winograd.use_winograd(lambda *_: m, half_precision.make_for(gpus.unit_of(NANO)))(block.get())
    module, used = pipelines.prepare(made, tvm_env.make_target(NANO), PIPELINES[gpus.PIPELINE])
    [workload] = workloads.extract(module, tvm_env.make_target(NANO), NANO, used.name)
    assert f"winograd{m}_conv2d_add" in workload.name
    arguments = [data, winograd.transform_weights(weights, m), bias]
    result = np.zeros(expected.shape, dtype)
    return tvm.ir.load_json(workload.module_json), {
        "arguments": [*arguments, result],
        "expected": np.maximum(expected, 0),
        "flop": workload.flop,
    }


def schedule(module: Any, place: float) -> Any:
    """The function by a plan, its trace gone through JSON."""
    outlook = rule.read_outlook(module, gpus.unit_of(NANO))
    assert outlook.family.name == "gpu-winograd"
    plans = outlook.plans()
    once, again = (tvm.s_tir.Schedule(module, error_render_level="none") for _ in range(2))
    outlook.apply(once, plans[int(place * (len(plans) - 1))][1])
    tvm.s_tir.schedule.Trace.apply_json_to_schedule(once.trace.as_json(), again)
    traces.finish(again, traces.make_context(module, tvm_env.make_target(NANO)))
    return again.mod["main"]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The error of each case's first plan and of a drawn one, each relative to the result."""
    folder = tmp_path_factory.mktemp("winograd")
    kernels, expected = {}, {}
    for number, case in enumerate(CASES):
        module, made = make_function(*case)
        assert made["flop"] == count_direct_flop(module) == 18 * case[1][3] * made["expected"].size
        np.savez(folder / f"case{number}.npz", *made["arguments"])
        for label, place in (("first", 0.0), ("drawn", random.Random(number).random())):
            name = f"case{number}_{label}"
            kernels[name] = schedule(module, place).with_attr("global_symbol", name)
            expected[name] = made["expected"]
    built = lowering.build_candidate(tvm.ir.save_json(tvm.IRModule(kernels)), NANO, standalone=True)
    (folder / "kernels.so").write_bytes(built)
    code.prepare(folder)
    command = [sys.executable, "-c", _RUN, str(code.find_folder(folder)), str(folder), json.dumps(list(kernels))]
    environment = {**os.environ, "TVM_FARM_VIRTUAL_GPU": "prove=1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return {name: error_of(np.load(folder / f"{name}.npy").reshape(e.shape), e) for name, e in expected.items()}


@pytest.mark.parametrize("label", ["first", "drawn"])
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "F({}, 3) {}>{} {} {}".format(*CASES[number]))
def test_the_convolution_is_computed(number: int, label: str, errors: dict[str, float]) -> None:
    """Batches, tiles that reach over the end, odd channels, paddings, and what is fused; `prove` finds no race."""
    assert errors[f"case{number}_{label}"] < (1e-5 if CASES[number][-1] == "float32" else 1e-2)


def test_the_choice_follows_the_prediction() -> None:
    """A Nano gains from large tiles; few pixels are bound by weights, few inputs by transforms; exact is F(2, 3)."""
    unit = gpus.unit_of(NANO)
    choose, exact = half_precision.choose_winograd(unit), half_precision.choose_winograd(unit, exact=True)
    assert choose((1, 56, 56, 64), 64, ONES, "float32") in (4, 6)
    assert choose((1, 14, 14, 256), 256, ONES, "float32") == 4
    assert exact((1, 28, 28, 128), 128, ONES, "float32") == 2
    assert choose((1, 7, 7, 512), 512, ONES, "float32") in (0, 2)
    assert choose((1, 112, 112, 3), 32, ONES, "float32") == 0
