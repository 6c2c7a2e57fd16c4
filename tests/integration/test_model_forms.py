"""The forms in which models come: every opset from 11 to 21, open dimensions, weights in other files."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from farm.models import inputs as model_inputs
from farm.models import source, zoo
from farm.models.quantise import open_session
from farm.search import tvm_env
from farm.search.graph import importer, pipelines
from tests.integration.onnx_graphs import make_model, node, random

tvm = tvm_env.load()

HOST = tvm_env.make_target(tvm_env.host_target(1))
PLAIN = tvm_env.make_target(tvm_env.host_target(1) | {"opt-level": 0})  # the optimiser is not what is tested here


def run(model: onnx.ModelProto, values: Mapping[str, Any]) -> Any:
    module = importer.import_onnx(model, {name: array.shape for name, array in values.items()})
    module, used = pipelines.prepare(module, HOST, pipelines.require_pipeline("graph/2"))
    executable = tvm.compile(pipelines.finish(module, HOST, None, used), target=PLAIN)
    return tvm.relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, values.values())).numpy()


def reference(model: onnx.ModelProto, values: Mapping[str, Any]) -> Any:
    return open_session(model.SerializeToString()).run(None, dict(values))[0]


def model_of(opset: int) -> onnx.ModelProto:
    weights: dict[str, Any] = {
        "k": random(4, 3, 3, 3), "s": 1 + random(4), "o": random(4), "m": random(4), "v": 1 + abs(random(4)),
        "low": np.float32(-0.5), "high": np.float32(0.5), "pads": np.array([0, 0, 1, 1, 0, 0, 0, 1], "int64"),
        "scales": np.array([1, 1, 2, 2], "float32"), "rows": np.array([0, 0, -1], "int64"),
        "axes": np.array([2], "int64"), "parts": np.array([1, 3], "int64"), "two": np.array([2], "int64"),
    }  # fmt: skip
    since = opset >= 13
    nodes = [
        node("Conv", "x k", "a", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "a s o m v", "b"),
        node("Clip", "b low high", "c"),
        node("MaxPool", "c", "d", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
        node("Pad", "d pads", "e"),
        node("Resize", "e  scales" if since else "e none scales", "f", mode="nearest", nearest_mode="floor",
             coordinate_transformation_mode="asymmetric"),
        helper.make_node("Split", ["f", "parts"] if since else ["f"], ["g", "h"], axis=1,
                         **({} if since else {"split": [1, 3]})),
        node("Concat", "h g", "i", axis=1),
        node("Reshape", "i rows", "j"),
        node("ReduceMean", "j axes", "l") if opset >= 18 else node("ReduceMean", "j", "l", axes=[2]),
        node("ReduceSum", "j axes", "n", keepdims=0) if since else node("ReduceSum", "j", "n", axes=[2], keepdims=0),
        node("Squeeze", "l axes", "p") if since else node("Squeeze", "l", "p", axes=[2]),
        node("Add", "p n", "q"),
        node("HardSwish", "q", "r") if opset >= 14 else node("Tanh", "q", "r"),
        node("Gelu", "r", "t") if opset >= 20 else node("Elu", "r", "t"),
        node("Softmax", "t", "y"),
    ]  # fmt: skip
    if not since:
        weights["none"] = np.zeros(0, "float32")
    for each in nodes:
        if each.op_type == "Resize" and since:
            each.input[:] = ["e", "", "scales"]
    used = {name for each in nodes for name in each.input}
    kept = {name: array for name, array in weights.items() if name in used}
    return make_model(nodes, {"x": (2, 3, 8, 8)}, kept, opset=opset)


@pytest.mark.parametrize("opset", range(11, 22))
def test_every_opset_computes_what_onnx_runtime_computes(opset: int) -> None:
    """Operators are read as the model's own opset means them."""
    model = model_of(opset)
    values = model_inputs.make_inputs(model_inputs.read_inputs(model))
    np.testing.assert_allclose(run(model, values), reference(model, values), rtol=1e-4, atol=1e-6)


def test_open_dimensions_are_bound_and_computed_with() -> None:
    """The file leaves batch, height and width open; what is bound is what is computed, here two images of 9x7."""
    graph = onnx.load_model_from_string(zoo.ZOO["tiny-cnn"].build())
    for place, name in ((0, "batch"), (2, "height"), (3, "width")):
        graph.graph.input[0].type.tensor_type.shape.dim[place].dim_param = name
    graph.graph.output[0].CopyFrom(helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10]))
    inputs = model_inputs.resolve_inputs(model_inputs.read_inputs(graph), model_inputs.parse_shapes(["data=2,3,9,7"]))
    values = model_inputs.make_inputs(inputs)
    found = run(graph, values)
    assert found.shape == (2, 10)
    np.testing.assert_allclose(found, reference(graph, values), rtol=1e-4, atol=1e-5)


def test_weights_in_another_file_are_computed_with(tmp_path: pathlib.Path) -> None:
    """One file for each weight, in a folder below the model's."""
    whole = onnx.load_model_from_string(zoo.ZOO["tiny-cnn"].build())
    (tmp_path / "weights").mkdir()
    apart = onnx.load_model_from_string(whole.SerializeToString())
    for tensor in apart.graph.initializer:
        onnx.external_data_helper.set_external_data(tensor, f"weights/{tensor.name}")
    onnx.save(apart, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < 8192
    values = model_inputs.make_inputs(model_inputs.read_inputs(whole))
    found = run(source.resolve_model(str(tmp_path / "model.onnx")).load(), values)
    np.testing.assert_allclose(found, reference(whole, values), rtol=1e-4, atol=1e-5)
