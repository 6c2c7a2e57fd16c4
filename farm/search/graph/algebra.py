"""Element-wise operators, norms, reductions and Fourier transforms of ONNX, where TVM 0.27's are wrong or lack a form.

Wrong are mostly the edges: NaN, infinities, wide shifts, zero norms, and means that cancel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax, te, tirx
from tvm.ir import GenericConst

from farm.search.graph import bindings

Floats = npt.NDArray[np.float64]

# The sum has 24 terms; six rows have 720.
_LARGEST_DET = 4
# Types that TVM's TopK takes.
_SORTED = frozenset({"float16", "float32", "float64", "int8", "int32", "int64", "uint8"})
# A matrix of 64 MiB in float32: real signals of 2,896 elements, both sides.
_MOST_ELEMENTS = 1 << 24


def _dtype(value: Any) -> str:
    return str(value.ty.dtype.dtype)


def _is_float(value: Any) -> bool:
    return "float" in _dtype(value)


def _convert_pow(inputs: Any, _: dict[str, Any]) -> Any | None:
    """Convert Pow of integers or of two types; None for floats of one type. The result has the type of the base."""
    base, exponent = inputs[0], inputs[1]
    dtype = _dtype(base)
    if dtype == _dtype(exponent) and "float" in dtype:
        return None
    wide = dtype if "float" in dtype else "float64"
    powers = relax.op.power(relax.op.astype(base, wide), relax.op.astype(exponent, wide))
    return powers if wide == dtype else relax.op.astype(relax.op.trunc(powers), dtype)


def _convert_prelu(inputs: Any, _: dict[str, Any]) -> Any | None:
    """Convert PRelu by a product and a choice where TVM would take a vector for the last dimension's.

    None for one slope and for slopes of one dimension, which TVM handles.
    """
    data, slope = inputs[0], inputs[1]
    shape, slopes = bindings.static_shape(data.ty), bindings.static_shape(slope.ty)
    if shape is None or slopes is None or len(slopes) > 1 or slopes in ((), (1,)) or shape[-1:] == slopes:
        return None
    # Models of old converters give one slope per channel without its dimensions.
    slope = relax.op.reshape(slope, (slopes[0], *[1] * (len(shape) - 2)))
    zero = relax.const(0, _dtype(data))
    return relax.op.where(relax.op.less(data, zero), relax.op.multiply(data, slope), data)


def _convert_extreme(name: str, inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert ReduceMax and ReduceMin of floats, of bytes that stand for bool, and of nothing; None for others."""
    data, axes = inputs[0], inputs[1]
    shape, dtype = bindings.static_shape(data.ty), _dtype(data)
    if shape is None or not (axes is None or isinstance(axes, GenericConst)):
        return None
    if dtype != "bool" and "float" not in dtype and 0 not in shape:
        return None
    chosen = list(attributes.get("axes", ())) if axes is None else axes.value.numpy().tolist()
    if not chosen and attributes.get("noop_with_empty_axes", 0):
        return data
    keep = bool(attributes.get("keepdims", 1))
    lowest = name == "max"
    if 0 in shape:
        least = np.zeros(shape, "uint8" if dtype == "bool" else dtype)
        reduced = getattr(np, name)(least, tuple(chosen) or None, keepdims=keep, initial=_bound(dtype, lowest))
        return relax.const(reduced.astype(dtype), dtype)
    if dtype == "bool":
        return relax.op.astype(getattr(relax.op, name)(relax.op.astype(data, "uint8"), chosen or None, keep), "bool")
    places = {at % len(shape) for at in chosen} or set(range(len(shape)))
    if not places:
        return data
    found = relax.BlockBuilder.current().emit_te(_find_extreme, data, sorted(places), lowest, primfunc_name_hint=name)
    return found if keep else relax.op.reshape(found, [size for at, size in enumerate(shape) if at not in places])


def _find_extreme(data: Any, places: list[int], lowest: bool) -> Any:
    """Compute the largest or the least element along dimensions, which stay with one element.

    It begins with infinity: TVM's own begins with the largest finite number, and so finds that in a row of -inf.
    """
    steps = {at: te.reduce_axis((0, data.shape[at]), f"k{at}") for at in places}
    choose = tirx.max if lowest else tirx.min
    reducer = te.comm_reducer(lambda a, b: choose(a, b), lambda dtype: tirx.const(-np.inf if lowest else np.inf, dtype))

    def compute(*indices: Any) -> Any:
        return reducer(data(*(steps.get(at, index) for at, index in enumerate(indices))), axis=list(steps.values()))

    shape = [1 if at in steps else size for at, size in enumerate(data.shape)]
    return te.compute(shape, compute, name="extreme")


def _bound(dtype: str, lowest: bool) -> Any:
    """Return the least or the greatest value of a type, with infinities."""
    if dtype == "bool":
        return 0 if lowest else 1
    if "float" in dtype:
        return -np.inf if lowest else np.inf
    return np.iinfo(dtype).min if lowest else np.iinfo(dtype).max


def _convert_elu(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert Elu of other floats than float32, which alone TVM's converter takes; ONNX's body of Celu uses it."""
    data, dtype = inputs[0], _dtype(inputs[0])
    if dtype == "float32":
        return None
    zero, one, alpha = (relax.const(v, dtype) for v in (0.0, 1.0, float(attributes.get("alpha", 1.0))))
    curve = relax.op.multiply(alpha, relax.op.subtract(relax.op.exp(relax.op.minimum(data, zero)), one))
    return relax.op.add(relax.op.maximum(data, zero), curve)


def _convert_cum_prod(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert CumProd along a constant axis."""
    data, axis_of = inputs[0], inputs[1]
    shape = bindings.static_shape(data.ty)
    if shape is None or not isinstance(axis_of, GenericConst):
        return None
    axis, dtype = int(axis_of.value.numpy().item()) % len(shape), _dtype(data)
    reverse = bool(attributes.get("reverse", 0))
    data = relax.op.flip(data, axis) if reverse else data
    products = relax.op.cumprod(data, axis, dtype)
    if attributes.get("exclusive", 0):
        ones = relax.const(np.ones((*shape[:axis], 1, *shape[axis + 1 :]), dtype), dtype)
        products = relax.op.concat([ones, relax.op.strided_slice(products, [axis], [0], [shape[axis] - 1])], axis)
    return relax.op.flip(products, axis) if reverse else products


def _convert_det(inputs: Any, _: dict[str, Any]) -> Any:
    """Convert Det of small matrices to the sum over all permutations, in float64."""
    data, dtype = inputs[0], _dtype(inputs[0])
    *batch, size = (bindings.static_shape(data.ty) or ())[:-1]
    if not 0 < size <= _LARGEST_DET:
        raise ValueError(f"matrices of {size}x{size} are not supported; the largest are {_LARGEST_DET}x{_LARGEST_DET}")
    orders = list(itertools.permutations(range(size)))
    places = np.array(orders) + size * np.arange(size)
    signs = np.array([(-1.0) ** sum(a > b for a, b in itertools.combinations(order, 2)) for order in orders])
    flat = relax.op.reshape(relax.op.astype(data, "float64"), (*batch, size * size))
    factors = relax.op.take(flat, relax.const(places, "int64"), len(batch), mode="clip")
    terms = relax.op.multiply(relax.op.prod(factors, [-1]), relax.const(signs, "float64"))
    return relax.op.astype(relax.op.sum(terms, [-1]), dtype)


def _convert_top_k(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert TopK of types that TVM does not sort by wider ones of the same order, and of none; None for others.

    Results in any order (`sorted` of 0) are sorted, too.
    """
    data, count = inputs[0], inputs[1]
    shape, dtype = bindings.static_shape(data.ty), _dtype(data)
    if shape is None or not isinstance(count, GenericConst):
        return None
    size, axis = int(count.value.numpy().item()), int(attributes.get("axis", -1)) % len(shape)
    if not size:  # TVM would return all
        none = (*shape[:axis], 0, *shape[axis + 1 :])
        return relax.Tuple([relax.const(tvm.runtime.empty(none, kind)) for kind in (dtype, "int64")])
    if dtype in _SORTED and attributes.get("sorted", 1):
        return None
    # The highest bit tells uint64 from int64.
    highest = relax.const(np.iinfo("int64").min, "int64")
    wide = dtype if dtype in _SORTED else "float32" if "float" in dtype else "int64"
    data = relax.op.astype(data, wide)
    data = relax.op.bitwise_xor(data, highest) if dtype == "uint64" else data
    largest = bool(attributes.get("largest", 1))
    found = relax.BlockBuilder.current().emit(relax.op.topk(data, size, axis, "both", largest, "int64"))
    values = relax.op.bitwise_xor(found[0], highest) if dtype == "uint64" else found[0]
    return relax.Tuple([relax.op.astype(values, dtype), found[1]])


def _convert_extremum(name: str, inputs: Any, _: dict[str, Any]) -> Any:
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


def _convert_mod(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert Mod of floats with the divisor's sign, also by infinity; None where TVM's converter is right."""
    numbers, divisors = inputs[0], inputs[1]
    if attributes.get("fmod") or not _is_float(numbers):
        return None
    rest = bindings.bind(relax.op.mod(numbers, divisors))
    zero = relax.const(0.0, numbers.ty.dtype)
    differ = relax.op.logical_xor(relax.op.less(rest, zero), relax.op.less(divisors, zero))
    moves = relax.op.logical_and(relax.op.not_equal(rest, zero), differ)
    return relax.op.where(moves, relax.op.add(rest, divisors), rest)


def _convert_bit_shift(inputs: Any, attributes: dict[str, Any]) -> Any:
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


def _convert_mean_variance_normalization(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert MeanVarianceNormalization by differences from the mean, which a large offset does not cancel."""
    apart, variance = _centre(inputs[0], list(attributes.get("axes", (0, 2, 3))))
    return relax.op.divide(apart, relax.op.add(relax.op.sqrt(variance), relax.const(1e-9, apart.ty.dtype)))


def _centre(data: Any, axes: list[int]) -> tuple[Any, Any]:
    """Return the differences from the mean over axes, and the variance."""
    apart = data
    for _ in range(2):  # the second removes the rounding error of the first mean
        apart = bindings.bind(relax.op.subtract(apart, relax.op.mean(apart, axes, keepdims=True)))
    return apart, bindings.bind(relax.op.mean(relax.op.multiply(apart, apart), axes, keepdims=True))


def _convert_group_normalization(inputs: Any, attributes: dict[str, Any]) -> Any | None:
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


def _convert_sign(inputs: Any, _: dict[str, Any]) -> Any | None:
    """Convert Sign of floats; NaN stays NaN. None for integers."""
    data = inputs[0]
    return relax.op.where(relax.op.isnan(data), data, relax.op.sign(data)) if _is_float(data) else None


def _convert_thresholded_relu(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert ThresholdedRelu by a choice: TVM multiplies infinities by zero."""
    data, dtype = inputs[0], inputs[0].ty.dtype
    above = relax.op.greater(data, relax.const(float(attributes.get("alpha", 1.0)), dtype))
    return relax.op.where(above, data, relax.const(0.0, dtype))


def _convert_lp_normalization(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert LpNormalization; zeros stay zeros."""
    data, axis = inputs[0], [int(attributes.get("axis", -1))]
    if int(attributes.get("p", 2)) == 1:
        norm = relax.op.sum(relax.op.abs(data), axis, keepdims=True)
    else:
        norm = relax.op.sqrt(relax.op.sum(relax.op.multiply(data, data), axis, keepdims=True))
    norm = bindings.bind(norm)
    zero, one = (relax.const(number, data.ty.dtype) for number in (0.0, 1.0))
    return relax.op.divide(data, relax.op.where(relax.op.equal(norm, zero), one, norm))


def make_matrix(size: int, parts: int, length: int, inverse: bool, onesided: bool) -> Floats:
    """Return the matrix [used * parts, results * result parts] of a transform of `length`.

    `used` is at most `size`; the rest of the axis is not read. Parts are the real one, or it and the imaginary one,
    which alternate in rows and columns. One-sided inverse results are real.
    """
    half = length // 2 + 1
    used = min(size, half if inverse and onesided else length)
    results = half if onesided and not inverse else length
    if 2 * parts * used * results > _MOST_ELEMENTS:
        raise NotImplementedError(f"a transform of length {length} is too long")
    # Whole turns are left out in integers, where they cost no precision.
    angles = np.outer(np.arange(used), np.arange(results)) % length * (2 * np.pi / length)
    cosines, sines = np.cos(angles), np.sin(angles) * (1 if inverse else -1)
    if inverse and onesided:  # each element also stands for its conjugate, but for the first and a middle one
        twice = np.where((np.arange(used) * 2 % length == 0), 1, 2)[:, None]
        cosines, sines = cosines * twice, sines * twice
    whole = np.array([[cosines, sines], [-sines, cosines]]) / (length if inverse else 1)
    whole = whole[:parts, : 1 if inverse and onesided else 2]
    return whole.transpose(2, 0, 3, 1).reshape(used * parts, -1)


def _convert_dft(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert DFT: its axis is an attribute before opset 20, an input since."""
    data, rank = inputs[0], len(inputs[0].ty.shape)
    inverse, onesided = bool(attributes.get("inverse")), bool(attributes.get("onesided"))
    axis = _number(inputs[2], -2) if attributes["opset"] >= 20 else int(attributes.get("axis", 1))
    axis %= rank
    shape = bindings.static_shape(data.ty) or ()
    default = 2 * (shape[axis] - 1) if inverse and onesided else shape[axis]
    matrix = make_matrix(shape[axis], shape[-1], _number(inputs[1], default), inverse, onesided)
    order = [*(at for at in range(rank - 1) if at != axis), axis, rank - 1]
    moved = relax.op.permute_dims(
        bindings.bind(relax.op.strided_slice(data, [axis], [0], [len(matrix) // shape[-1]])), order
    )
    found = _multiply(bindings.bind(moved), matrix, 1 if inverse and onesided else 2)
    return relax.op.permute_dims(found, [order.index(at) for at in range(rank)])


def _convert_stft(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert STFT: gather frames, then transform each; a constant window is part of the matrix."""
    data, window = inputs[0], inputs[2]
    _, size, parts = bindings.static_shape(data.ty) or ()
    step = _number(inputs[1], 1)
    length = _number(inputs[3], size if window is None else int(window.ty.shape[0]))
    matrix = make_matrix(length, parts, length, False, bool(attributes.get("onesided", 1)))
    starts = np.arange((size - length) // step + 1) * step
    frames = bindings.bind(relax.op.take(data, relax.const(starts[:, None] + np.arange(length)), 1, mode="clip"))
    if isinstance(window, GenericConst):
        matrix *= np.repeat(window.value.numpy().astype("float64"), parts)[:, None]
    elif window is not None:
        frames = bindings.bind(relax.op.multiply(frames, relax.op.reshape(window, (length, 1))))
    return _multiply(frames, matrix, 2)


def _multiply(data: Any, matrix: Floats, parts: int) -> Any:
    """Multiply the last two dimensions, flattened, by the matrix; split the result into `parts`."""
    *outer, size, given = bindings.static_shape(data.ty) or ()
    dtype = str(data.ty.dtype)
    wide = dtype if dtype == "float64" else "float32"
    rows = bindings.bind(relax.op.astype(relax.op.reshape(data, (*outer, size * given)), wide))
    product = bindings.bind(relax.op.matmul(rows, relax.const(matrix, wide)))
    return bindings.bind(relax.op.astype(relax.op.reshape(product, (*outer, matrix.shape[1] // parts, parts)), dtype))


def _number(value: Any, default: int) -> int:
    """Return a constant input's number, the default where there is no input."""
    if value is None:
        return default
    if not isinstance(value, GenericConst):
        raise NotImplementedError("computed lengths, steps and axes are not supported")
    return int(value.value.numpy().item())


CONVERTERS: dict[str, Callable[[Any, dict[str, Any]], Any | None]] = {
    "BitShift": _convert_bit_shift,
    "CumProd": _convert_cum_prod,
    "DFT": _convert_dft,
    "Det": _convert_det,
    "Elu": _convert_elu,
    "GroupNormalization": _convert_group_normalization,
    "InstanceNormalization": _convert_group_normalization,
    "LpNormalization": _convert_lp_normalization,
    "Max": functools.partial(_convert_extremum, "maximum"),
    "MeanVarianceNormalization": _convert_mean_variance_normalization,
    "Min": functools.partial(_convert_extremum, "minimum"),
    "Mod": _convert_mod,
    "Pow": _convert_pow,
    "PRelu": _convert_prelu,
    "ReduceMax": functools.partial(_convert_extreme, "max"),
    "ReduceMin": functools.partial(_convert_extreme, "min"),
    "STFT": _convert_stft,
    "Sign": _convert_sign,
    "ThresholdedRelu": _convert_thresholded_relu,
    "TopK": _convert_top_k,
}
