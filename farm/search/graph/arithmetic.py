"""Element-wise operators and normalisations at the edges of their ranges: NaN, infinities, wide shifts, zero norms."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from farm.search.graph import bindings


def _is_float(data: Any) -> bool:
    return "float" in str(data.ty.dtype)


def convert_extremum(name: str, inputs: Any, _: dict[str, Any]) -> Any:
    """Chain maxima or minima, with ONNX's broadcasting; NaN of a computed operand stays.

    TVM compares, and returns the second operand where either is NaN. A constant is a bound as those of Clip, which
    drop NaN for the speed of fused kernels.
    """

    def choose(first: Any, second: Any) -> Any:
        chosen = bindings.bind(getattr(relax.op, name)(first, second))
        if not _is_float(first) or isinstance(first, GenericConst) or isinstance(second, GenericConst):
            return chosen
        return bindings.bind(relax.op.where(relax.op.isnan(first), first, chosen))

    # A constant comes first: what TVM chooses between it and NaN is NaN.
    return functools.reduce(choose, sorted(inputs, key=_is_scalar_or_computed))


def _is_scalar_or_computed(value: Any) -> bool:
    return not isinstance(value, GenericConst) or value.value.numpy().size == 1


def convert_mod(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert Mod of floats with the divisor's sign, also by infinity; None where TVM's converter is right."""
    numbers, divisors = inputs[0], inputs[1]
    if attributes.get("fmod") or not _is_float(numbers):
        return None
    rest = bindings.bind(relax.op.mod(numbers, divisors))
    zero = relax.const(0.0, numbers.ty.dtype)
    differ = relax.op.logical_xor(relax.op.less(rest, zero), relax.op.less(divisors, zero))
    moves = relax.op.logical_and(relax.op.not_equal(rest, zero), differ)
    return relax.op.where(moves, relax.op.add(rest, divisors), rest)


def convert_bit_shift(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert BitShift: by a negative amount, or by all bits or more, only the sign is left."""
    numbers, amounts = inputs[0], inputs[1]
    dtype = str(numbers.ty.dtype)
    bits = np.iinfo(dtype).bits
    last, zero = relax.const(bits - 1, dtype), relax.const(0, dtype)
    outside = bindings.bind(relax.op.logical_or(relax.op.less(amounts, zero), relax.op.greater(amounts, last)))
    inside = relax.op.where(outside, last, amounts)
    if attributes["direction"] == b"RIGHT":
        shifted = relax.op.right_shift(numbers, inside)
        return shifted if dtype.startswith("int") else relax.op.where(outside, zero, shifted)
    return relax.op.where(outside, zero, relax.op.left_shift(numbers, inside))


def convert_mean_variance_normalization(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert MeanVarianceNormalization by differences from the mean, which a large offset does not cancel."""
    apart, variance = _centre(inputs[0], list(attributes.get("axes", (0, 2, 3))))
    return relax.op.divide(apart, relax.op.add(relax.op.sqrt(variance), relax.const(1e-9, apart.ty.dtype)))


def _centre(data: Any, axes: list[int]) -> tuple[Any, Any]:
    """Return the differences from the mean over axes, and the variance."""
    apart = data
    for _ in range(2):  # the second removes the rounding error of the first mean
        apart = bindings.bind(relax.op.subtract(apart, relax.op.mean(apart, axes, keepdims=True)))
    return apart, bindings.bind(relax.op.mean(relax.op.multiply(apart, apart), axes, keepdims=True))


def convert_group_normalization(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert GroupNormalization by differences from the mean: TVM's variance cancels where the mean is large.

    None for other types than float32 and shapes that TVM's converter refuses. Scales are one for each group before
    opset 21, and one for each channel since. InstanceNormalization has a group for each channel.
    """
    data, scale, bias = inputs[0], inputs[1], inputs[2]
    shape = [int(each) for each in data.ty.shape]
    groups = int(attributes.get("num_groups", shape[1]))
    if str(data.ty.dtype) != "float32" or groups <= 0 or shape[1] % groups:
        return None
    apart, variance = _centre(bindings.bind(relax.op.reshape(data, (shape[0], groups, -1))), [2])
    epsilon = relax.const(attributes.get("epsilon", 1e-5), "float32")
    normal = bindings.bind(relax.op.multiply(apart, relax.op.rsqrt(relax.op.add(variance, epsilon))))
    count = int(scale.ty.shape[0])
    factors, offsets = (relax.op.reshape(each, (1, count, 1)) for each in (scale, bias))
    split = relax.op.reshape(normal, (shape[0], count, -1))
    return relax.op.reshape(relax.op.add(relax.op.multiply(split, factors), offsets), tuple(shape))


def convert_sign(inputs: Any, _: dict[str, Any]) -> Any | None:
    """Convert Sign of floats; NaN stays NaN. None for integers."""
    data = inputs[0]
    return relax.op.where(relax.op.isnan(data), data, relax.op.sign(data)) if _is_float(data) else None


def convert_thresholded_relu(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert ThresholdedRelu by a choice: TVM multiplies infinities by zero."""
    data, dtype = inputs[0], inputs[0].ty.dtype
    above = relax.op.greater(data, relax.const(float(attributes.get("alpha", 1.0)), dtype))
    return relax.op.where(above, data, relax.const(0.0, dtype))


def convert_lp_normalization(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert LpNormalization; zeros stay zeros."""
    data, axis = inputs[0], [int(attributes.get("axis", -1))]
    if int(attributes.get("p", 2)) == 1:
        norm = relax.op.sum(relax.op.abs(data), axis, keepdims=True)
    else:
        norm = relax.op.sqrt(relax.op.sum(relax.op.multiply(data, data), axis, keepdims=True))
    norm = bindings.bind(norm)
    zero, one = (relax.const(number, data.ty.dtype) for number in (0.0, 1.0))
    return relax.op.divide(data, relax.op.where(relax.op.equal(norm, zero), one, norm))
