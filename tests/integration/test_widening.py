"""Models in float16 are computed in float32 for cores without arithmetic on float16."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.search import tvm_env
from farm.search.graph import bindings, half_precision, importer, pipelines
from tests.integration.onnx_graphs import random, run_onnx_runtime

tvm = tvm_env.load()
from tvm import relax  # noqa: E402

VALUES = {"x": random(2, 4).astype("float16")}


def value(name: str, kind: int, *shape: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape) or None)


@functools.cache
def make_model() -> onnx.ModelProto:
    """Weights in float16, a loop that carries float16, a cast that overflows, and a weight that is an output."""
    half, wide = TensorProto.FLOAT16, TensorProto.FLOAT
    step = helper.make_graph(
        [
            helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.array(1.5, "float16"))),
            helper.make_node("Mul", ["last", "k"], ["grown"]),
            helper.make_node("Add", ["grown", "x"], ["next"]),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "step",
        [value("i", TensorProto.INT64, 1), value("go", TensorProto.BOOL, 1), value("last", half, 2, 4)],
        [value("on", TensorProto.BOOL, 1), value("next", half, 2, 4)],
    )
    for each in (*step.input[:2], *step.output[:1]):
        each.type.tensor_type.shape.Clear()
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Loop", ["times", "true", "m"], ["y"], body=step),
        helper.make_node("Cast", ["large"], ["cut"], to=half),
        helper.make_node("Cast", ["cut"], ["z"], to=wide),
    ]
    weights = {
        "w": random(4, 4).astype("float16"), "held": random(3).astype("float16"),
        "times": np.array(2, "int64"), "true": np.array(True),
    }  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "halves",
        [value("x", half, 2, 4), value("large", wide, 2)],
        [
            value("y", half, 2, 4),
            value("z", wide, 2),
            value("held", half, 3),
            helper.make_empty_tensor_value_info("cut"),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def import_for(mtriple: str, mcpu: str) -> Any:
    config = {"kind": "llvm", "mtriple": mtriple, "mcpu": mcpu, "num-cores": 1}
    with tvm_env.make_target(config):
        return importer.import_onnx(make_model(), {"x": (2, 4), "large": (2,)})


def list_types(module: Any) -> set[str]:
    """The types of sums and products."""
    return {
        str(binding.var.ty.dtype.dtype)
        for _, function in bindings.list_functions(module)
        for binding in bindings.list_bindings(function)
        if any(bindings.is_call(binding.value, f"relax.{name}") for name in ("add", "multiply", "matmul"))
    }


@pytest.mark.parametrize(
    ("mtriple", "mcpu", "kind"),
    [
        ("aarch64-linux-gnu", "cortex-a72", "float32"),
        ("x86_64-linux-gnu", "znver4", "float32"),
        ("aarch64-linux-gnu", "cortex-a76", "float16"),
        ("x86_64-linux-gnu", "sapphirerapids", "float16"),
    ],
)
def test_arithmetic_is_on_what_the_core_can_add(mtriple: str, mcpu: str, kind: str) -> None:
    module = import_for(mtriple, mcpu)
    assert list_types(module) == {kind}
    assert [str(each.ty.dtype.dtype) for each in module["main"].params] == ["float16", "float32"]


def test_widened_models_compute_what_onnx_runtime_computes() -> None:
    """Types of inputs and outputs stay. A cast to float16 still overflows."""
    config = tvm_env.host_target(1)
    host = tvm_env.make_target(config)
    module, _ = pipelines.prepare(import_for("x86_64-linux-gnu", "znver4"), host, pipelines.require_pipeline("graph/2"))
    executable = tvm.compile(pipelines.finish(module, host, None, pipelines.require_pipeline("graph/2")), target=host)
    values = VALUES | {"large": np.array([1e5, 0.1], "float32")}
    found = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, values.values()))
    for ours, theirs in zip(found, run_onnx_runtime(make_model(), values), strict=True):
        assert ours.numpy().dtype == theirs.dtype
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=2e-3, atol=2e-3)


def test_bits_are_not_widened() -> None:
    """A model that reads the bits of float16 keeps them."""
    model = make_model()
    model.graph.node.append(helper.make_node("BitCast", ["held"], ["bits"], to=TensorProto.UINT16))
    with_bits = half_precision.needs_widening(
        model.graph, tvm_env.make_target({"kind": "llvm", "mtriple": "riscv64-linux-gnu"})
    )
    assert not with_bits
