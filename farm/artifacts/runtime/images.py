"""From an image to a model's input, and from its output to words. What a model wants is in its manifest's `task`.

`task` of a classifier: `input` (its name), `layout` (NCHW or NHWC), `size` (rows, columns), `resize` (the shorter side
before the crop), `mean` and `std` by channel, of values from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .inputs import InputError

Array = npt.NDArray[Any]


def read_image(path: Path, channels: int) -> Any:
    """The image, upright, with so many channels. Raises InputError, also where Pillow is not installed."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise InputError(
            f"reading {path.name} needs Pillow, which is not installed: `pip install pillow`, or give an .npz"
        ) from error
    try:
        with Image.open(path) as opened:
            return ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    # Pillow raises SyntaxError and struct.error, too, for files that are damaged.
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is no image that Pillow can read: {error}") from error


def prepare(image: Any, task: Mapping[str, Any]) -> dict[str, Array]:
    """A classifier's input from an image: shorter side resized, centre cropped, normalised."""
    from PIL import Image

    rows, columns = task["size"]
    scale = task["resize"] / min(image.width, image.height)
    width, height = max(columns, round(image.width * scale)), max(rows, round(image.height * scale))
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - columns) // 2, (height - rows) // 2
    cropped = resized.crop((left, top, left + columns, top + rows))
    return {task["input"]: normalise(np.asarray(cropped), task)}


def normalise(pixels: Array, task: Mapping[str, Any]) -> Array:
    """Bytes of rows, columns and channels as the batch of one that the model takes."""
    values = pixels.reshape(*pixels.shape[:2], -1).astype("float32") / 255
    values = (values - np.asarray(task["mean"], "float32")) / np.asarray(task["std"], "float32")
    if task["layout"] == "NCHW":
        values = values.transpose(2, 0, 1)
    return np.asarray(values[None], dtype=task["dtype"], order="C")


def rank(scores: Array, labels: Sequence[str], count: int) -> list[tuple[int, str, float]]:
    """The best `count` classes with their labels and shares; scores that are no shares yet are made such (softmax)."""
    values = np.asarray(scores, "float64").reshape(-1)
    if values.min() < 0 or not np.isclose(values.sum(), 1.0, atol=1e-3):
        values = np.exp(values - values.max())
        values /= values.sum()
    best = np.argsort(-values, kind="stable")[:count]
    return [(int(i), labels[i] if i < len(labels) else f"class {i}", float(values[i])) for i in best]
