"""Infer a model's task from its inputs and outputs: how an image becomes its input, and its outputs become words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from farm.artifacts.manifest import Tensor
from farm.errors import UsageError

# ImageNet's mean and deviation by channel, for values from 0 to 1, as in nearly all published classifiers (torchvision,
# timm). For one channel there is no convention.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GREY = (0.5,)
# Published classifiers are tested on the central 7/8 of an image: 224 of 256.
_CROP = 0.875
# Smaller images, such as digits, are not cropped.
_LEAST_CROPPED = 64

# What ONNX's metadata says of an image's values (docs/MetadataProps.md), as mean and deviation.
RANGE = "Image.NominalPixelRange"
_RANGES = {"Normalized_1_1": (0.5, 0.5), "Normalized_0_1": (0.0, 1.0), "NominalRange_0_255": (0.0, 1 / 255)}

# Pixels per cell by output, and a cell's or anchor's channels besides its classes.
_STRIDES = (8, 16, 32)
_BOX_CHANNELS, _BOX_CHANNELS_V8 = 5, 4
# YOLOv4-tiny's anchors by stride, and the growth of its centres (yolov4-tiny.cfg of AlexeyAB/darknet: mask, anchors,
# scale_x_y).
_ANCHORS = {32: ((81, 82), (135, 169), (344, 319)), 16: ((23, 27), (37, 58), (81, 82))}
_GROWTH = 1.05


def find_task(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the task of an image classifier (one image in, one row of scores out) or a detector of the YOLO family.

    `metadata` is the ONNX file's. Any other model gets {"kind": "arrays"}.
    """
    if len(inputs) == 1 and len(outputs) == 1 and len(inputs[0].shape) == 4:
        (image,), (scores,) = inputs, outputs
        batch, *rest = image.shape
        layout = "NCHW" if rest[0] in (1, 3) else "NHWC" if rest[2] in (1, 3) else ""
        is_row = scores.shape[0] == 1 and len([d for d in scores.shape if d > 1]) == 1
        if batch == 1 and layout and is_row and image.dtype.startswith("float"):
            channels, rows, columns = rest if layout == "NCHW" else (rest[2], rest[0], rest[1])
            mean, std = list(_MEAN if channels == 3 else _GREY), list(_STD if channels == 3 else _GREY)
            if (said := (metadata or {}).get(RANGE, "")) in _RANGES:
                mean, std = ([each] * channels for each in _RANGES[said])
            return {
                "kind": "classifier",
                "input": image.name,
                "output": scores.name,
                "layout": layout,
                "dtype": image.dtype,
                "size": [rows, columns],
                "resize": round(min(rows, columns) / _CROP)
                if min(rows, columns) >= _LEAST_CROPPED
                else min(rows, columns),
                "mean": mean,
                "std": std,
            }
    return _find_detector(inputs, outputs) or {"kind": "arrays"}


def require_labels(labels: bytes, task: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
    """Raise UsageError where a classifier or detector has another number of classes than there are names."""
    names, wanted = len(labels.decode().splitlines()), count_classes(task, outputs)
    if wanted is not None and names != wanted:
        raise UsageError(
            f"--classes has {names} name{'s' * (names != 1)}, and the model has {wanted} classes",
            "One name a line, in the order of the model's scores.",
        )


def count_classes(task: Mapping[str, Any], outputs: Sequence[Tensor]) -> int | None:
    """Return the number of a classifier's or detector's classes; None for other models."""
    shape = outputs[0].shape
    if task["kind"] == "classifier":
        return math.prod(shape)
    if task["kind"] != "detector":
        return None
    if task.get("decoder") == "yolov8":
        return shape[1] - _BOX_CHANNELS_V8
    return shape[1] // (len(_ANCHORS[32]) if task.get("decoder") == "yolov4" else 1) - _BOX_CHANNELS


def _find_detector(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any] | None:
    """One picture in; YOLOX's three heads, YOLOv4-tiny's two, or YOLOv8's decoded boxes out."""
    if len(inputs) != 1 or inputs[0].shape[:2] != (1, 3) or len(inputs[0].shape) != 4 or not outputs:
        return None
    rows, columns = inputs[0].shape[2:]
    shapes = [each.shape for each in outputs]
    channels = shapes[0][1] if len(shapes[0]) > 1 else 0
    task = {
        "kind": "detector",
        "input": inputs[0].name,
        "outputs": [each.name for each in outputs],
        "dtype": inputs[0].dtype,
        "size": [rows, columns],
    }

    def cells(strides: Sequence[int]) -> list[tuple[int, ...]]:
        return [(1, channels, rows // stride, columns // stride) for stride in strides]

    if channels > _BOX_CHANNELS and shapes == cells(_STRIDES):
        return task | {"strides": list(_STRIDES)}
    anchors = len(_ANCHORS[32])
    if (
        channels % anchors == 0
        and channels > anchors * _BOX_CHANNELS
        and sorted(shapes) == sorted(cells(list(_ANCHORS)))
    ):
        strides = [rows // shape[2] for shape in shapes]
        sizes = [[list(size) for size in _ANCHORS[stride]] for stride in strides]
        return task | {"decoder": "yolov4", "strides": strides, "anchors": sizes, "growth": _GROWTH}
    if channels > _BOX_CHANNELS_V8 and shapes == [(1, channels, sum(a * b for _, _, a, b in cells(_STRIDES)))]:
        return task | {"decoder": "yolov8", "strides": []}
    return None
