"""Pools that TVM 0.27 computes otherwise than ONNX (dilated SAME pads, windows past the end, indices), and samples
between pixels: of regions, and of windows with computed offsets.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax

from farm.search.graph import bindings


@dataclasses.dataclass(frozen=True)
class PooledAxis:
    """One pooled axis: `before` and `after` are pads, `results` the windows."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    results: int

    @property
    def overhang(self) -> int:
        """Elements that the last window reads past the data."""
        return max(0, self._end - self.before - self.size)

    @property
    def _end(self) -> int:
        return (self.results - 1) * self.stride + (self.kernel - 1) * self.dilation + 1

    @property
    def is_floor(self) -> bool:
        """Whether the last window ends inside the pads."""
        return self._end <= self.before + self.size + self.after

    def starts(self) -> npt.NDArray[np.int64]:
        """Return the first element of each window, which may lie in the pads."""
        return np.arange(self.results, dtype="int64") * self.stride - self.before

    def counts(self, includes_pads: bool) -> npt.NDArray[np.float64]:
        """Return the elements of each window that an average counts."""
        read = self.starts()[:, None] + np.arange(self.kernel) * self.dilation
        low, high = (-self.before, self.size + self.after) if includes_pads else (0, self.size)
        counted: npt.NDArray[np.float64] = ((read >= low) & (read < high)).sum(axis=1).astype("float64")
        return counted


def plan_sides(shape: tuple[int, ...], attributes: dict[str, Any]) -> list[PooledAxis]:
    """Return the pooled axes as ONNX's attributes define them."""
    kernels = [int(size) for size in attributes["kernel_shape"]]
    rank = len(kernels)
    strides, dilations = ([int(n) for n in attributes.get(name, [1] * rank)] for name in ("strides", "dilations"))
    pads = [int(n) for n in attributes.get("pads", [0] * (2 * rank))]
    mode = attributes.get("auto_pad", b"NOTSET").decode()
    sides = []
    for at, (size, kernel, stride, dilation) in enumerate(zip(shape[2:], kernels, strides, dilations, strict=True)):
        extent = (kernel - 1) * dilation + 1
        before, after = (pads[at], pads[at + rank]) if mode == "NOTSET" else (0, 0)
        if mode.startswith("SAME"):
            both = max(0, (-(-size // stride) - 1) * stride + extent - size)
            before, after = (both - both // 2, both // 2) if mode == "SAME_LOWER" else (both // 2, both - both // 2)
        steps = (size + before + after - extent) / stride
        results = (math.ceil(steps) if attributes.get("ceil_mode") else math.floor(steps)) + 1
        if attributes.get("ceil_mode") and (results - 1) * stride >= size + before:  # no window starts past the data
            results -= 1
        sides.append(PooledAxis(size, kernel, stride, dilation, before, after, results))
    return sides


def convert_max_pool(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert MaxPool; None where TVM's converter is right."""
    data = inputs[0]
    sides = plan_sides(bindings.static_shape(data.ty) or (), attributes)
    if attributes["tvm_custom"]["num_outputs"] > 1:
        return _find_maxima(data, sides, bool(attributes.get("storage_order")))
    if _is_plain(attributes) and not attributes.get("ceil_mode"):
        return None
    if _is_plain(attributes) and all(side.results == _ceil_results(side) for side in sides):
        return None
    pads = [*(side.before for side in sides), *(side.overhang for side in sides)]
    operator = getattr(relax.op.nn, f"max_pool{len(sides)}d")
    return operator(data, *_windows(sides), pads, [side.dilation for side in sides])


def convert_average_pool(inputs: Any, attributes: dict[str, Any]) -> Any | None:
    """Convert AveragePool; None where TVM's converter is right."""
    data, includes_pads = inputs[0], bool(attributes.get("count_include_pad"))
    sides = plan_sides(bindings.static_shape(data.ty) or (), attributes)
    if all(side.is_floor for side in sides):
        if _is_plain(attributes):
            return None
        pads = [*(side.before for side in sides), *(side.after for side in sides)]
        dilations = [side.dilation for side in sides]
        operator = getattr(relax.op.nn, f"avg_pool{len(sides)}d")
        return operator(data, *_windows(sides), pads, dilations, False, includes_pads)
    counts = np.ones(())
    for side in sides:
        counts = np.multiply.outer(counts, side.kernel / side.counts(includes_pads))
    return relax.op.multiply(_average(data, sides), relax.const(counts, data.ty.dtype))


def convert_lp_pool(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert LpPool, whose sums leave the pads out."""
    data, order = inputs[0], float(attributes.get("p", 2))
    dtype = data.ty.dtype
    sides = plan_sides(bindings.static_shape(data.ty) or (), attributes)
    powers = bindings.bind(relax.op.power(relax.op.abs(data), relax.const(order, dtype)))
    taps = math.prod(side.kernel for side in sides)
    sums = relax.op.multiply(_average(powers, sides), relax.const(float(taps), dtype))
    return relax.op.power(sums, relax.const(1 / order, dtype))


def convert_roi_align(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert RoiAlign: half a pixel of the scaled image is more in the regions' own coordinates."""
    data, rois, batch = inputs[0], inputs[1], inputs[2]
    scale = float(attributes.get("spatial_scale", 1.0))
    default = b"half_pixel" if attributes["opset"] >= 16 else b"output_half_pixel"
    aligned = attributes.get("coordinate_transformation_mode", default) == b"half_pixel"
    if attributes.get("mode") == b"max":
        return _find_region_maxima(data, rois, batch, attributes, 0.5 if aligned else 0.0)
    if aligned:
        rois = relax.op.subtract(rois, relax.const(0.5 / scale, rois.ty.dtype))
    rows = relax.op.astype(relax.op.expand_dims(batch, 1), inputs[1].ty.dtype)
    return relax.op.vision.roi_align(
        data,
        relax.op.concat([rows, rois], 1),
        pooled_size=(int(attributes.get("output_height", 1)), int(attributes.get("output_width", 1))),
        spatial_scale=scale,
        sample_ratio=int(attributes.get("sampling_ratio", 0)),
        aligned=aligned,
        layout="NCHW",
        mode="avg",
    )


def _find_region_maxima(data: Any, rois: Any, batch: Any, attributes: dict[str, Any], offset: float) -> Any:
    """Return the greatest product of a pixel and its weight in each bin of each region, as ONNX defines mode max."""
    scale, ratio = float(attributes.get("spatial_scale", 1.0)), int(attributes["sampling_ratio"])
    _, channels, *sizes = bindings.static_shape(data.ty) or ()
    count, dtype = int(rois.ty.shape[0]), str(data.ty.dtype)
    bins = [int(attributes.get(name, 1)) for name in ("output_height", "output_width")]
    wide = "float64" if dtype == "float64" else "float32"

    def number(value: Any) -> Any:
        return relax.const(value, wide)

    edges = bindings.bind(
        relax.op.subtract(relax.op.multiply(relax.op.astype(rois, wide), number(scale)), number(offset))
    )
    corners = []
    for axis, (size, results) in enumerate(zip(sizes, bins, strict=True)):
        start, end = (bindings.bind(relax.op.strided_slice(edges, [1], [at], [at + 1])) for at in (1 - axis, 3 - axis))
        extent = relax.op.subtract(end, start)
        extent = extent if offset else relax.op.maximum(extent, number(1.0))
        steps = (np.arange(results * ratio) + 0.5) / (results * ratio)
        places = bindings.bind(relax.op.add(start, relax.op.multiply(extent, number(steps[None]))))
        outside = relax.op.logical_or(relax.op.less(places, number(-1.0)), relax.op.greater(places, number(size)))
        inside = bindings.bind(relax.op.astype(relax.op.logical_not(outside), wide))
        shape = (count, results * ratio, 1) if axis == 0 else (count, 1, results * ratio)
        near = [
            (relax.op.reshape(index, shape), relax.op.reshape(relax.op.multiply(weight, inside), shape))
            for index, weight in _find_neighbours(relax.op.clip(places, 0.0, size - 1.0), size)
        ]
        corners.append(near)
    samples = _sample(data, relax.op.reshape(batch, (count, 1, 1)), corners, wide)
    best = bindings.bind(functools.reduce(relax.op.maximum, samples))
    grid = relax.op.reshape(best, (count, bins[0], ratio, bins[1], ratio, channels))
    return relax.op.astype(relax.op.permute_dims(relax.op.max(bindings.bind(grid), [2, 4]), [0, 3, 1, 2]), dtype)


def convert_deform_conv(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert DeformConv: sample each window's elements at their offsets, then multiply by the weights."""
    data, weights, offsets, bias, mask = (inputs[at] for at in range(5))
    batch, channels, *sizes = bindings.static_shape(data.ty) or ()
    outputs, _, *kernel = bindings.static_shape(weights.ty) or ()
    sides = plan_sides((batch, channels, *sizes), attributes | {"kernel_shape": kernel})
    groups, parts = int(attributes.get("group", 1)), int(attributes.get("offset_group", 1))
    dtype, rank = str(data.ty.dtype), len(sizes)
    wide = "float64" if dtype == "float64" else "float32"
    taps, results = math.prod(kernel), math.prod(side.results for side in sides)
    moves = relax.op.astype(relax.op.reshape(offsets, (batch * parts, taps, rank, results)), wide)
    moves = bindings.bind(moves)
    corners = []
    for axis, side in enumerate(sides):
        at = np.arange(side.kernel)[:, None] * side.dilation + side.starts()
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = at.shape
        base = np.broadcast_to(at.reshape(shape), (*kernel, *(each.results for each in sides))).reshape(taps, results)
        move = relax.op.reshape(relax.op.strided_slice(moves, [2], [axis], [axis + 1]), (batch * parts, taps, results))
        places = bindings.bind(relax.op.clip(relax.op.add(move, relax.const(base, wide)), -1.0, float(side.size)))
        corners.append(_find_neighbours(places, side.size))
    # Each group of offsets reads its own channels: they count as images of their own.
    image = relax.const(np.arange(batch * parts)[:, None, None], "int64")
    apart = bindings.bind(relax.op.reshape(data, (batch * parts, channels // parts, *sizes)))
    found = bindings.bind(functools.reduce(relax.op.add, _sample(apart, image, corners, wide)))
    if mask is not None:
        found = relax.op.multiply(
            found, relax.op.reshape(relax.op.astype(mask, wide), (batch * parts, taps, results, 1))
        )
    columns = relax.op.permute_dims(bindings.bind(found), [0, 3, 1, 2])  # [images, channels, taps, results]
    columns = relax.op.reshape(columns, (batch, groups, channels // groups * taps, results))
    matrix = relax.op.reshape(relax.op.astype(weights, wide), (groups, outputs // groups, channels // groups * taps))
    product = relax.op.reshape(
        bindings.bind(relax.op.matmul(matrix, columns)), (batch, outputs, *(s.results for s in sides))
    )
    if bias is not None:
        product = relax.op.add(product, relax.op.reshape(relax.op.astype(bias, wide), (outputs, *[1] * rank)))
    return relax.op.astype(bindings.bind(product), dtype)


def _find_neighbours(places: Any, size: int) -> list[tuple[Any, Any]]:
    """Return the element before each place on an axis and the one after, as indices with weights: 0 outside."""
    places = bindings.bind(places)
    dtype = str(places.ty.dtype)
    low = bindings.bind(relax.op.floor(places))
    rest = bindings.bind(relax.op.subtract(places, low))
    one = relax.const(1.0, dtype)
    found = []
    for index, weight in ((low, relax.op.subtract(one, rest)), (bindings.bind(relax.op.add(low, one)), rest)):
        limits = relax.const(0.0, dtype), relax.const(size - 1.0, dtype)
        inside = relax.op.logical_and(relax.op.greater_equal(index, limits[0]), relax.op.less_equal(index, limits[1]))
        weight = bindings.bind(relax.op.where(inside, weight, relax.const(0.0, dtype)))
        found.append((bindings.bind(relax.op.astype(relax.op.clip(index, 0.0, size - 1.0), "int64")), weight))
    return found


def _sample(data: Any, image: Any, corners: list[list[tuple[Any, Any]]], dtype: str) -> list[Any]:
    """Return the products of pixels and weights for each choice of neighbours: [..., channels]."""
    images, channels, *sizes = bindings.static_shape(data.ty) or ()
    order = [0, *range(2, 2 + len(sizes)), 1]
    rows = relax.op.permute_dims(relax.op.astype(data, dtype), order)
    rows = bindings.bind(relax.op.reshape(rows, (images * math.prod(sizes), channels)))
    found = []
    for chosen in itertools.product(*corners):
        place, weight = image, None
        for size, (index, share) in zip(sizes, chosen, strict=True):
            place = bindings.bind(relax.op.add(relax.op.multiply(place, relax.const(size, "int64")), index))
            weight = share if weight is None else bindings.bind(relax.op.multiply(weight, share))
        pixels = bindings.bind(relax.op.take(rows, place, 0, mode="clip"))
        found.append(bindings.bind(relax.op.multiply(pixels, relax.op.expand_dims(weight, -1))))
    return found


def _is_plain(attributes: dict[str, Any]) -> bool:
    return not attributes.get("auto_pad", b"").startswith(b"SAME")


def _ceil_results(side: PooledAxis) -> int:
    extent = (side.kernel - 1) * side.dilation + 1
    return math.ceil((side.size + side.before + side.after - extent) / side.stride) + 1


def _windows(sides: list[PooledAxis]) -> tuple[list[int], list[int]]:
    return [side.kernel for side in sides], [side.stride for side in sides]


def _pad(data: Any, sides: list[PooledAxis], value: float) -> Any:
    """Pad the data to whole windows."""
    width = [0, 0, 0, 0, *(pad for side in sides for pad in (side.before, side.overhang))]
    return bindings.bind(relax.op.nn.pad(data, width, "constant", value))


def _average(data: Any, sides: list[PooledAxis]) -> Any:
    """Average each window, zeros of pads included."""
    operator = getattr(relax.op.nn, f"avg_pool{len(sides)}d")
    return operator(_pad(data, sides, 0.0), *_windows(sides), dilation=[side.dilation for side in sides])


def _find_maxima(data: Any, sides: list[PooledAxis], is_column_major: bool) -> Any:
    """Return the maxima and their places in the flat data; a column-major image counts its last two axes reversed."""
    builder, dtype = relax.BlockBuilder.current(), data.ty.dtype
    shape = bindings.static_shape(data.ty) or ()
    wide = data if str(dtype).startswith("float") else relax.op.astype(data, "float32")
    padded = _pad(wide, sides, -math.inf)
    axes = list(range(2, len(shape)))
    steps = [math.prod(shape[2:axis] if is_column_major else shape[axis + 1 :]) for axis in axes]
    first: npt.NDArray[np.int64] = np.zeros((), "int64")
    for side, step in zip(sides, steps, strict=True):
        first = np.add.outer(first, side.starts() * step)
    images = np.arange(math.prod(shape[:2])).reshape(*shape[:2], *(1 for _ in sides)) * math.prod(shape[2:])
    best = places = None
    for offsets in itertools.product(*(range(side.kernel) for side in sides)):
        begin = [offset * side.dilation for offset, side in zip(offsets, sides, strict=True)]
        end = [at + (side.results - 1) * side.stride + 1 for at, side in zip(begin, sides, strict=True)]
        tap = relax.op.strided_slice(padded, axes, begin, end, [side.stride for side in sides])
        tap = builder.normalize(tap)
        place = relax.const(sum(at * step for at, step in zip(begin, steps, strict=True)), "int64")
        if best is None:
            best, places = tap, relax.op.zeros_like(tap, "int64")
            continue
        is_more = builder.normalize(relax.op.greater(tap, best))
        best, places = (builder.normalize(relax.op.where(is_more, *pair)) for pair in ((tap, best), (place, places)))
    for start in (first, images):
        places = builder.normalize(relax.op.add(places, relax.const(start, "int64")))
    return relax.Tuple([builder.normalize(relax.op.astype(best, dtype)), places])
