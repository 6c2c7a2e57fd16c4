"""Winograd's algorithm F(m, 3) for 3x3 convolutions of stride 1: matrices, TIR function, and the graph pass.

`farm.search.families.winograd` schedules the function. Root mean square error relative to the result's, against
float64, for normal random data and weights summed in float32 in order:

| input channels | direct | F(2, 3) | F(4, 3) | F(6, 3) | F(4, 3), points 1 and 2 |
|---|---|---|---|---|---|
| 64  | 4.3e-7 | 2.6e-7 | 7.7e-7 | 3.3e-6 | 1.7e-6 |
| 128 | 6.1e-7 | 3.6e-7 | 1.0e-6 | 4.5e-6 | 2.3e-6 |
| 256 | 8.6e-7 | 4.9e-7 | 1.4e-6 | 6.1e-6 | 3.2e-6 |
| 512 | 1.2e-6 | 6.7e-7 | 2.0e-6 | 8.5e-6 | 4.4e-6 |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax, te, tirx
from tvm.ir import GenericConst

from farm.search.graph import bindings

# Shape of data [n, h, w, c]; padding as top, left, bottom, right.
Shape = tuple[int, ...]
Padding = tuple[int, ...]
# Returns m for a convolution (data shape, channels, padding, type); 0 to keep it direct.
Choose = Callable[[Shape, int, Padding, str], int]
# Makes the function of a convolution (data shape, channels, padding, m, type).
Make = Callable[[Shape, int, Padding, int, str], Any]

KERNEL = 3
# The function's blocks in order; fused blocks follow them.
BLOCKS = ("pad", "strips", "tiles", "products", "lines", "conv2d")
# Annotation of the block of products with m: block names are replaced by numbers in workloads.
MARK = "farm.winograd"
# Interpolation points besides zero and infinity, with either sign: the least error found among points of few bits. The
# usual 1 and 2 double the error of F(4, 3).
_POINTS = {2: (1.0,), 4: (0.625, 1.5), 6: (0.5, 1.0, 2.0)}


def is_marked(blocks: Iterable[Any]) -> bool:
    """Say whether these blocks belong to the algorithm."""
    return any(MARK in block.annotations for block in blocks)


@functools.cache
def matrices(m: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return A^T, B^T and G of F(m, 3): m results are A^T [(G g) * (B^T d)] for m + 2 data d and 3 weights g.

    They follow from Toom-Cook interpolation at zero, at points with either sign, and at infinity.
    """
    points = np.array([0.0, *(sign * p for p in _POINTS[m] for sign in (1, -1))])
    alpha = m + KERNEL - 1
    data, kernel, result = np.zeros((alpha, alpha)), np.zeros((alpha, KERNEL)), np.zeros((m, alpha))
    for k, point in enumerate(points):
        others = np.delete(points, k)
        data[k, : alpha - 1] = np.poly(others)[::-1]
        kernel[k] = point ** np.arange(KERNEL) / np.prod(point - others)
        result[:, k] = point ** np.arange(m)
    data[-1] = np.poly(points)[::-1]
    kernel[-1, -1] = result[-1, -1] = 1
    return result, data, kernel


def transform_weights(weights: npt.NDArray[Any], m: int) -> npt.NDArray[Any]:
    """Transform weights [3, 3, in, out] to [m + 2, m + 2, in, out] of the same type, in float64."""
    kernel = matrices(m)[2]
    found = np.einsum("ia,abco,jb->ijco", kernel, weights.astype(np.float64), kernel)
    return np.ascontiguousarray(found.astype(weights.dtype))


def transform_data(m: int, data: Sequence[Any]) -> list[Any]:
    """Return B^T d, expanded; terms common to points p and -p are equal expressions that a compiler reuses."""
    matrix = matrices(m)[1]
    found = [_sum(zip(matrix[0], data, strict=True))]
    for k in range(1, m + 1, 2):
        even = _sum(zip(matrix[k][::2], data[::2], strict=True))
        odd = _sum(zip(matrix[k][1::2], data[1::2], strict=True))
        found += [even + odd, even - odd]
    return [*found, _sum(zip(matrix[-1], data, strict=True))]


def transform_products(m: int, products: Sequence[Any]) -> list[Any]:
    """Return A^T p, expanded."""
    matrix = matrices(m)[0]
    found = []
    for i, row in enumerate(matrix):
        pairs = [
            (row[k], products[k] + products[k + 1] if i % 2 == 0 else products[k] - products[k + 1])
            for k in range(1, m + 1, 2)
        ]
        found.append(_sum([(row[0], products[0]), *pairs, (row[-1], products[-1])]))
    return found


def _sum(terms: Iterable[tuple[float, Any]]) -> Any:
    total = None
    for factor, value in terms:
        if factor == 0:
            continue
        # An element of a TE tensor is no expression yet.
        dtype = str(getattr(value, "dtype", None) or value.ty.dtype)
        if total is not None and factor == -1:
            total = total - value
            continue
        term = value if factor == 1 else value * tirx.FloatImm(dtype, float(np.dtype(dtype).type(factor)))
        total = term if total is None else total + term
    return total


@functools.cache
def count_operations(m: int) -> tuple[int, int]:
    """Count the additions and FMAs of one data transform, and of one result transform."""
    result, data, _ = matrices(m)
    forth = sum(int(np.count_nonzero(data[k])) - 1 for k in (0, *range(1, m + 1, 2), -1)) + m // 2
    back = m + sum(int(np.count_nonzero(row)) // 2 for row in result)
    return forth, back


def _choose(at: Any, values: Sequence[Any]) -> Any:
    """Select the value with index `at`; the selection folds away once the loop over `at` is unrolled."""
    found = values[-1]
    for k in range(len(values) - 2, -1, -1):
        found = tirx.Select(at == k, values[k], found)
    return found


@functools.cache
def make_function(
    shape: Shape, channels: int, padding: Padding, m: int, dtype: str = "float32", joined: int = 0
) -> Any:
    """Make the convolution as a TIR function of data and transformed weights.

    Tiles beyond the end are computed in full and cut. For a GPU, all tiles are one loop of `joined` steps, and share no
    strips; steps beyond the last tile repeat it.
    """
    batch, _, _, depth = shape
    rows, columns = count_results(shape, padding)
    tall, wide = count_tiles(shape, padding, m)
    alpha, name, places = m + 2, f"winograd{m}", (joined,) if joined else (batch, tall, wide)
    data = te.placeholder(shape, dtype, name="data")
    weight = te.placeholder((alpha, alpha, depth, channels), dtype, name="weight")
    padded = _pad(data, shape, (batch, tall * m + 2, wide * m + 2, depth), padding, f"{name}_pad")

    def transform_column(i: Any, *at: Any) -> Any:
        *before, c = at
        if joined:
            j, p = before
            tile = tirx.min(p, tirx.IntImm("int64", batch * tall * wide - 1))
            before = [tile // (tall * wide), tile // wide % tall, tile % wide * m + j]
        n, y, x = before
        return _choose(i, transform_data(m, [padded[n, y * m + a, x, c] for a in range(alpha)]))

    def transform_line(i: Any, j: Any, *at: Any) -> Any:
        if joined:
            return _choose(j, transform_data(m, [strips(i, a, *at) for a in range(alpha)]))
        n, y, x, c = at
        return _choose(j, transform_data(m, [strips[i, n, y, x * m + a, c] for a in range(alpha)]))

    def transform_row(n: Any, y: Any, x: Any, o: Any) -> Any:
        at = [(n * tall + y // m) * wide + x // m] if joined else [n, y // m, x // m]
        return _choose(x % m, transform_products(m, [lines(y % m, a, *at, o) for a in range(alpha)]))

    of_strips = (alpha, joined) if joined else (batch, tall, wide * m + 2)
    strips = te.compute((alpha, *of_strips, depth), transform_column, name=f"{name}_strips")
    tiles = te.compute((alpha, alpha, *places, depth), transform_line, name=f"{name}_tiles")
    c = te.reduce_axis((0, depth), name="c")
    products = te.compute(
        (alpha, alpha, *places, channels),
        lambda i, j, *at: te.sum(tiles(i, j, *at[:-1], c) * weight(i, j, c, at[-1]), axis=c),
        # MetaSchedule's rules fail on blocks that read products of several tiles.
        attrs={MARK: m, "schedule_rule": "None"},
        name=f"{name}_products",
    )
    lines = te.compute(
        (m, alpha, *places, channels),
        lambda i, j, *at: _choose(i, transform_products(m, [products(a, j, *at) for a in range(alpha)])),
        name=f"{name}_lines",
    )
    result = te.compute((batch, rows, columns, channels), transform_row, name=f"{name}_conv2d")
    return te.create_prim_func([data, weight, result], index_dtype_override="int64")


def _pad(data: Any, shape: Shape, wanted: Shape, padding: Padding, name: str) -> Any:
    """Return the data among zeros in the `wanted` shape."""
    _, height, width, _ = shape
    top, left, _, _ = padding
    return te.compute(
        wanted,
        lambda n, y, x, c: tirx.if_then_else(
            tirx.all(y >= top, y < top + height, x >= left, x < left + width),
            data[n, y - top, x - left, c],
            tirx.FloatImm(str(data.dtype), 0.0),
        ),
        name=name,
    )


def count_tiles(shape: Shape, padding: Padding, m: int) -> tuple[int, int]:
    """Return the rows and columns of an image's tiles."""
    rows, columns = count_results(shape, padding)
    return -(-rows // m), -(-columns // m)


def count_results(shape: Shape, padding: Padding) -> tuple[int, int]:
    """Return the rows and columns of the result."""
    top, left, bottom, right = padding
    return shape[1] + top + bottom - KERNEL + 1, shape[2] + left + right - KERNEL + 1


def use_winograd(choose: Choose, make: Make = make_function) -> Any:
    """Make a Relax pass that computes convolutions by Winograd's algorithm: `choose` gives m, `make` the function.

    Eligible are constant 3x3 weights in HWIO with NHWC data, floats, stride and dilation 1, one group.
    """

    def run(builder: Any, function: Any) -> Mapping[Any, Sequence[Any]]:
        values = {binding.var: binding.value for binding in bindings.list_bindings(function)}
        others: dict[Any, Sequence[Any]] = {}
        for variable, call in values.items():
            if not bindings.is_call(call, "relax.nn.conv2d") or not bindings.is_nhwc(call.attrs):
                continue
            data, weights = call.args
            weights = values.get(weights, weights)
            shape, dtype = bindings.static_shape(data.ty), str(data.ty.dtype)
            if shape is None or dtype not in ("float32", "float16") or not isinstance(weights, GenericConst):
                continue
            kernel = weights.value.numpy()
            if str(kernel.dtype) != dtype or kernel.shape[:3] != (KERNEL, KERNEL, shape[3]):
                continue
            if [int(s) for s in (*call.attrs.strides, *call.attrs.dilation)] != [1, 1, 1, 1]:
                continue
            padding = tuple(int(p) for p in call.attrs.padding)
            m = choose(shape, kernel.shape[3], padding, dtype)
            if m:
                made = make(shape, kernel.shape[3], padding, m, dtype)
                # Private, since every public function is called main.
                called = builder.add_func(made.without_attr("global_symbol"), f"winograd{m}_conv2d")
                call = relax.call_tir(called, (data, relax.const(transform_weights(kernel, m))), call.ty)
                others[variable] = [relax.VarBinding(variable, call)]
        return others

    return bindings.rewriting_pass(run, "UseWinograd")
