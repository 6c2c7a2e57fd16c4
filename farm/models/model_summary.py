"""A summary of a model: operators, parameters, weights, outputs."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import onnx

from farm.models.inputs import InputSpec
from farm.search.graph import folding

# Inputs that are settings or statistics rather than trained weights, by operator.
_SETTINGS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "DequantizeLinear": (1, 2),
    "QuantizeLinear": (1, 2),
    "Pad": (1, 2),
    "Resize": (1, 2, 3),
}


_FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
)


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """`outputs` have "?" for unknown dimensions; `operators` counts nodes by type.

    `parameters` counts trained weights, floats or integers scaled to floats, without running statistics.
    `weight_bytes` is the size of all tensors in the model.
    """

    opset: int
    outputs: tuple[InputSpec, ...]
    operators: Mapping[str, int]
    parameters: int
    weight_bytes: int


def summarise(model: onnx.ModelProto, inputs: Sequence[InputSpec]) -> ModelSummary:
    """Describe a model with these input shapes, without changing it."""
    graph = model.graph
    return ModelSummary(
        opset=next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 1),
        outputs=_find_outputs(model, inputs),
        operators=dict(collections.Counter(node.op_type for node in graph.node).most_common()),
        parameters=_count_parameters(graph),
        weight_bytes=sum(_count_bytes(tensor) for tensor in graph.initializer),
    )


def _count_parameters(graph: onnx.GraphProto) -> int:
    held = {tensor.name: tensor for tensor in graph.initializer}
    trained = set()
    for node in graph.node:
        for position, name in enumerate(node.input):
            tensor = held.get(name)
            if tensor is None or not tensor.dims or position in _SETTINGS.get(node.op_type, ()):
                continue
            if tensor.data_type in _FLOATS or node.op_type == "DequantizeLinear":
                trained.add(name)
    return int(sum(math.prod(held[name].dims) for name in trained))


def _count_bytes(tensor: onnx.TensorProto) -> int:
    try:
        size = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        return 0
    return int(math.prod(tensor.dims) * size)


def _find_outputs(model: onnx.ModelProto, inputs: Sequence[InputSpec]) -> tuple[InputSpec, ...]:
    """Return the outputs by ONNX's inference, else as declared."""
    bare = folding.drop_weights(model, {spec.name: spec.static_shape for spec in inputs})
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        found = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph.output
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        found = model.graph.output
    declared = {value.name: value for value in model.graph.output}
    return tuple(
        _describe(value if value.type.tensor_type.HasField("shape") else declared[value.name]) for value in found
    )


def _describe(value: onnx.ValueInfoProto) -> InputSpec:
    tensor = value.type.tensor_type
    try:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError:
        dtype = "?"
    if not tensor.HasField("shape"):
        return InputSpec(value.name, ("?",), dtype)
    return InputSpec(value.name, tuple(d.dim_value or d.dim_param or "?" for d in tensor.shape.dim), dtype)
