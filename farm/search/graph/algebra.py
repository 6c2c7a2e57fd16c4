"""Powers, products, slopes and extremes of all types and ranks, where TVM 0.27's are wrong or lack a form."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir import GenericConst

from farm.search.graph import bindings

# The sum has 24 terms; six rows have 720.
_LARGEST_DET = 4
# Types that TVM's TopK takes.
_SORTED = frozenset({"float16", "float32", "float64", "int8", "int32", "int64", "uint8"})


def _dtype(value: Any) -> str:
    return str(value.ty.dtype.dtype)


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


CONVERTERS: dict[str, Callable[[Any, dict[str, Any]], Any | None]] = {
    "CumProd": _convert_cum_prod,
    "Det": _convert_det,
    "Elu": _convert_elu,
    "Pow": _convert_pow,
    "PRelu": _convert_prelu,
    "ReduceMax": functools.partial(_convert_extreme, "max"),
    "ReduceMin": functools.partial(_convert_extreme, "min"),
    "TopK": _convert_top_k,
}
