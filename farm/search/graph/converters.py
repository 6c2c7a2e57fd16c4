"""Converters for ONNX operators that TVM 0.27 imports badly.

TVM's Clip becomes opaque functions; HardSwish and HardSigmoid become a `clip` without a layout rule. The convolution
before each then gets two transposes and no fusion (MobileNet v2: 34 transposes). Sum, Mean, Max and Min stack their
inputs in a fifth dimension without a convolution layout. Layout conversion transposes a layer normalisation over
several dimensions without its weights, which gives wrong results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.frontend.onnx import onnx_frontend
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from farm.search.graph import algebra, bindings, microsoft, pooling, quantisation, recurrent, resizing, shaping


@functools.cache
def importer_class() -> Any:
    """Return TVM's ONNX importer class with these converters added."""

    class Importer(ONNXGraphImporter):
        def _check_for_unsupported_ops(self, graph: Any) -> None:
            """Skip TVM's check: `importer` has made it with these converters."""

        def _convert_operator(self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int) -> Any:
            convert = _CONVERTERS.get(op_name)
            converted = convert(inputs, attrs | {"opset": opset}) if convert else None
            is_own = converted is not None
            if converted is None:
                converted = super()._convert_operator(op_name, inputs, attrs, opset)
                if op_name == "Gather":
                    is_own, converted = True, _stay_inside(converted)
            made = self.bb.normalize(converted) if is_own else converted
            shape = bindings.static_shape(made.ty) or ()
            assert math.prod(shape) <= shaping.MOST_ELEMENTS, f"its result {shape} exceeds a board's memory"
            return made

    return Importer


def _stay_inside(value: Any) -> Any:
    """Clamp the indices of a gather: TVM reads out of bounds, which can crash the process."""
    if not bindings.is_call(value, "relax.take"):
        return value
    data, indices = value.args
    return relax.op.take(data, indices, None if value.attrs.axis is None else int(value.attrs.axis), mode="clip")


def known_operators() -> frozenset[str]:
    """Return the operators of ONNX and ONNX Runtime that have a converter."""
    return frozenset(onnx_frontend._get_convert_map()) | frozenset(_CONVERTERS)


def _convert_clip(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert Clip with constant bounds: attributes before opset 11, inputs since. None for computed bounds."""
    data = inputs[0]
    # TVM's input list returns None beyond its end.
    low = _constant_bound(inputs[1], attributes.get("min"))
    high = _constant_bound(inputs[2], attributes.get("max"))
    return None if low is None or high is None else _clamp(data, data.ty.dtype, low, high)


def _constant_bound(value: Any, attribute: float | None) -> float | None:
    """Return a bound as a number, NaN where there is none; None where it is unknown at import.

    Bounds of integers stay integers: a float rounds those beyond 2 to the 53.
    """
    if value is None:
        return math.nan if attribute is None else float(attribute)

    if not isinstance(value, GenericConst):
        return None
    number = value.value.numpy()
    return number.item() if number.size == 1 else None


def _clamp(data: Any, dtype: Any, low: float, high: float) -> Any:
    """Return `min(max(data, low), high)`, without bounds that are NaN or infinite."""
    for bound, operator in ((low, relax.op.maximum), (high, relax.op.minimum)):
        if math.isfinite(bound):
            data = operator(data, relax.const(bound if "float" in str(dtype) else int(bound), dtype))
    return data


def _convert_hard_swish(inputs: Any, _: dict[str, Any]) -> Any:
    data = inputs[0]
    dtype = data.ty.dtype
    gate = _clamp(relax.op.add(data, relax.const(3.0, dtype)), dtype, 0.0, 6.0)
    return relax.op.multiply(data, relax.op.multiply(gate, relax.const(1 / 6, dtype)))


def _convert_hard_sigmoid(inputs: Any, attributes: dict[str, Any]) -> Any:
    data = inputs[0]
    dtype = data.ty.dtype
    slope, offset = (relax.const(float(attributes.get(n, d)), dtype) for n, d in (("alpha", 0.2), ("beta", 0.5)))
    return _clamp(relax.op.add(relax.op.multiply(data, slope), offset), dtype, 0.0, 1.0)


def _convert_gather(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert Gather with constant indices, whose signs TVM would look at in the graph; None for others."""
    data, indices = inputs[0], inputs[1]
    if not isinstance(indices, GenericConst) or isinstance(data, relax.ShapeExpr | GenericConst):
        return None
    axis = int(attributes.get("axis", 0))
    numbers = indices.value.numpy()
    size = int(data.ty.shape[axis])
    inside = np.where(numbers < 0, numbers + size, numbers).astype(numbers.dtype)
    return relax.op.take(data, relax.const(inside, str(numbers.dtype)), axis, mode="clip")


def _convert_matmul_nbits(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert a product with constant weights of a few bits, which are widened here; the last input is a bias."""
    if inputs[4] is not None:
        raise ValueError("weights in another order (g_idx) are not supported")
    packed, scales, zeros = (each and each.value.numpy() for each in (inputs[at] for at in (1, 2, 3)))
    weights = microsoft.widen_blocks(packed, scales, zeros, int(attributes["K"]), int(attributes.get("bits", 4)))
    product = relax.op.matmul(inputs[0], relax.const(np.ascontiguousarray(weights.T), str(scales.dtype)))
    return product if inputs[5] is None else relax.op.add(product, inputs[5])


def _convert_sum(inputs: Any, _: dict[str, Any]) -> Any:
    """Chain additions, with ONNX's broadcasting."""
    return functools.reduce(relax.op.add, list(inputs))


def _convert_mean(inputs: Any, _: dict[str, Any]) -> Any:
    return relax.op.multiply(_convert_sum(inputs, _), relax.const(1 / len(inputs), inputs[0].ty.dtype))


def _convert_is_inf(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert IsInf for one sign, which TVM's converter ignores; None where both count."""
    data, signs = inputs[0], [attributes.get(f"detect_{sign}", 1) for sign in ("positive", "negative")]
    if all(signs):
        return None
    if not any(signs):
        return relax.op.zeros_like(data, "bool")
    return relax.op.equal(data, relax.const(math.inf if signs[0] else -math.inf, data.ty.dtype))


def _convert_layer_norm(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert layer normalisation over several dimensions to one over a fused one; None for one, which TVM handles."""
    flat = _flatten(inputs[0], attributes)
    if flat is None:
        return None
    data, shape, size = flat
    scale = relax.op.reshape(inputs[1], (size,))
    zero = relax.const(np.zeros(size), data.ty.dtype)
    offset = zero if inputs[2] is None else relax.op.reshape(inputs[2], (size,))
    found = relax.op.nn.layer_norm(data, scale, offset, [-1], attributes.get("epsilon", 1e-5))
    # `farm.search.graph.importer` refuses further outputs, the mean and the deviation.
    return relax.Tuple([relax.op.reshape(found, shape), zero, zero])


def _convert_rms_norm(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert RMS normalisation over several dimensions to one over a fused one; None for one, which TVM handles."""
    flat = _flatten(inputs[0], attributes)
    if flat is None:
        return None
    data, shape, size = flat
    scale = relax.op.reshape(inputs[1], (size,))
    return relax.op.reshape(relax.op.nn.rms_norm(data, scale, [-1], attributes.get("epsilon", 1e-5)), shape)


def _flatten(data: Any, attributes: dict[str, Any]) -> tuple[Any, tuple[int, ...], int] | None:
    """Return data as rows to normalise, with its shape and the row length; None where the rows are its own."""
    shape = tuple(int(size) for size in data.ty.shape)
    axis = int(attributes.get("axis", -1)) % len(shape)
    if axis == len(shape) - 1 or str(data.ty.dtype) != "float32":
        return None
    size = math.prod(shape[axis:])
    rows = bindings.bind(relax.op.reshape(data, (math.prod(shape[:axis]), size)))
    return rows, shape, size


def _convert_conv_transpose(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert ConvTranspose to the size that `output_shape` asks for; None without it.

    Elements that the kernel does not reach are zeros at the end, as those of ONNX Runtime.
    """
    data, kernel = inputs[0], inputs[1]
    if "output_shape" not in attributes:
        return None
    given, window = (bindings.static_shape(each.ty) or () for each in (data, kernel))
    rank = len(given) - 2
    strides, dilations = (list(attributes.get(name, [1] * rank)) for name in ("strides", "dilations"))
    extra = list(attributes.get("output_padding", [0] * rank))
    sizes = list(attributes["output_shape"])[-rank:]
    before, after = [], []
    for at, size in enumerate(sizes):
        whole = strides[at] * (given[2 + at] - 1) + extra[at] + (window[2 + at] - 1) * dilations[at] + 1
        pad = max(0, whole - size)
        before.append(pad // 2 if attributes.get("auto_pad") == b"SAME_UPPER" else pad - pad // 2)
        after.append(pad - before[-1])
        extra[at] += max(0, size - whole)
    if any(more >= step for more, step in zip(extra, strides, strict=True)):
        raise ValueError(f"a result of {sizes} is larger than this kernel and these strides can fill")
    padded = attributes | {"auto_pad": b"NOTSET", "pads": before + after, "output_padding": extra}
    return onnx_frontend.ConvTranspose._impl_v1(None, inputs, padded, None)


_CONVERTERS: dict[str, Callable[[Any, dict[str, Any]], Any | None]] = {
    "AveragePool": pooling.convert_average_pool,
    "Clip": _convert_clip,
    "Gather": _convert_gather,
    "MatMulInteger": quantisation.convert_matmul_integer,
    "MatMulNBits": _convert_matmul_nbits,
    "HardSwish": _convert_hard_swish,
    "HardSigmoid": _convert_hard_sigmoid,
    "IsInf": _convert_is_inf,
    "LayerNormalization": _convert_layer_norm,
    "ConvTranspose": _convert_conv_transpose,
    "ConvInteger": quantisation.convert_conv_integer,
    "DeformConv": pooling.convert_deform_conv,
    "DequantizeLinear": quantisation.convert_dequantize_linear,
    recurrent.DYNAMIC: recurrent.convert_dynamic,
    "DynamicQuantizeLinear": quantisation.convert_dynamic_quantize_linear,
    "LpPool": pooling.convert_lp_pool,
    "MaxPool": pooling.convert_max_pool,
    "Mean": _convert_mean,
    "QuantizeLinear": quantisation.convert_quantize_linear,
    "QLinearConv": quantisation.convert_qlinear_conv,
    "QLinearMatMul": quantisation.convert_qlinear_matmul,
    "RMSNormalization": _convert_rms_norm,
    "RoiAlign": pooling.convert_roi_align,
    "Resize": resizing.convert_resize,
    "Sum": _convert_sum,
    "Upsample": resizing.convert_upsample,
    **algebra.CONVERTERS,
    **shaping.CONVERTERS,
    **{name: functools.partial(recurrent.convert, name) for name in recurrent.OPERATORS},
}
