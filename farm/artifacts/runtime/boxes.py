"""Prepare an image for a YOLOX detector and decode its boxes (arXiv 2107.08430, sections 2.1 and 2.2).

A detector's `task`: `input` (name), `outputs` by falling resolution, `strides` in pixels, `size` (rows, columns).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# The grey padding of YOLOX's training.
_PADDING = 114
_LEAST_SCORE, _MOST_OVERLAP = 0.25, 0.45
_MOST_BOXES = 100


@dataclasses.dataclass(frozen=True)
class Box:
    """A detection in pixels of the given image: left, top, right, bottom; `score` is from 0 to 1."""

    left: float
    top: float
    right: float
    bottom: float
    score: float
    index: int


def prepare(image: Any, task: Mapping[str, Any]) -> tuple[dict[str, Array], float]:
    """Return the input with the image at its top left, padded in grey, and the image's scale."""
    from PIL import Image

    rows, columns = task["size"]
    scale = min(rows / image.height, columns / image.width)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    pixels = np.full((rows, columns, 3), _PADDING, "float32")
    pixels[: size[1], : size[0]] = np.asarray(image.resize(size, Image.Resampling.BILINEAR), "float32")
    # Channels are BGR and not normalised.
    data = pixels[:, :, ::-1].transpose(2, 0, 1)[None]
    return {task["input"]: np.asarray(data, dtype=task["dtype"], order="C")}, scale


def find_boxes(outputs: Mapping[str, Array], task: Mapping[str, Any], scale: float) -> list[Box]:
    """Return the boxes, the surest first, after suppression."""
    found: list[Box] = []
    for name, stride in zip(task["outputs"], task["strides"], strict=True):
        found += _decode(outputs[name][0].astype("float64"), stride, scale)
    found.sort(key=lambda box: -box.score)
    return _suppress(found)


def _decode(head: Array, stride: int, scale: float) -> list[Box]:
    """Decode one output: channels of centre, size, objectness and classes, before their sigmoid."""
    rows, columns = np.mgrid[: head.shape[1], : head.shape[2]]
    x, y = (head[0] + columns) * stride / scale, (head[1] + rows) * stride / scale
    # Clipped, so that garbage does not overflow.
    width, height = (np.exp(np.minimum(each, 20.0)) * stride / scale for each in (head[2], head[3]))
    scores = _sigmoid(head[4]) * _sigmoid(head[5:])
    best = scores.argmax(axis=0)
    top = scores.max(axis=0)
    return [
        Box(
            float(x[at] - width[at] / 2),
            float(y[at] - height[at] / 2),
            float(x[at] + width[at] / 2),
            float(y[at] + height[at] / 2),
            float(top[at]),
            int(best[at]),
        )
        for at in zip(*np.nonzero(top >= _LEAST_SCORE), strict=True)
    ]


def _suppress(boxes: Sequence[Box]) -> list[Box]:
    """Suppress non-maxima greedily by class; `boxes` are the surest first."""
    kept: list[Box] = []
    for box in boxes:
        if len(kept) == _MOST_BOXES:
            break
        if all(box.index != other.index or _overlap(box, other) <= _MOST_OVERLAP for other in kept):
            kept.append(box)
    return kept


def _overlap(a: Box, b: Box) -> float:
    """Return intersection over union."""
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    shared = max(0.0, width) * max(0.0, height)
    both = (a.right - a.left) * (a.bottom - a.top) + (b.right - b.left) * (b.bottom - b.top) - shared
    return shared / both if both > 0 else 0.0


def _sigmoid(values: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-np.clip(values, -60.0, 60.0)))
    return result
