"""Resize and Upsample by ONNX's definition: each resized axis gathers its taps and sums them with constant weights.

TVM's resize2d stays where it computes the same: it handles only the last two of four axes, and ignores scales, axes,
antialiasing and the policies on aspect ratio.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax
from tvm.ir import GenericConst

from farm.search.graph import bindings

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_NEAREST: dict[str, Callable[[Floats], Floats]] = {
    "round_prefer_floor": lambda places: np.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: np.floor(places + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclasses.dataclass(frozen=True)
class Method:
    """The attributes of Resize."""

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic: float = -0.75
    excludes_outside: bool = False
    antialias: bool = False
    extrapolation: float = 0.0


@dataclasses.dataclass(frozen=True)
class ResizedAxis:
    """One resized axis; `roi` is the part that is cropped, as fractions of its size."""

    axis: int
    size: int
    results: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)

    @property
    def is_whole(self) -> bool:
        """Whether the axis keeps its elements."""
        return self.size == self.results and math.isclose(self.scale, 1) and self.roi == (0, 1)

    def places(self, coordinates: str) -> Floats:
        """Return the place of each result among the elements."""
        at, width = np.arange(self.results, dtype="float64"), self.scale * self.size
        if coordinates == "align_corners":
            return at * 0 if width == 1 else at * (self.size - 1) / (width - 1)
        if coordinates == "asymmetric":
            return self._unscale(at)
        if coordinates == "tf_crop_and_resize":
            (start, end), last = self.roi, self.size - 1
            steps = 0 * at + (end - start) * last / 2 if width == 1 else at * (end - start) * last / (width - 1)
            return steps + start * last
        if coordinates == "pytorch_half_pixel" and self.results == 1:
            return at * 0
        offset = self.size / 2 * (1 - self.results / width) if coordinates == "half_pixel_symmetric" else 0.0
        return offset + self._unscale(at + 0.5) - 0.5

    def _unscale(self, places: Floats) -> Floats:
        """Divide by the scale; by the sizes where these agree, so that halves stay exact."""
        exact = math.isclose(self.scale * self.size, self.results, rel_tol=1e-12)
        return places * self.size / self.results if exact else places / self.scale


def find_taps(side: ResizedAxis, method: Method) -> tuple[Integers, Floats]:
    """Return the elements that each result reads, and their weights: [results, taps]."""
    places = side.places(method.coordinates)
    if method.mode == "nearest":
        chosen = _NEAREST[method.nearest](places)
        return np.clip(chosen, 0, side.size - 1).astype("int64")[:, None], np.ones((side.results, 1))
    # Antialiasing widens the filter where the data shrink.
    stretch = min(side.scale, 1.0) if method.antialias else 1.0
    reach = math.floor((2 if method.mode == "cubic" else 1) / stretch + 1)
    indices = np.floor(places).astype("int64")[:, None] + np.arange(-reach, reach + 1)
    distances = np.abs(indices - places[:, None]) * stretch
    weights = _cubic(distances, method.cubic) if method.mode == "cubic" else np.clip(1 - distances, 0, None)
    if method.excludes_outside:
        weights *= (indices >= 0) & (indices < side.size)
    weights /= weights.sum(axis=1, keepdims=True)
    used = np.flatnonzero(weights.any(axis=0))
    return np.clip(indices[:, used], 0, side.size - 1), weights[:, used]


def _cubic(distances: Floats, factor: float) -> Floats:
    near = ((factor + 2) * distances - (factor + 3)) * distances**2 + 1
    far = factor * (((distances - 5) * distances + 8) * distances - 4)
    return np.where(distances <= 1, near, np.where(distances < 2, far, 0))


def convert_resize(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert Resize of a static shape."""
    data, roi, scales, sizes = inputs[0], inputs[1], inputs[2], inputs[3]
    method = Method(
        mode=_text(attributes, "mode", "nearest"),
        coordinates=_text(attributes, "coordinate_transformation_mode", "half_pixel"),
        nearest=_text(attributes, "nearest_mode", "round_prefer_floor"),
        cubic=float(attributes.get("cubic_coeff_a", -0.75)),
        excludes_outside=bool(attributes.get("exclude_outside", 0)),
        antialias=bool(attributes.get("antialias", 0)),
        extrapolation=float(attributes.get("extrapolation_value", 0.0)),
    )
    if attributes["opset"] < 11:  # its second input is the scales
        return _resize_early(data, _numbers(inputs[1]), method.mode)
    crop = _numbers(roi) if method.coordinates == "tf_crop_and_resize" else np.zeros(0)
    policy = _text(attributes, "keep_aspect_ratio_policy", "stretch")
    shape = bindings.static_shape(data.ty) or ()
    axes = [int(axis) % len(shape) for axis in attributes.get("axes", range(len(shape)))]
    return _resize(data, _plan(shape, axes, _numbers(scales), _numbers(sizes), crop, policy), method)


def convert_upsample(inputs: Any, attributes: dict[str, Any]) -> Any:
    """Convert Upsample, which Resize replaced: scales are an attribute before opset 9, an input since."""
    scales = np.array(attributes["scales"]) if "scales" in attributes else _numbers(inputs[1])
    return _resize_early(inputs[0], scales, _text(attributes, "mode", "nearest"))


def _resize_early(data: Any, scales: Floats, mode: str) -> Any:
    """Resize as before opset 11: ONNX does not define coordinates; these are ONNX Runtime's."""
    shape = bindings.static_shape(data.ty) or ()
    # It divides in float32, where 8 / 1.6 is 5.
    decimal = np.array([float(str(scale)) for scale in scales.astype("float32")])
    sides = _plan(shape, range(len(shape)), decimal, np.zeros(0), np.zeros(0), "stretch")
    for nearest in ("ceil", "floor"):
        chosen = [side for side in sides if (side.scale < 1) == (nearest == "ceil")]
        data = _resize(data, chosen, Method("linear" if mode == "bilinear" else mode, "asymmetric", nearest))
    return data


def _text(attributes: dict[str, Any], name: str, default: str) -> str:
    value = attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def _numbers(value: Any) -> Floats:
    """Return a constant input's numbers; none where there is no input."""
    if value is None:
        return np.zeros(0)
    if isinstance(value, relax.ShapeExpr):
        return np.array([int(size) for size in value.values], "float64")
    if not isinstance(value, GenericConst):
        raise NotImplementedError("computed regions, scales and sizes are not supported")
    return np.asarray(value.value.numpy(), "float64")


def _plan(
    shape: Sequence[int], axes: Sequence[int], scales: Floats, sizes: Floats, crop: Floats, policy: str
) -> list[ResizedAxis]:
    """Return the axes that change."""
    lengths = np.array([shape[axis] for axis in axes], "float64")
    if sizes.size:
        scales = sizes / lengths
        if policy != "stretch":
            scales = np.full(len(axes), scales.min() if policy == "not_larger" else scales.max())
            sizes = np.floor(scales * lengths + 0.5)
    else:
        # ONNX's shape inference multiplies in float32.
        sizes = np.floor(scales.astype("float32") * lengths.astype("float32"))
    starts, ends = crop.reshape(2, -1) if crop.size else (np.zeros(len(axes)), np.ones(len(axes)))
    sides = [
        ResizedAxis(axis, shape[axis], int(size), float(scale), (float(start), float(end)))
        for axis, size, scale, start, end in zip(axes, sizes, scales, starts, ends, strict=True)
    ]
    return [side for side in sides if not side.is_whole]


def _resize(data: Any, sides: Sequence[ResizedAxis], method: Method) -> Any:
    kind = str(data.ty.dtype)
    if not sides:
        return data
    builder = relax.BlockBuilder.current()
    if (call := _call_resize2d(data, sides, method)) is not None:
        return builder.normalize(call)
    wide = kind if method.mode == "nearest" or kind in ("float32", "float64") else "float32"
    result = data if wide == kind else builder.normalize(relax.op.astype(data, wide))
    for side in sides:
        result = builder.normalize(_resize_axis(result, side, method))
    if wide == kind:
        return result
    if not kind.startswith(("float", "bfloat")):
        limits = np.iinfo(kind)
        result = relax.op.clip(relax.op.round(result), float(limits.min), float(limits.max))
    return relax.op.astype(result, kind)


def _resize_axis(data: Any, side: ResizedAxis, method: Method) -> Any:
    indices, weights = find_taps(side, method)
    rank, dtype, taps = len(data.ty.shape), str(data.ty.dtype), indices.shape[1]
    trailing = (1,) * (rank - side.axis - 1)
    if method.mode == "nearest":
        result = relax.op.take(data, relax.const(indices[:, 0]), side.axis, mode="clip")
    else:
        gathered = relax.op.take(data, relax.const(indices), side.axis, mode="clip")
        products = relax.op.multiply(gathered, relax.const(weights.reshape(-1, taps, *trailing), dtype))
        result = relax.op.sum(products, side.axis + 1)
    places = side.places(method.coordinates)
    outside = (places < 0) | (places > side.size - 1)
    if method.coordinates != "tf_crop_and_resize" or not outside.any():
        return result
    fill = relax.const(method.extrapolation, dtype)
    return relax.op.where(relax.const(outside.reshape(-1, *trailing)), fill, result)


def _call_resize2d(data: Any, sides: Sequence[ResizedAxis], method: Method) -> Any | None:
    """Return TVM's own operator for an image, where it computes the same; else None."""
    shape = list(bindings.static_shape(data.ty) or ())
    if len(shape) != 4 or any(side.axis < 2 for side in sides):
        return None
    if method.antialias or not all(_suits_resize2d(side, method) for side in sides):
        return None
    if method.mode == "linear" and method.excludes_outside:
        return None
    if not str(data.ty.dtype).startswith("float") and method.mode != "nearest":  # it truncates
        return None
    for side in sides:
        shape[side.axis] = side.results
    return relax.op.image.resize2d(
        data,
        size=relax.ShapeExpr(shape[2:]),
        roi=[0.0] * 4,
        layout="NCHW",
        method="nearest_neighbor" if method.mode == "nearest" else method.mode,
        coordinate_transformation_mode=method.coordinates,
        rounding_method=method.nearest,
        cubic_alpha=method.cubic,
        cubic_exclude=int(method.excludes_outside),
        extrapolation_value=method.extrapolation,
    )


def _suits_resize2d(side: ResizedAxis, method: Method) -> bool:
    """Say whether TVM finds the same places: it divides sizes, and rounds in float32."""
    if method.coordinates in ("half_pixel_symmetric", "tf_crop_and_resize"):
        return False
    if method.coordinates == "align_corners" and (side.results == 1 or method.mode == "nearest"):
        return False
    if abs(side.scale * side.size - side.results) > 1e-5 * side.results:
        return False
    if method.mode != "nearest":
        return True
    factor = side.results // side.size
    if factor * side.size != side.results:
        return False
    exact = factor & (factor - 1) == 0
    if method.coordinates == "asymmetric":
        return exact or method.nearest == "floor"
    return exact or method.nearest.startswith("round")
