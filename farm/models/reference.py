"""Sessions of ONNX Runtime whose 8-bit sums are exact on every processor."""

from __future__ import annotations

from typing import Any

import onnx

# ONNX Runtime's kernels for uint8 times int8 add pairs of products in 16 bits where x86-64 has no VNNI; sums saturate.
# The places of such an operand and its zero point, by operator, those of ONNX Runtime's own too.
_SIGNED_OPERAND = {
    "ConvInteger": (1, 3), "DynamicQuantizeMatMul": (1, 3), "MatMulInteger": (1, 3), "MatMulIntegerToFloat": (1, 5),
    "QAttention": (1, 7), "QGemm": (3, 5), "QLinearConv": (3, 5), "QLinearMatMul": (3, 5),
}  # fmt: skip


def open_session(data: bytes, *, optimised: bool = True) -> Any:
    """Return a CPU session of a model in which no sum of 8-bit products saturates.

    Raises ImportError without ONNX Runtime, and its own errors for a model that it refuses.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # QuantizeLinear and DequantizeLinear stay what ONNX defines: floats around float operators.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # ONNX Runtime's own operators with constant weights: unsigned weights, whose kernels are exact.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(_make_unsigned(data) or data, options, providers=["CPUExecutionProvider"])


def _make_unsigned(data: bytes) -> bytes | None:
    """Move second operands of integer products from int8 to uint8: values and zero points plus 128.

    Return None for a model without such operands.
    """
    model = onnx.load_model_from_string(data)
    if not any(node.op_type in _SIGNED_OPERAND for node in model.graph.node):
        return None
    graph, kinds = model.graph, _find_types(model)
    nodes, moved = list[onnx.NodeProto](), dict[str, str]()

    def move(name: str) -> str:
        if name not in moved:
            moved[name], wide, sum_ = (f"{name}.{each}.unsigned" for each in ("moved", "wide", "sum"))
            nodes.append(onnx.helper.make_node("Cast", [name], [wide], to=onnx.TensorProto.INT32))
            nodes.append(onnx.helper.make_node("Add", [wide, "128.unsigned"], [sum_]))
            nodes.append(onnx.helper.make_node("Cast", [sum_], [moved[name]], to=onnx.TensorProto.UINT8))
        return moved[name]

    for node in graph.node:
        places = _SIGNED_OPERAND.get(node.op_type, ())
        if places and kinds.get(node.input[places[0]]) == onnx.TensorProto.INT8:
            given = [*node.input, *[""] * (places[1] + 1 - len(node.input))]
            given[places[0]] = move(given[places[0]])
            given[places[1]] = move(given[places[1]]) if given[places[1]] else "zero.unsigned"
            node.input[:] = given
        nodes.append(node)
    if not moved:
        return None
    constants = {"128.unsigned": (onnx.TensorProto.INT32, 128), "zero.unsigned": (onnx.TensorProto.UINT8, 128)}
    graph.initializer.extend(
        onnx.helper.make_tensor(name, kind, [], [value]) for name, (kind, value) in constants.items()
    )
    copies = [onnx.NodeProto.FromString(each.SerializeToString()) for each in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return bytes(model.SerializeToString())


def _find_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return element types by name: of initializers, of declared values, and of those that can be inferred."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    found = {each.name: each.type.tensor_type.elem_type for each in values}
    return found | {each.name: each.data_type for each in model.graph.initializer}
