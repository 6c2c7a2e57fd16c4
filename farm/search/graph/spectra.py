"""DFT and STFT as products with constant matrices of cosines and sines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax
from tvm.ir import GenericConst

from farm.search.graph import bindings

Floats = npt.NDArray[np.float64]

# A matrix of 64 MiB in float32: real signals of 2,896 elements, both sides.
_MOST_ELEMENTS = 1 << 24


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


CONVERTERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {"DFT": _convert_dft, "STFT": _convert_stft}
