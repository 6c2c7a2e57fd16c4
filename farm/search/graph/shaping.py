"""Converters for ONNX operators that move or repeat elements, where TVM 0.27's are wrong or lack a form."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax, topi
from tvm.ir import GenericConst

from farm.search.graph import bindings, pooling

# Of a value; 8 GiB of float32, the memory of the greatest boards.
MOST_ELEMENTS = 1 << 31


def _convert_split(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert Split into parts of which one is empty or the last is smaller; None for others, which TVM handles."""
    data, sizes = inputs[0], inputs[1]
    shape, axis = bindings.static_shape(data.ty), int(attributes.get("axis", 0))
    if shape is None or not (sizes is None or isinstance(sizes, GenericConst)):
        return None
    count, given = attributes["tvm_custom"]["num_outputs"], attributes.get("split")
    size = -(-shape[axis] // count)
    parts = [size] * (count - 1) + [shape[axis] - size * (count - 1)] if sizes is None else sizes.value.numpy().tolist()
    parts = parts if given is None else list(given)
    if min(parts) > 0 and (sizes is not None or given is not None or len(set(parts)) == 1):
        return None
    ends = list(itertools.accumulate(parts))
    bounds = zip([0, *ends[:-1]], ends, strict=True)
    return relax.Tuple([relax.op.strided_slice(data, [axis], [begin], [end]) for begin, end in bounds])


def _convert_tile(inputs: Any, _: dict[str, Any]) -> Any | None:
    """Convert Tile along several axes to gathers: TVM simplifies its indices wrongly. None along one."""
    data, repeats = inputs[0], inputs[1]
    shape = bindings.static_shape(data.ty)
    if shape is None or not isinstance(repeats, GenericConst):
        return None
    counts = repeats.value.numpy().tolist()
    if sum(count != 1 for count in counts) < 2 or math.prod(counts) * math.prod(shape) > MOST_ELEMENTS:
        return None
    for axis, (count, size) in enumerate(zip(counts, shape, strict=True)):
        if count != 1:
            data = relax.op.take(data, relax.const(np.arange(count * size) % max(1, size)), axis, mode="clip")
    return data


def _convert_reshape(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert Reshape to a shape with a size of 0; None for others, which TVM handles."""
    data, shape = inputs[0], inputs[1]
    if not attributes.get("allowzero", 0) or not isinstance(shape, GenericConst):
        return None
    sizes = shape.value.numpy().tolist()
    return relax.const(tvm.runtime.empty(sizes, data.ty.dtype.dtype)) if 0 in sizes else None


def _convert_constant_of_shape(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert ConstantOfShape of a constant shape to a constant, so that shapes are known early; None for others."""
    shape, value = inputs[0], attributes.get("value")
    if not isinstance(shape, GenericConst):
        return None
    array = np.zeros(1, "float32") if value is None else onnx.numpy_helper.to_array(value)
    return relax.const(np.full(shape.value.numpy().tolist(), array.flat[0]), array.dtype.name)


def _convert_space_to_depth(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert SpaceToDepth with the pixels of a block after their channel; None for the other order."""
    if attributes.get("mode") != b"CRD":
        return None
    data, block = inputs[0], int(attributes["blocksize"])
    batch, channels, height, width = bindings.static_shape(data.ty) or ()
    apart = relax.op.reshape(data, (batch, channels, height // block, block, width // block, block))
    moved = relax.op.permute_dims(apart, [0, 1, 3, 5, 2, 4])
    return relax.op.reshape(moved, (batch, channels * block**2, height // block, width // block))


def _convert_eye_like(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert EyeLike to a constant."""
    data = inputs[0]
    kind = attributes.get("dtype")
    dtype = str(data.ty.dtype.dtype) if kind is None else onnx.helper.tensor_dtype_to_np_dtype(kind).name
    rows, columns = bindings.static_shape(data.ty) or ()
    return relax.const(np.eye(rows, columns, int(attributes.get("k", 0))), dtype)


def _convert_one_hot(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert OneHot by comparing indices with positions; None for a computed depth, which TVM refuses."""
    indices, depth, values = inputs[0], inputs[1], inputs[2]
    shape = bindings.static_shape(indices.ty)
    if shape is None or not isinstance(depth, GenericConst):
        return None
    count, axis = int(depth.value.numpy().item()), int(attributes.get("axis", -1)) % (len(shape) + 1)
    whole = relax.op.expand_dims(relax.op.astype(indices, "int64"), axis)
    whole = relax.op.where(
        relax.op.less(whole, relax.const(0, "int64")), relax.op.add(whole, relax.const(count, "int64")), whole
    )
    positions = np.arange(count, dtype="int64").reshape(-1, *[1] * (len(shape) - axis))
    off, on = (relax.op.strided_slice(values, [0], [at], [at + 1]) for at in (0, 1))
    return relax.op.where(relax.op.equal(whole, relax.const(positions, "int64")), on, off)


def _convert_pad(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert a constant Pad to an operator that later passes understand; None for other modes and computed widths."""
    data, pads, fill, axes = (inputs[at] for at in range(4))
    shape = bindings.static_shape(data.ty)
    computed = any(each is not None and not isinstance(each, GenericConst) for each in (pads, axes))
    if attributes.get("mode", b"constant") not in (b"constant", "constant") or shape is None or computed:
        return None
    widths = [int(w) for w in (attributes["pads"] if pads is None else pads.value.numpy())]
    chosen = range(len(shape)) if axes is None else [int(axis) % len(shape) for axis in axes.value.numpy()]
    before, after = [0] * len(shape), [0] * len(shape)
    for axis, low, high in zip(chosen, widths[: len(widths) // 2], widths[len(widths) // 2 :], strict=True):
        before[axis], after[axis] = low, high
    constant = isinstance(fill, GenericConst) or fill is None
    negative = min([*before, *after], default=0) < 0
    if constant and not negative and axes is None and "float" not in str(data.ty.dtype):
        return None
    if negative:  # it cuts
        begins, ends = (
            [max(0, -low) for low in before],
            [s - max(0, -high) for s, high in zip(shape, after, strict=True)],
        )
        data = relax.op.strided_slice(data, list(range(len(shape))), begins, ends)
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        before, after = [max(0, low) for low in before], [max(0, high) for high in after]
    pairs = [width for pair in zip(before, after, strict=True) for width in pair]
    if constant:
        number = float(attributes.get("value", 0.0)) if fill is None else float(fill.value.numpy().item())
        return relax.op.nn.pad(data, pairs, "constant", number)
    inside = np.pad(np.ones(shape, "bool"), list(zip(before, after, strict=True)))
    return relax.op.where(relax.const(inside), relax.op.nn.pad(data, pairs, "constant", 0.0), fill)


def _convert_col2im(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert Col2Im: each pixel gathers the columns' elements that lie on it, and sums them; None for computed sizes.

    The blocks lie as the windows of a pool over the image.
    """
    data = inputs[0]
    if not all(isinstance(value, GenericConst) for value in list(inputs)[1:3]):
        return None
    image, block = (inputs[at].value.numpy().tolist() for at in (1, 2))
    sides = pooling.plan_sides((0, 0, *image), attributes | {"kernel_shape": block})
    batch, rows, columns = bindings.static_shape(data.ty) or ()
    channels, taps = rows // math.prod(block), math.prod(block)
    pixels, inside = np.zeros((1, 1), "int64"), np.ones((1, 1), "bool")
    for side in sides:
        at = side.starts() + np.arange(side.kernel)[:, None] * side.dilation
        pixels = pixels[:, None, :, None] * side.size + at[:, None]
        pixels = pixels.reshape(pixels.shape[0] * pixels.shape[1], -1)
        inside = (inside[:, None, :, None] & ((at >= 0) & (at < side.size))[:, None]).reshape(pixels.shape)
    lying: list[list[int]] = [[] for _ in range(math.prod(image))]
    for place in np.flatnonzero(inside):
        lying[pixels.flat[place]].append(int(place))
    # Pixels with fewer elements gather a zero behind the columns.
    most = max(1, *map(len, lying))
    chosen = np.array([[*each, *[taps * columns] * (most - len(each))] for each in lying])
    flat = relax.op.nn.pad(relax.op.reshape(data, (batch, channels, taps * columns)), [0, 0, 0, 0, 0, 1])
    sums = relax.op.sum(relax.op.take(flat, relax.const(chosen), 2, mode="clip"), 3)
    return relax.op.reshape(sums, (batch, channels, *image))


def _convert_reverse_sequence(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert ReverseSequence to TVM's operator."""
    time, batch = int(attributes.get("time_axis", 0)), int(attributes.get("batch_axis", 1))
    return relax.op.reverse_sequence(inputs[0], inputs[1], time, batch)


def _convert_tensor_scatter(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert TensorScatter by gathers: each position of the cache looks for its place in the update."""
    cache, update, starts = inputs[0], inputs[1], inputs[2]
    shape = bindings.static_shape(cache.ty) or ()
    axis = int(attributes.get("axis", -2)) % len(shape)
    size, count = shape[axis], (bindings.static_shape(update.ty) or ())[axis]
    positions = relax.const(np.arange(size).reshape(-1, *[1] * (len(shape) - axis - 1)), "int64")
    starts = relax.const(np.zeros(shape[0]), "int64") if starts is None else starts
    places = relax.op.subtract(positions, relax.op.reshape(starts, (shape[0], *[1] * (len(shape) - 1))))
    if attributes.get("mode") == b"circular":
        places = relax.op.floor_mod(places, relax.const(size, "int64"))
    first, last = relax.const(0, "int64"), relax.const(count - 1, "int64")
    inside = relax.op.logical_and(relax.op.greater_equal(places, first), relax.op.less_equal(places, last))
    nearest = relax.op.minimum(relax.op.maximum(places, first), last)
    return relax.op.where(inside, relax.op.gather_elements(update, relax.op.broadcast_to(nearest, shape), axis), cache)


def _convert_sequence_insert(inputs: Any, _: dict[str, Any]) -> Any | None:
    """Convert SequenceInsert at a place counted from the end, where TVM is off by one; None for others."""
    items, item, position = list(inputs[0]), inputs[1], inputs[2]
    if not isinstance(position, GenericConst) or (place := int(position.value.numpy().item())) >= 0:
        return None
    if place < -len(items):
        raise ValueError(f"the position {place} is outside of a sequence of {len(items)}")
    return relax.Tuple([*items[:place], item, *items[place:]])


def _convert_bit_cast(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert BitCast to a type of the same width."""
    data = inputs[0]
    given, wanted = str(data.ty.dtype.dtype), onnx.helper.tensor_dtype_to_np_dtype(attributes["to"])
    if wanted.itemsize != np.dtype(given).itemsize:
        raise ValueError(f"{given} and {wanted.name} differ in width")
    if "float" not in given + wanted.name:
        return relax.op.astype(data, wanted.name)
    return relax.BlockBuilder.current().call_te(topi.reinterpret, data, wanted.name)


CONVERTERS = {
    "BitCast": _convert_bit_cast,
    "Col2Im": _convert_col2im,
    "ConstantOfShape": _convert_constant_of_shape,
    "EyeLike": _convert_eye_like,
    "OneHot": _convert_one_hot,
    "Pad": _convert_pad,
    "Reshape": _convert_reshape,
    "ReverseSequence": _convert_reverse_sequence,
    "SequenceInsert": _convert_sequence_insert,
    "SequenceLength": lambda inputs, _: relax.const(len(inputs[0].ty.fields), "int64"),  # also of Split's
    "SpaceToDepth": _convert_space_to_depth,
    "Split": _convert_split,
    "TensorScatter": _convert_tensor_scatter,
    "Tile": _convert_tile,
}
