"""Small ONNX models written node by node, and what ONNX Runtime makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper

from farm.models import inputs as model_inputs
from farm.models.quantise import open_session

RNG = np.random.default_rng(11)


def make_model(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, npt.NDArray[Any]] | None = None,
    *,
    opset: int = 17,
    domains: Mapping[str, int] | None = None,
    input_type: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(name, input_type, list(shape)) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(domain, version) for domain, version in (domains or {}).items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def random(*shape: int) -> npt.NDArray[np.float32]:
    return (0.3 * RNG.standard_normal(shape)).astype("float32")


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=f"node_{output}", **attributes)


def largest_error(model: onnx.ModelProto, executable: Any) -> float:
    """Run both ways on the same values: the largest difference as a share of its output's peak."""
    machine = tvm.relax.VirtualMachine(executable, tvm.cpu())
    specs = model_inputs.read_inputs(model)
    values = model_inputs.make_inputs(specs, 3)
    result = machine["main"](*(tvm.runtime.tensor(values[spec.name]) for spec in specs))
    ours = [result.numpy()] if hasattr(result, "numpy") else [one.numpy() for one in result]
    theirs = run_onnx_runtime(model, values)
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


def run_onnx_runtime(model: onnx.ModelProto, values: Mapping[str, Any]) -> list[Any]:
    return list(open_session(model.SerializeToString()).run(None, dict(values)))
