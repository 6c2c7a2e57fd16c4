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

# YOLOX (arXiv 2107.08430): pixels per cell by output, and a cell's channels besides its classes.
_STRIDES = (8, 16, 32)
_BOX_CHANNELS = 5


def find_task(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any]:
    """Return the task of an image classifier (one image in, one row of scores out) or a YOLOX detector.

    Any other model gets {"kind": "arrays"}.
    """
    if len(inputs) == 1 and len(outputs) == 1 and len(inputs[0].shape) == 4:
        (image,), (scores,) = inputs, outputs
        batch, *rest = image.shape
        layout = "NCHW" if rest[0] in (1, 3) else "NHWC" if rest[2] in (1, 3) else ""
        is_row = scores.shape[0] == 1 and len([d for d in scores.shape if d > 1]) == 1
        if batch == 1 and layout and is_row and image.dtype.startswith("float"):
            channels, rows, columns = rest if layout == "NCHW" else (rest[2], rest[0], rest[1])
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
                "mean": list(_MEAN if channels == 3 else _GREY),
                "std": list(_STD if channels == 3 else _GREY),
            }
    return _find_detector(inputs, outputs) or {"kind": "arrays"}


def require_labels(labels: bytes, task: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
    """Raise UsageError where a classifier or detector has another number of classes than there are names."""
    shape = outputs[0].shape
    classes = {"classifier": math.prod(shape), "detector": shape[1] - _BOX_CHANNELS if len(shape) > 1 else 0}
    names, wanted = len(labels.decode().splitlines()), classes.get(str(task["kind"]))
    if wanted is not None and names != wanted:
        raise UsageError(
            f"--classes has {names} name{'s' * (names != 1)}, and the model has {wanted} classes",
            "One name a line, in the order of the model's scores.",
        )


def _find_detector(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any] | None:
    """One picture in; for each of YOLOX's strides four coordinates, one score and the classes of every cell."""
    if len(inputs) != 1 or len(outputs) != len(_STRIDES) or inputs[0].shape[:2] != (1, 3) or len(inputs[0].shape) != 4:
        return None
    rows, columns = inputs[0].shape[2:]
    channels = outputs[0].shape[1] if len(outputs[0].shape) > 1 else 0
    wanted = [(1, channels, rows // stride, columns // stride) for stride in _STRIDES]
    if channels <= _BOX_CHANNELS or [each.shape for each in outputs] != wanted:
        return None
    return {
        "kind": "detector",
        "input": inputs[0].name,
        "outputs": [each.name for each in outputs],
        "strides": list(_STRIDES),
        "dtype": inputs[0].dtype,
        "size": [rows, columns],
    }
