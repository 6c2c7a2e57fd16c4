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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from farm.search.graph import bindings

# Shape of data [n, h, w, c]; padding as top, left, bottom, right.
Shape = tuple[int, int, int, int]
Padding = tuple[int, int, int, int]
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
def make_function(shape: Shape, channels: int, padding: Padding, m: int, dtype: str = "float32") -> Any:
    """Make the convolution as a TIR function of data and transformed weights.

    Tiles beyond the end are computed in full and cut.
    """
    batch, _, _, depth = shape
    rows, columns = count_results(shape, padding)
    tall, wide = count_tiles(shape, padding, m)
    alpha, name = m + 2, f"winograd{m}"
    data, weight, padded = _make_operands(shape, channels, padding, m, dtype)
    strips = te.compute(
        (alpha, batch, tall, wide * m + 2, depth),
        lambda i, n, y, x, c: _choose(i, transform_data(m, [padded[n, y * m + a, x, c] for a in range(alpha)])),
        name=f"{name}_strips",
    )
    tiles = te.compute(
        (alpha, alpha, batch, tall, wide, depth),
        lambda i, j, n, y, x, c: _choose(j, transform_data(m, [strips[i, n, y, x * m + a, c] for a in range(alpha)])),
        name=f"{name}_tiles",
    )
    c = te.reduce_axis((0, depth), name="c")
    products = te.compute(
        (alpha, alpha, batch, tall, wide, channels),
        lambda i, j, n, y, x, o: te.sum(tiles[i, j, n, y, x, c] * weight[i, j, c, o], axis=c),
        # MetaSchedule's rules fail on blocks that read products of several tiles.
        attrs={MARK: m, "schedule_rule": "None"},
        name=f"{name}_products",
    )
    lines = te.compute(
        (m, alpha, batch, tall, wide, channels),
        lambda i, j, n, y, x, o: _choose(i, transform_products(m, [products[a, j, n, y, x, o] for a in range(alpha)])),
        name=f"{name}_lines",
    )
    result = te.compute(
        (batch, rows, columns, channels),
        lambda n, y, x, o: _choose(
            x % m, transform_products(m, [lines[y % m, a, n, y // m, x // m, o] for a in range(alpha)])
        ),
        name=f"{name}_conv2d",
    )
    return te.create_prim_func([data, weight, result], index_dtype_override="int64")


@functools.cache
def make_joined(shape: Shape, channels: int, padding: Padding, m: int, dtype: str, count: int) -> Any:
    """Make the same function for a GPU: all tiles are one loop of `count` steps, and share no strips.

    Steps beyond the last tile repeat it.
    """
    batch, _, _, depth = shape
    rows, columns = count_results(shape, padding)
    tall, wide = count_tiles(shape, padding, m)
    alpha, name = m + 2, f"winograd{m}"
    data, weight, padded = _make_operands(shape, channels, padding, m, dtype)

    def transform_column(i: Any, j: Any, p: Any, c: Any) -> Any:
        tile = tirx.min(p, tirx.IntImm("int64", batch * tall * wide - 1))
        n, y, x = tile // (tall * wide), tile // wide % tall, tile % wide
        return _choose(i, transform_data(m, [padded[n, y * m + a, x * m + j, c] for a in range(alpha)]))

    strips = te.compute((alpha, alpha, count, depth), transform_column, name=f"{name}_strips")
    tiles = te.compute(
        (alpha, alpha, count, depth),
        lambda i, j, p, c: _choose(j, transform_data(m, [strips[i, a, p, c] for a in range(alpha)])),
        name=f"{name}_tiles",
    )
    c = te.reduce_axis((0, depth), name="c")
    products = te.compute(
        (alpha, alpha, count, channels),
        lambda i, j, p, o: te.sum(tiles[i, j, p, c] * weight[i, j, c, o], axis=c),
        attrs={MARK: m, "schedule_rule": "None"},
        name=f"{name}_products",
    )
    lines = te.compute(
        (m, alpha, count, channels),
        lambda i, j, p, o: _choose(i, transform_products(m, [products[a, j, p, o] for a in range(alpha)])),
        name=f"{name}_lines",
    )

    def transform_row(n: Any, y: Any, x: Any, o: Any) -> Any:
        tile = (n * tall + y // m) * wide + x // m
        return _choose(x % m, transform_products(m, [lines[y % m, a, tile, o] for a in range(alpha)]))

    result = te.compute((batch, rows, columns, channels), transform_row, name=f"{name}_conv2d")
    return te.create_prim_func([data, weight, result], index_dtype_override="int64")


def count_tiles(shape: Shape, padding: Padding, m: int) -> tuple[int, int]:
    """Return the rows and columns of an image's tiles."""
    rows, columns = count_results(shape, padding)
    return -(-rows // m), -(-columns // m)


def count_results(shape: Shape, padding: Padding) -> tuple[int, int]:
    """Return the rows and columns of the result."""
    top, left, bottom, right = padding
    return shape[1] + top + bottom - KERNEL + 1, shape[2] + left + right - KERNEL + 1


def _make_operands(shape: Shape, channels: int, padding: Padding, m: int, dtype: str) -> tuple[Any, Any, Any]:
    """Make the data, the transformed weights, and the data padded to whole tiles."""
    batch, height, width, depth = shape
    top, left, _, _ = padding
    tall, wide = count_tiles(shape, padding, m)
    data = te.placeholder(shape, dtype, name="data")
    weight = te.placeholder((m + 2, m + 2, depth, channels), dtype, name="weight")
    padded = te.compute(
        (batch, tall * m + 2, wide * m + 2, depth),
        lambda n, y, x, c: tirx.if_then_else(
            tirx.all(y >= top, y < top + height, x >= left, x < left + width),
            data[n, y - top, x - left, c],
            tirx.FloatImm(dtype, 0.0),
        ),
        name=f"winograd{m}_pad",
    )
    return data, weight, padded


def use_winograd(choose: Choose, make: Make = make_function) -> Any:
    """Make a Relax pass that computes convolutions by Winograd's algorithm: `choose` gives m, `make` the function.

    Eligible are constant 3x3 weights in HWIO with NHWC data, floats, stride and dilation 1, one group.
    """
    convolution = tvm.ir.Op.get("relax.nn.conv2d")

    @mutator
    class Rewriter(PyExprMutator):
        def visit_call_(self, call: Any) -> Any:
            call = self.visit_expr_post_order(call)
            if not isinstance(call.op, tvm.ir.Op) or call.op != convolution:
                return call
            data, weights = call.args
            if isinstance(weights, relax.Var):
                weights = self.lookup_binding(weights)
            shape = _static_shape(data)
            if not isinstance(weights, tvm.ir.GenericConst) or shape is None or not _is_eligible(call.attrs):
                return call
            kernel = weights.value.numpy()
            top, left, bottom, right = (int(p) for p in call.attrs.padding)
            padding = (top, left, bottom, right)
            dtype = str(data.ty.dtype)
            if str(kernel.dtype) != dtype or kernel.shape[:3] != (KERNEL, KERNEL, shape[3]):
                return call
            m = choose(shape, kernel.shape[3], padding, dtype)
            if not m:
                return call
            function = make(shape, kernel.shape[3], padding, m, dtype)
            # Private, since every public function is called main.
            called = self.builder_.add_func(function.without_attr("global_symbol"), f"winograd{m}_conv2d")
            return relax.call_tir(called, (data, relax.const(transform_weights(kernel, m))), call.ty)

    return bindings.mutating_pass(Rewriter, "UseWinograd")


def _is_eligible(attributes: Any) -> bool:
    return (
        str(attributes.data_layout) == str(attributes.out_layout) == "NHWC"
        and str(attributes.kernel_layout) == "HWIO"
        and [int(s) for s in (*attributes.strides, *attributes.dilation)] == [1, 1, 1, 1]
        and int(attributes.groups) == 1
    )


def _static_shape(data: Any) -> Shape | None:
    shape = getattr(data.ty, "shape", None)
    if (
        str(data.ty.dtype) not in ("float32", "float16")
        or shape is None
        or not all(isinstance(d, tirx.IntImm) for d in shape)
    ):
        return None
    n, h, w, c = (int(d) for d in shape)
    return n, h, w, c
