"""Evaluate one node of a graph whose inputs are known, by ONNX's reference evaluator; shapes of types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.reference

from farm.search.graph.folding import STANDARD_DOMAINS, bodies

# Largest tensor to compute with: position grids and masks of large images have as many elements.
MOST_NUMBERS = 1 << 22

COMPUTED = frozenset(
    onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name))
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64",
    )
)  # fmt: skip

# Never evaluated: random, 8-bit weights, or slow and irrelevant to shapes.
_NEVER = frozenset(
    {
        "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
        "DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear", "Attention", "Conv", "ConvInteger",
        "ConvTranspose", "DFT", "DeformConv", "GRU", "LSTM", "RNN", "STFT", "Scan",
    }
)  # fmt: skip

Array = npt.NDArray[Any]


def evaluate(
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    given_types: Mapping[str, onnx.TypeProto],
    known: Mapping[str, Array],
    opsets: Sequence[onnx.OperatorSetIdProto],
    ir_version: int,
) -> dict[str, Array] | None:
    """Return the node's results by name where they are known, else None; `types` are those of its results."""
    if node.domain not in STANDARD_DOMAINS or node.op_type in _NEVER or bodies(node):
        return None
    if node.op_type in ("Shape", "Size"):
        return _evaluate_shape(node, given_types)
    if any(name and name not in known for name in node.input):
        return None
    if any(math.prod(find_sizes(kind) or (1,)) > MOST_NUMBERS for kind in types.values()):
        return None
    names = [name for name in node.output if name]
    given = {name: known[name] for name in node.input if name}
    try:
        found = _run(node, given, names, opsets, ir_version)
    except Exception:  # noqa: BLE001 - the reference evaluator raises errors of any type; the node then stays
        return None
    for name, array in found.items():
        if not isinstance(array, np.ndarray | np.generic) or array.dtype.kind not in "biuf":
            return None
        kind = types.get(name)
        wanted = kind.tensor_type.elem_type if kind is not None else 0
        if wanted and wanted != onnx.helper.np_dtype_to_tensor_dtype(array.dtype):
            return None
    return {name: np.asarray(array) for name, array in found.items()}


def _run(
    node: onnx.NodeProto,
    given: Mapping[str, Array],
    names: list[str],
    opsets: Sequence[onnx.OperatorSetIdProto],
    ir_version: int,
) -> dict[str, Any]:
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in given.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    graph = onnx.helper.make_graph([node], "one", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    return dict(zip(names, onnx.reference.ReferenceEvaluator(model).run(None, dict(given)), strict=True))


def _evaluate_shape(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> dict[str, Array] | None:
    """Evaluate Shape and Size of a value with a known shape."""
    sizes = find_sizes(types.get(node.input[0]))
    if sizes is None:
        return None
    if node.op_type == "Size":
        return {node.output[0]: np.array(math.prod(sizes), "int64")}
    bounds = {each.name: each.i for each in node.attribute}
    return {node.output[0]: np.array(sizes[bounds.get("start", 0) : bounds.get("end", len(sizes))], "int64")}


def count(kind: onnx.TypeProto | None) -> int | None:
    """Return the number of elements of a tensor where it is known."""
    sizes = find_sizes(kind)
    return None if sizes is None else math.prod(sizes)


def find_sizes(kind: onnx.TypeProto | None) -> tuple[int, ...] | None:
    """Return the shape of a tensor where it is fully known, else None."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    dimensions = kind.tensor_type.shape.dim
    return tuple(d.dim_value for d in dimensions) if all(d.HasField("dim_value") for d in dimensions) else None
