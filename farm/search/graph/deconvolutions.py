"""Transposed convolutions written as convolutions whose channels become pixels: part of a graph pipeline.

TVM computes a transposed convolution of stride s one result at a time over data with zeros between them. Its results of
one phase (those at the same place modulo s) are a convolution of the data with every s-th weight; all phases together
are one convolution to s*s times the channels, which schedule families know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax
from tvm.ir import GenericConst

from farm.search.graph import bindings

_TO_NHWC, _TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]


@dataclasses.dataclass(frozen=True)
class Side:
    """One dimension of a transposed convolution of `size` data, with `before` of its results cut off at the beginning.

    A result o, counted before anything is cut, is the sum of data i times weight k with o = i * stride + k. With
    o = q * stride + r that is the sum over t of data q - t times weight r + t * stride.
    """

    size: int
    kernel: int
    stride: int
    before: int
    results: int

    @property
    def taps(self) -> int:
        """Weights of a phase, zeros included where there are fewer."""
        return -(-self.kernel // self.stride)

    @property
    def first(self) -> int:
        """The least q that is computed."""
        return min(self.before // self.stride, self.taps - 1)

    @property
    def padding(self) -> tuple[int, int]:
        """Zeros before and after the data."""
        end = -(-(self.before + self.results) // self.stride)
        return self.taps - 1 - self.first, max(0, end - self.size)

    @property
    def cut(self) -> int:
        """Results to be cut off at the beginning once phases are put together."""
        return self.before - self.first * self.stride


def convolve() -> Any:
    """A module pass over transposed convolutions in NCHW with constant weights, no groups and no dilation."""
    return bindings.rewriting_pass(_convolve, "ConvolveTransposed")


def split_phases(weights: npt.NDArray[Any], strides: tuple[int, int]) -> npt.NDArray[Any]:
    """Weights [in, out, h, w] as those of the convolution, [taps, taps, in, s * s * out]: phases before channels."""
    taps = [-(-size // stride) for size, stride in zip(weights.shape[2:], strides, strict=True)]
    missing = [t * s - size for t, s, size in zip(taps, strides, weights.shape[2:], strict=True)]
    filled = np.pad(weights, [(0, 0), (0, 0), *((0, zeros) for zeros in missing)])
    depth, channels = weights.shape[:2]
    apart = filled.reshape(depth, channels, taps[0], strides[0], taps[1], strides[1])[:, :, ::-1, :, ::-1]
    kernel = apart.transpose(2, 4, 0, 3, 5, 1).reshape(*taps, depth, strides[0] * strides[1] * channels)
    return np.ascontiguousarray(kernel)


def _convolve(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
    others: dict[Any, Sequence[Any]] = {}
    for binding in bindings.list_bindings(function):
        value = binding.value
        if not bindings.is_call(value, "relax.nn.conv2d_transpose") or not isinstance(value.args[1], GenericConst):
            continue
        data, result = (bindings.static_shape(part.ty) for part in (value.args[0], binding.var))
        old, weight = value.attrs, value.args[1]
        if data is None or result is None or old.data_layout != "NCHW" or old.kernel_layout != "IOHW":
            continue
        if int(old.groups) != 1 or any(int(d) != 1 for d in old.dilation) or str(weight.ty.dtype) != "float32":
            continue
        weights = weight.value.numpy()
        sides = [
            Side(data[at], weights.shape[at], int(old.strides[at - 2]), int(old.padding[at - 2]), result[at])
            for at in (2, 3)
        ]
        others[binding.var] = _write(builder, binding, sides, weights)
    return others


def _write(builder: Any, binding: Any, sides: Sequence[Side], weights: npt.NDArray[Any]) -> Sequence[Any]:
    """The bindings that take the place of a transposed convolution."""
    made: list[Any] = []

    def bind(name: str, call: Any) -> Any:
        call = builder.normalize(call)
        made.append(bindings.bind_before(binding, name, call, call.ty))
        return made[-1].var

    (top, bottom), (left, right) = (side.padding for side in sides)
    strides = (sides[0].stride, sides[1].stride)
    channels = weights.shape[1]
    data = bind("pixels_first", relax.op.permute_dims(binding.value.args[0], _TO_NHWC))
    kernel = relax.const(split_phases(weights, strides))
    convolved = bind(
        "phases",
        relax.op.nn.conv2d(data, kernel, padding=[top, left, bottom, right], data_layout="NHWC", kernel_layout="HWIO"),
    )
    batch, height, width, _ = bindings.static_shape(convolved.ty) or ()
    apart = bind("apart", relax.op.reshape(convolved, (batch, height, width, *strides, channels)))
    woven = bind("woven", relax.op.permute_dims(apart, [0, 1, 3, 2, 4, 5]))
    whole = bind("whole", relax.op.reshape(woven, (batch, height * strides[0], width * strides[1], channels)))
    ends = [side.cut + side.results for side in sides]
    if any(side.cut for side in sides) or ends != [height * strides[0], width * strides[1]]:
        whole = bind("cut", relax.op.strided_slice(whole, [1, 2], [side.cut for side in sides], ends))
    return [*made, relax.VarBinding(binding.var, relax.op.permute_dims(whole, _TO_NCHW))]
