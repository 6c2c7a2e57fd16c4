"""A transposed convolution as a convolution to more channels: what is padded, cut and put where."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from farm.search.graph.decomposition import Side, split_phases

Array = npt.NDArray[np.float64]


def transpose_convolve(data: Array, weights: Array, sides: tuple[Side, Side]) -> Array:
    """By its definition: each datum spreads the weights over results. [h, w, in], [in, out, h, w]: [h, w, out]."""
    whole = [(side.size - 1) * side.stride + side.kernel + side.results for side in sides]
    found = np.zeros((*whole, weights.shape[1]))
    for row, column in itertools.product(*(range(side.size) for side in sides)):
        spread = np.einsum("i,iohw->hwo", data[row, column], weights)
        top, left = row * sides[0].stride, column * sides[1].stride
        found[top : top + sides[0].kernel, left : left + sides[1].kernel] += spread
    (top, left), (height, width) = ([getattr(side, name) for side in sides] for name in ("before", "results"))
    return found[top : top + height, left : left + width]


def convolve(data: Array, kernel: Array) -> Array:
    tall, wide = kernel.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(data, (tall, wide), (0, 1))
    return np.asarray(np.einsum("yxihw,hwio->yxo", windows, kernel))


@st.composite
def draw_side(draw: st.DrawFn) -> Side:
    """One dimension with paddings that leave a result, and more zeros at its end as ONNX's output_padding has them."""
    size, kernel, stride = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    whole = (size - 1) * stride + kernel + draw(st.integers(0, stride - 1))
    before = draw(st.integers(0, min(kernel, whole - 1)))
    return Side(size, kernel, stride, before, draw(st.integers(1, whole - before)))


@given(draw_side(), draw_side())
def test_phases_put_together_are_the_transposed_convolution(tall: Side, wide: Side) -> None:
    """For all kernels, strides and paddings, asymmetric ones included."""
    random = np.random.default_rng(0)
    data = random.standard_normal((tall.size, wide.size, 2))
    weights = random.standard_normal((2, 3, tall.kernel, wide.kernel))
    padded = np.pad(data, [tall.padding, wide.padding, (0, 0)])
    phases = convolve(padded, split_phases(weights, (tall.stride, wide.stride)))
    height, width, _ = phases.shape
    apart = phases.reshape(height, width, tall.stride, wide.stride, 3).transpose(0, 2, 1, 3, 4)
    whole = apart.reshape(height * tall.stride, width * wide.stride, 3)
    found = whole[tall.cut : tall.cut + tall.results, wide.cut : wide.cut + wide.results]
    np.testing.assert_allclose(found, transpose_convolve(data, weights, (tall, wide)), atol=1e-9)
