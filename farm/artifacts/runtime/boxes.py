"""Prepare an image for a detector of the YOLO family and decode its boxes.

A detector's `task`: `input` (name), `outputs`, `strides` of the outputs in pixels, `size` (rows, columns), `decoder`:
yolov4 (with `anchors` by output and `growth`), yolov8 (decoded in the graph), else YOLOX (arXiv 2107.08430, 2.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# The grey padding in training of YOLOX and YOLOv8.
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
    # YOLOX takes BGR from 0 to 255, the others RGB from 0 to 1.
    values = pixels / 255 if "decoder" in task else pixels[:, :, ::-1]
    data = values.transpose(2, 0, 1)[None]
    return {task["input"]: np.asarray(data, dtype=task["dtype"], order="C")}, scale


def find_boxes(
    outputs: Mapping[str, Array], task: Mapping[str, Any], scale: float, least: float = _LEAST_SCORE
) -> list[Box]:
    """Return the boxes with at least this score, the surest first, after suppression."""
    found: list[Box] = []
    for part in _split(outputs, task):
        found += _list_boxes(part, scale, least)
    found.sort(key=lambda box: -box.score)
    return _suppress(found)


def _split(outputs: Mapping[str, Array], task: Mapping[str, Any]) -> Iterator[Array]:
    """Yield centres, sizes and scores by class: (4 + classes, boxes), in pixels of the input."""
    heads = [outputs[name][0].astype("float64") for name in task["outputs"]]
    if task.get("decoder") == "yolov8":
        yield from heads
    for index, (head, stride) in enumerate(zip(heads, task["strides"], strict=False)):
        anchors = task["anchors"][index] if task.get("decoder") == "yolov4" else [None]
        for one, anchor in zip(np.split(head, len(anchors)), anchors, strict=True):
            yield _decode(one, stride, anchor, task.get("growth", 1.0))


def _decode(head: Array, stride: int, anchor: Sequence[float] | None, growth: float) -> Array:
    """Decode channels of centre, size, objectness and classes, before their sigmoid."""
    rows, columns = np.mgrid[: head.shape[1], : head.shape[2]]
    centre = head[:2] if anchor is None else _sigmoid(head[:2]) * growth - (growth - 1) / 2
    # Clipped, so that garbage does not overflow.
    size = np.exp(np.minimum(head[2:4], 20.0)) * np.reshape(stride if anchor is None else anchor, (-1, 1, 1))
    scores = _sigmoid(head[4]) * _sigmoid(head[5:])
    found = np.concatenate([(centre + np.stack([columns, rows])) * stride, size, scores])
    return found.reshape(len(found), -1)


def _list_boxes(part: Array, scale: float, least: float) -> list[Box]:
    scores = part[4:].max(axis=0)
    kept = np.flatnonzero(scores >= least)
    centre, half = part[:2, kept] / scale, part[2:4, kept] / scale / 2
    corners = np.concatenate([centre - half, centre + half])
    found = zip(*corners.tolist(), scores[kept].tolist(), part[4:, kept].argmax(axis=0).tolist(), strict=True)
    return [Box(*each) for each in found]


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
