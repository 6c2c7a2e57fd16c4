"""ONNX's operators on bytes as Relax's quantize and dequantize around others, which `quantised` lowers to integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.frontend.onnx import onnx_frontend

from farm.search.graph import bindings, dots


def _as_type(value: Any, dtype: str) -> Any:
    """Cast; a constant stays one."""
    if isinstance(value, GenericConst):
        return relax.const(value.value.numpy().astype(dtype), dtype)
    return value if str(value.ty.dtype) == dtype else bindings.bind(relax.op.astype(value, dtype))


def _as_scalar(value: Any) -> Any:
    """Drop the axis of a vector of one number; a constant stays one."""
    if bindings.static_shape(value.ty) != (1,):
        return value
    if isinstance(value, GenericConst):
        return relax.const(value.value.numpy().reshape(()), str(value.ty.dtype))
    return bindings.bind(relax.op.reshape(value, ()))


def _rank(value: Any) -> int:
    return len(bindings.static_shape(value.ty) or ())


def _convolve(data: Any, weight: Any, bias: Any, attributes: dict[str, Any]) -> Any:
    """Convolve with the attributes of Conv."""
    builder = relax.BlockBuilder.current()
    return bindings.bind(onnx_frontend.Conv._impl_v11(builder, [data, weight, bias], dict(attributes), [{}, {}]))


def _shift(data: Any, zero: Any, axis: int) -> Any:
    """Return `data - zero` in 32 bits; `axis` is that of a vector of zero points."""
    wide = _as_type(data, "int32")
    if zero is None:
        return wide
    zero = _as_type(zero, "int32")
    if _rank(zero) == 1:
        zero = relax.op.reshape(zero, [-1 if at == axis % _rank(data) else 1 for at in range(_rank(data))])
    return bindings.bind(relax.op.subtract(wide, zero))


def convert_conv_integer(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert ConvInteger exactly: sums of 32 bits."""
    return _convolve(_shift(inputs[0], inputs[2], 1), _shift(inputs[1], inputs[3], 0), None, attributes)


def convert_matmul_integer(inputs: Any, _: dict[str, Any]) -> Any | None:
    """Convert MatMulInteger with constant int8 weights to int8 dot products, for a target that has them.

    The sums of the weights' columns, times the data's zero point, are subtracted afterwards. None for other operands.
    """
    data, weight, zero, weight_zero = (*inputs, None, None)[:4]
    target = tvm.target.Target.current(allow_none=True)
    instruction = None if target is None else dots.find_instruction(target)
    if instruction is None or not isinstance(weight, GenericConst) or _rank(weight) != 2 or _rank(data) < 2:
        return None
    numbers, unsigned = weight.value.numpy(), str(data.ty.dtype) == "uint8"
    if weight_zero is not None and (not isinstance(weight_zero, GenericConst) or weight_zero.value.numpy().any()):
        return None
    if (
        numbers.dtype != np.int8
        or not unsigned
        or (zero is not None and bindings.static_shape(zero.ty) not in ((), (1,)))
    ):
        return None
    zero = relax.const(0, "int32") if zero is None else _as_type(_as_scalar(zero), "int32")
    if instruction.data == "int8":
        middle = relax.const(128, "int32")
        moved = bindings.bind(relax.op.subtract(_as_type(data, "int32"), middle))
        data, zero = _as_type(moved, "int8"), bindings.bind(relax.op.subtract(zero, middle))
    product = bindings.bind(relax.op.matmul(data, weight, "int32"))
    # A product too, since no schedule has elements of a vector computed before its sums.
    zero = bindings.bind(relax.op.reshape(zero, (1, 1)))
    sums = relax.const(numbers.sum(0, dtype="int32", keepdims=True))
    return relax.op.subtract(product, bindings.bind(relax.op.matmul(zero, sums, "int32")))


def _dequantise(data: Any, scale: Any, zero: Any, axis: int) -> Any:
    scale, zero = _as_type(_as_scalar(scale), "float32"), _as_scalar(zero)
    return bindings.bind(relax.op.dequantize(data, scale, zero, axis % _rank(data), "float32"))


def convert_qlinear_matmul(inputs: Any, _: dict[str, Any]) -> Any:
    """Convert QLinearMatMul: rows of the first and columns of the second may have scales of their own."""
    first = _dequantise(inputs[0], inputs[1], inputs[2], -2)
    second = _dequantise(inputs[3], inputs[4], inputs[5], -1)
    return _quantise(relax.op.matmul(first, second), inputs[6], inputs[7])


def convert_qlinear_conv(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert QLinearConv: the bias has the product of both scales."""
    data = _dequantise(inputs[0], inputs[1], inputs[2], 1)
    weight = _dequantise(inputs[3], inputs[4], inputs[5], 0)
    bias = inputs[8]
    if bias is not None:
        bias = _dequantise_bias(bias, inputs[1], inputs[4])
    return _quantise(_convolve(data, weight, bias, attributes), inputs[6], inputs[7])


def _dequantise_bias(bias: Any, *scales: Any) -> Any:
    if all(isinstance(each, GenericConst) for each in (bias, *scales)):
        number, *factors = (each.value.numpy().astype("float64") for each in (bias, *scales))
        return relax.const((number * np.prod(np.broadcast_arrays(*factors), axis=0)).astype("float32"), "float32")
    return bindings.bind(relax.op.multiply(_as_type(bias, "float32"), bindings.bind(relax.op.multiply(*scales))))


def _quantise(data: Any, scale: Any, zero: Any) -> Any:
    scale, zero = _as_type(_as_scalar(scale), "float32"), _as_scalar(zero)
    return relax.op.quantize(bindings.bind(data), scale, zero, 0, str(zero.ty.dtype))


def convert_quantize_linear(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert QuantizeLinear in blocks; None for a scale of the tensor or of an axis, which TVM converts."""
    if not (block := int(attributes.get("block_size", 0))):
        return None
    data, axis = inputs[0], int(attributes.get("axis", 1)) % _rank(inputs[0])
    if inputs[2] is not None:
        dtype = str(inputs[2].ty.dtype)
    else:
        kind = int(attributes.get("output_dtype", 0))
        dtype = onnx_frontend.get_type(kind) if kind else "uint8"
    limits = np.iinfo(dtype)
    scale = _spread(inputs[1], data, axis, block)
    steps = relax.op.round(relax.op.divide(_as_type(data, "float32"), scale))
    if inputs[2] is not None:
        steps = relax.op.add(steps, _spread(inputs[2], data, axis, block))
    return relax.op.astype(relax.op.clip(bindings.bind(steps), float(limits.min), float(limits.max)), dtype)


def convert_dequantize_linear(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert DequantizeLinear in blocks; None for a scale of the tensor or of an axis, which TVM converts."""
    if not (block := int(attributes.get("block_size", 0))):
        return None
    data, axis = inputs[0], int(attributes.get("axis", 1)) % _rank(inputs[0])
    number = _as_type(data, "float32")
    if inputs[2] is not None:
        number = relax.op.subtract(number, _spread(inputs[2], data, axis, block))
    scaled = bindings.bind(relax.op.multiply(number, _spread(inputs[1], data, axis, block)))
    return _as_type(scaled, str(inputs[1].ty.dtype))


def _spread(value: Any, data: Any, axis: int, block: int) -> Any:
    """Repeat each number of an axis for its block of the data, in float32."""
    size = (bindings.static_shape(data.ty) or ())[axis]
    value = _as_type(value, "float32")
    if isinstance(value, GenericConst):
        return relax.const(np.repeat(value.value.numpy(), block, axis).take(range(size), axis), "float32")
    return bindings.bind(
        relax.op.strided_slice(bindings.bind(relax.op.repeat(value, block, axis)), [axis], [0], [size])
    )


def convert_dynamic_quantize_linear(inputs: Any, _: dict[str, Any]) -> Any:
    """Convert DynamicQuantizeLinear; zeros have the scale 1, as in ONNX Runtime."""
    data = inputs[0]
    zero, most = relax.const(0.0, "float32"), relax.const(255.0, "float32")
    low = bindings.bind(relax.op.minimum(zero, relax.op.min(data)))
    width = bindings.bind(relax.op.subtract(relax.op.maximum(zero, relax.op.max(data)), low))
    scale = relax.op.where(relax.op.equal(width, zero), relax.const(1.0, "float32"), relax.op.divide(width, most))
    scale = bindings.bind(scale)
    offset = relax.op.round(relax.op.clip(bindings.bind(relax.op.divide(relax.op.negative(low), scale)), 0.0, 255.0))
    offset = bindings.bind(relax.op.astype(offset, "uint8"))
    return relax.Tuple([bindings.bind(relax.op.quantize(data, scale, offset, 0, "uint8")), scale, offset])
