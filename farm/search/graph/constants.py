"""Arithmetic on constant weights, done with NumPy where TVM would compile a function for each.

`relax.transform.FoldConstant` builds machine code for every constant expression: 20 s for MobileNet v2 on one core,
nearly all of it batch normalisation folded into weights, and weights transposed to another layout.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import tvm
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator


@functools.cache
def fold_shapes() -> Any:
    """A Relax pass that evaluates transposes and reshapes of constants; what it leaves, FoldConstant does."""
    operators = {
        tvm.ir.Op.get("relax.permute_dims"): _permuted,
        tvm.ir.Op.get("relax.reshape"): _reshaped,
        tvm.ir.Op.get("relax.expand_dims"): _expanded,
    }

    @mutator
    class ConstantFolder(PyExprMutator):
        def visit_call_(self, call: Any) -> Any:
            call = self.visit_expr_post_order(call)
            evaluate = operators.get(call.op) if isinstance(call.op, tvm.ir.Op) else None
            if evaluate is None:
                return call
            data = call.args[0]
            if isinstance(data, relax.Var):
                data = self.lookup_binding(data)
            if not isinstance(data, tvm.ir.GenericConst):
                return call
            result = evaluate(data.value.numpy(), call)
            return call if result is None else relax.const(np.asarray(result, order="C"), data.ty.dtype)

    def fold(module: Any, _: Any) -> Any:
        folder = ConstantFolder(module)
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function):
                folder.builder_.update_func(variable, folder.visit_expr(function))
        return folder.builder_.get()

    return tvm.transform.module_pass(fold, opt_level=0, name="FoldConstantShapes")


def _permuted(array: npt.NDArray[Any], call: Any) -> npt.NDArray[Any]:
    axes = call.attrs.axes
    return np.transpose(array, None if axes is None else [int(axis) for axis in axes])


def _reshaped(array: npt.NDArray[Any], call: Any) -> npt.NDArray[Any] | None:
    shape = call.args[1]
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(d, tirx.IntImm) for d in shape.values):
        return None
    return array.reshape([int(dimension) for dimension in shape.values])


def _expanded(array: npt.NDArray[Any], call: Any) -> npt.NDArray[Any]:
    return np.expand_dims(array, tuple(int(axis) for axis in call.attrs.axis))


def fold_batch_norm(graph: onnx.GraphProto) -> None:
    """Multiply each BatchNormalization that alone reads a convolution's result into that convolution's weights.

    Only where all of them are initializers in float32; the sums are done in float64.
    """
    weights = {i.name: i for i in graph.initializer if i.data_type == onnx.TensorProto.FLOAT}
    readers: dict[str, int] = {}
    for name in [*(n for node in graph.node for n in node.input), *(value.name for value in graph.output)]:
        readers[name] = readers.get(name, 0) + 1
    convolutions = {node.output[0]: node for node in graph.node if node.op_type == "Conv"}
    # A branch could read the value between the two.
    if any(a.HasField("g") or a.graphs for node in graph.node for a in node.attribute):
        return
    kept = []
    for node in graph.node:
        conv = convolutions.get(node.input[0]) if node.op_type == "BatchNormalization" else None
        if (
            conv is None
            or node.domain not in ("", "ai.onnx")
            or readers[node.input[0]] != 1
            or any(node.output[1:])
            or _attribute(node, "training_mode", 0)
            or not all(name in weights for name in [*conv.input[1:], *node.input[1:]])
        ):
            kept.append(node)
            continue
        scale, offset, mean, variance = (_double(weights[name]) for name in node.input[1:5])
        factor = scale / np.sqrt(variance + _attribute(node, "epsilon", 1e-5))
        kernel = _double(weights[conv.input[1]])
        bias = _double(weights[conv.input[2]]) if len(conv.input) > 2 else np.zeros_like(mean)
        folded = {
            f"{node.output[0]}__weight": kernel * factor.reshape(-1, *[1] * (kernel.ndim - 1)),
            f"{node.output[0]}__bias": (bias - mean) * factor + offset,
        }
        for name, array in folded.items():
            graph.initializer.append(onnx.numpy_helper.from_array(array.astype("float32"), name))
        conv.input[1:] = list(folded)
        conv.output[0] = node.output[0]
    del graph.node[:]
    graph.node.extend(kept)


def _attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    return next((float(onnx.helper.get_attribute_value(a)) for a in node.attribute if a.name == name), default)


def _double(tensor: onnx.TensorProto) -> npt.NDArray[np.float64]:
    return np.asarray(onnx.numpy_helper.to_array(tensor), dtype=np.float64)
