"""What a model is for, as far as its inputs and outputs tell: how an image becomes its input, and its output words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farm.artifacts.manifest import Tensor

# Of ImageNet's training images, by channel, of values from 0 to 1: what nearly all published classifiers are trained
# with (torchvision, timm). A model with one channel has no such custom.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GREY = (0.5,)
# Published classifiers are tested on the middle 7/8 of an image: 224 of 256.
_CROP = 0.875
# Below so many rows nobody crops: digits and small pictures fill their image.
_LEAST_CROPPED = 64


def find_task(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any]:
    """The task of an image classifier: one picture in, one row of scores out; {"kind": "arrays"} for all else."""
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
    return {"kind": "arrays"}
