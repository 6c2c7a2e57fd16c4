"""Workloads of real models, and the search over one of them: what it proposes, remembers and learns."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import numpy as np
import onnx
import pytest
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from farm.models import inputs as model_inputs
from farm.models import source
from farm.search import tvm_env, workloads
from farm.search.codegen import lowering
from farm.search.graph import importer, pipelines
from farm.search.tuners.decisions import Candidate
from farm.values import Workload, operator_kind
from tests.integration.one_search import OneSearch

tvm = tvm_env.load()

ROOT = pathlib.Path(__file__).parents[2]
# One fixed target, so that hashes are the same wherever the tests run.
TARGET = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
_PRINT_HASHES = """
from tests.integration.test_search import extract
from farm.models import source
print([w.hash for w in extract(source.resolve_model("tiny-cnn").load())])
"""
_LOAD = """
import gc, inspect, tvm_ffi.registry
before = inspect.getmodule, tvm_ffi.registry.list_global_func_names, gc.isenabled()
from farm.search import tvm_env
tvm_env.load()
assert before == (inspect.getmodule, tvm_ffi.registry.list_global_func_names, gc.isenabled())
"""
_DESCRIBE = """
import sys
from farm.campaign.plan_models import survey_model
from farm.inventory.board_types import require_board_type
from farm.models.inputs import read_inputs
from farm.models.source import resolve_model
from farm.search.traces import describe_default
source = resolve_model("mlp")
workloads, _ = survey_model(source, read_inputs(source.load()), require_board_type("jetson-nano"))
assert {describe_default(each) for each in workloads} == {"dense"}
print(*(name for name in ("x86", "arm_cpu") if f"tvm.s_tir.tensor_intrin.{name}" in sys.modules))
"""


def extract(model: onnx.ModelProto, pipeline_name: str = "graph/2-nchw") -> list[Workload]:
    compile_target = tvm_env.make_target(TARGET)
    shapes = {spec.name: spec.static_shape for spec in model_inputs.read_inputs(model)}
    module, used = pipelines.prepare(
        importer.import_onnx(model, shapes), compile_target, pipelines.require_pipeline(pipeline_name)
    )
    return workloads.extract(module, compile_target, TARGET, used.name)


@pytest.fixture(scope="module")
def tiny_cnn() -> list[Workload]:
    """The workloads of the zoo's tiny-cnn."""
    return extract(source.resolve_model("tiny-cnn").load())


@pytest.fixture(scope="module")
def conv(tiny_cnn: list[Workload]) -> Workload:
    return tiny_cnn[0]


def made_up_latency(candidate: Candidate) -> float:
    return 1e-4 * (1 + int(candidate.hash[:4], 16) / 65536)


# Workloads


def test_names_say_what_is_done_to_what(tiny_cnn: list[Workload]) -> None:
    """Operators, kernel, stride and sizes; no counters; every name once. Without layout conversion the kernel is found
    in the second and third dimension of OIHW.
    """
    names = {w.name: w.kind for w in tiny_cnn}
    assert len(names) == len(tiny_cnn)
    assert names["conv2d_add_relu 3x3 3x16x16>8"] == "conv2d"
    assert names["conv2d_add_relu 3x3/2 8x8x8>16"] == "conv2d"
    assert names["depthwise_conv2d_add_relu 3x3 8x8x8>8"] == "depthwise_conv2d"
    assert names["matmul_add 16>10"] == "dense"
    assert names["max_pool2d 8x16x16>8x8x8"] == "max_pool2d"
    names = [w.name for w in extract(source.resolve_model("tiny-cnn").load(), "graph/2")]
    assert "max_pool2d 16x16x8>8x8x8" in names


@pytest.mark.parametrize(
    ("function", "shapes", "name"),
    [
        ("fused_conv2d4_add1_relu11", [(1, 9, 9, 4), (3, 3, 4, 8), (1, 1, 1, 8), (1, 9, 9, 8)], "3x3 9x9x4>8"),
        ("conv2d_add", [(2, 9, 9, 4), (1, 1, 4, 8), (1, 1, 1, 8), (2, 9, 9, 8)], "1x1 2x9x9x4>8"),
        ("fused_matmul2", [(7, 16), (16, 4), (7, 4)], "7x16>4"),
        ("softmax1", [(1, 10), (1, 10)], "10"),
        ("add", [(), ()], "scalar"),
        ("fused_dots_conv2d_cast", [(1, 8, 8, 4), (3, 3, 1, 8, 4), (1, 8, 8, 8)], "3x3 8x8x4>8"),
        ("fused_dots_conv2d_cast", [(1, 8, 8, 4), (2, 3, 3, 1, 4, 4), (1, 8, 8, 8)], "3x3 8x8x4>8"),
        ("fused_transpose3_conv2d1", [(1, 3, 12, 14), (3, 3, 3, 8), (1, 6, 7, 8)], "3x3/2 3x12x14>8"),
    ],
)
def test_a_name_from_a_function(function: str, shapes: list[tuple[int, ...]], name: str) -> None:
    """TVM's function names and argument shapes, and what the table shows for them."""
    assert workloads.readable_name(function, shapes, "HWIO").partition(" ")[2] == name


@pytest.mark.parametrize(
    ("function", "source", "kernel", "name"),
    [
        ("conv2d_relu", (1, 9, 9, 8), (3, 3, 1, 8), "depthwise_conv2d_relu 3x3 9x9x8>8"),
        ("transpose_conv2d_add", (1, 8, 9, 9), (3, 3, 1, 8), "transpose_depthwise_conv2d_add 3x3 8x9x9>8"),
        (
            "mirror_pad_transpose2_conv2d",
            (1, 8, 7, 7),
            (3, 3, 1, 16),
            "mirror_pad_transpose_depthwise_conv2d 3x3 8x7x7>16",
        ),
        ("pad_conv2d", (1, 7, 7, 8), (3, 3, 1, 8), "pad_depthwise_conv2d 3x3 7x7x8>8"),
        ("transpose_conv2d", (1, 1, 9, 9), (3, 3, 1, 8), "transpose_conv2d 3x3 1x9x9>8"),
        ("conv2d", (1, 9, 9, 1), (3, 3, 1, 8), "conv2d 3x3 9x9x1>8"),
        ("transpose_conv2d", (1, 8, 9, 9), (3, 3, 4, 8), "transpose_conv2d 3x3 8x9x9>8"),
    ],
)
def test_what_computes_is_named_behind_what_moves(
    function: str, source: tuple[int, ...], kernel: tuple[int, ...], name: str
) -> None:
    """A depthwise convolution is called so wherever its data come from, and `ops` finds it; one channel makes none."""
    made = workloads.readable_name(function, [source, kernel, (1, 9, 9, kernel[3])], "HWIO")
    assert made == name
    assert operator_kind(made) == ("depthwise_conv2d" if "depthwise" in name else "conv2d")


def test_a_depthwise_convolution_that_ends_in_another_form_is_named() -> None:
    """What follows it may change how many dimensions there are."""
    shapes = [(1, 8, 9, 9), (3, 3, 1, 8), (1, 81, 8)]
    assert workloads.readable_name("transpose_conv2d_reshape", shapes, "HWIO") == (
        "transpose_depthwise_conv2d_reshape 8x9x9>81x8"
    )


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("fused_transpose_dots_conv2d1_cast_multiply2_add_maximum_minimum_cast1", "transpose_int8_conv2d_quantize"),
        ("fused_dots_conv2d1_cast_multiply2_add_maximum_minimum_cast1", "int8_conv2d_quantize"),
        ("fused_conv2d_cast_multiply_add_maximum_minimum_cast", "int8_conv2d_quantize"),
        ("fused_dots_matmul_cast_multiply_add", "int8_matmul_multiply_add"),
        ("fused_cast_subtract_multiply_mean", "dequantize_mean"),
        ("fused_conv2d_add_cast", "conv2d_add_cast"),
    ],
)
def test_names_of_bytes_are_short(function: str, name: str) -> None:
    """What scales to and from bytes has a word of its own, and int8 dot products say so."""
    assert workloads.readable_name(function, [(1, 8), (1, 8)], "HWIO").partition(" ")[0] == name


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(1, 99), max_size=4).map(tuple), min_size=2, max_size=4), st.integers(0, 99))
def test_every_function_gets_a_name(shapes: list[tuple[int, ...]], counter: int) -> None:
    """There is a name for any shapes, and TVM's counter is not in its first word."""
    for function in ("conv2d", "matmul", "softmax"):
        first, _, rest = workloads.readable_name(f"{function}{counter}", shapes, "OIHW").partition(" ")
        assert first.endswith(function)
        assert rest


def test_weights_and_flop_are_counted() -> None:
    """Two equal convolutions are one workload of weight 2, with 2 * H * W * K * K * Cin * Cout operations and more."""
    weight = np.random.default_rng(0).standard_normal((8, 8, 3, 3)).astype("float32")
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 8, 10, 10]) for n in "xy"]
    tensors = [numpy_helper.from_array(weight, "w1"), numpy_helper.from_array(2 * weight, "w2")]
    graph = helper.make_graph(nodes, "twice", values[:1], values[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    heaviest = extract(model)[0]
    assert (heaviest.name, heaviest.weight) == ("conv2d_relu 3x3 8x10x10>8", 2)
    assert heaviest.flop == pytest.approx(2 * 10 * 10 * 9 * 8 * 8, rel=0.1)


def test_hashes_are_the_same_in_every_process(tiny_cnn: list[Workload]) -> None:
    """A fresh interpreter with another hash seed finds the same workloads: records are found again."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", _PRINT_HASHES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert done.stdout.strip() == str([w.hash for w in tiny_cnn])


def test_the_compiler_is_loaded_whatever_the_environment_asks() -> None:
    """A user's shell, or an agent's, may ask for TVM's runtime alone; and a user's process is left as it was."""
    command = [sys.executable, "-c", _LOAD]
    subprocess.run(command, timeout=120, env=os.environ | {"TVM_USE_RUNTIME_LIB": "1"}, check=True)


def test_a_default_schedule_loads_its_targets_intrinsics() -> None:
    """Those of other processors take a quarter of a second that `farm model show` does not spend."""
    done = subprocess.run([sys.executable, "-c", _DESCRIBE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.split(), done.stderr) == (["arm_cpu"], "")


def test_a_hash_holds_target_and_pipeline(conv: Workload) -> None:
    """The same function for another CPU, or another graph pipeline, is another workload."""
    module = tvm.ir.load_json(conv.module_json)
    assert workloads.workload_hash(module, TARGET, "graph/2-nchw") == conv.hash
    others = {
        workloads.workload_hash(module, {**TARGET, "mcpu": "x86-64-v4"}, "graph/2"),
        workloads.workload_hash(module, TARGET, "graph/2"),
    }
    assert len(others | {conv.hash}) == 3


# Names


def rows(depth: int) -> list[Workload]:
    """The mean of rows behind some dense layers, which decide what TVM calls its blocks."""
    values = ["x", *(f"v{i}" for i in range(depth)), "y"]
    nodes = [helper.make_node("MatMul", [values[i], "w"], [values[i + 1]]) for i in range(depth)]
    nodes.append(helper.make_node("ReduceMean", [values[depth]], ["y"], axes=[1]))
    weight = numpy_helper.from_array(np.full((32, 32), 0.01, "float32"), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 32] if name == "x" else None) for name in "xy"]
    graph = helper.make_graph(nodes, "rows", ends[:1], ends[1:], [weight])
    return extract(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8))


def test_equal_workloads_of_different_models_are_the_same_text() -> None:
    """TVM names blocks and buffers after a model's values; nothing of that is left, and the hash is fixed."""
    one, other = ({w.name: w for w in rows(depth)} for depth in (1, 3))
    assert one["mean 8x32>8x1"] == other["mean 8x32>8x1"]
    assert "lv" not in one["mean 8x32>8x1"].module_json
    assert one["mean 8x32>8x1"].hash == "2d87e211dc7b1426"


def test_names_of_a_script_do_not_reach_the_trace() -> None:
    """Dumped from a function with names of its own, a trace fits the one with canonical names, and the other way."""
    [mean] = [w for w in rows(1) if w.name.startswith("mean")]
    named = mean.module_json.replace('"block_0"', '"lv7_red"').replace('"block_1"', '"T_divide"')
    theirs = OneSearch(dataclasses.replace(mean, module_json=named))
    ours = OneSearch(mean)
    for candidate in theirs.propose(4):
        assert "lv7_red" not in candidate.trace_json
        for search in (ours, theirs):
            replayed = tvm.ir.load_json(search.replay(candidate.trace_json))
            assert tvm_ffi.structural_equal(replayed, tvm.ir.load_json(candidate.module_json))


# Search


def test_a_candidate_is_proposed_once(conv: Workload) -> None:
    """Over rounds with good, failed and forgotten candidates no hash comes twice."""
    search = OneSearch(conv)
    seen: list[str] = []
    for _ in range(4):
        candidates = search.propose(6)
        assert 0 < len(candidates) <= 6
        seen += [c.hash for c in candidates]
        search.forget(candidates[-1].hash)
        search.observe([(c.hash, None if i == 1 else made_up_latency(c)) for i, c in enumerate(candidates[:-1])])
    assert len(seen) == len(set(seen))


def test_without_a_trace_there_is_the_unscheduled_function(conv: Workload) -> None:
    """That is what a workload without a record is compiled to where no family knows it."""
    assert OneSearch(conv).replay("") == conv.module_json


def test_unknown_results_are_ignored(conv: Workload) -> None:
    """Results of candidates that this search never proposed change nothing in what it proposes."""
    search, other = OneSearch(conv), OneSearch(conv)
    search.observe([("0" * 16, 1.0)])
    search.forget("0" * 16)
    assert [c.hash for c in search.propose(4)] == [c.hash for c in other.propose(4)]


def test_a_proposed_candidate_builds_and_computes(tiny_cnn: list[Workload], tmp_path: pathlib.Path) -> None:
    """A scheduled dense layer, built with its weights packed inside, gives NumPy's result."""
    [dense] = [w for w in tiny_cnn if w.name == "matmul_add 16>10"]
    [candidate] = OneSearch(dense).propose(1)
    path = tmp_path / "candidate.so"
    path.write_bytes(lowering.build_candidate(candidate.module_json, TARGET, standalone=True))
    function = tvm.runtime.load_module(str(path))["main"]
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape, dtype in dense.arguments]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    function(*tensors)
    x, w, b, _ = arrays
    assert np.abs(tensors[-1].numpy() - (x @ w + b)).max() < 1e-4
