"""Prepare an image for a classifier and rank its classes, as the manifest's `task` says.

A classifier's `task`: `input` (name), `layout` (NCHW or NHWC), `size` (rows, columns), `resize` (shorter side before
the crop), `mean` and `std` by channel, for values from 0 to 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .inputs import InputError, reading

Array = npt.NDArray[Any]

# Pillow decodes other formats by external programs (EPS) or rarely reviewed code.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
# More than phone cameras have; decoding, rotating and converting such an image takes about 0.5 GB.
_MOST_PIXELS = 50_000_000
_MOST_BYTES = 1 << 29
# TIFF 6.0, section 8.
_BITS_PER_SAMPLE = 258


def read_image(path: Path, channels: int) -> Any:
    """Read an image, upright, 8-bit, with `channels`. Raises InputError, also without Pillow."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise InputError(
            f"reading {path.name} needs Pillow, which is not installed: `pip install pillow`, or give an .npz"
        ) from error
    with reading(path, f"an image ({', '.join(_FORMATS)})", _MOST_BYTES) as file, warnings.catch_warnings():
        # Pillow's warnings become errors below.
        warnings.simplefilter("ignore")
        try:
            opened = Image.open(file, formats=_FORMATS)
        except UnidentifiedImageError as error:
            raise ValueError("it is in no such format, or damaged") from error
        with opened:
            if (pixels := opened.width * opened.height) > _MOST_PIXELS:
                raise InputError(
                    f"{path} has {opened.width} x {opened.height} pixels ({pixels:,}); at most {_MOST_PIXELS:,} are "
                    "read: make it smaller"
                )
            return _to_8_bits(ImageOps.exif_transpose(opened), opened).convert("L" if channels == 1 else "RGB")


def _to_8_bits(image: Any, opened: Any) -> Any:
    """Scale an image with 16-bit (or a TIFF's) grey values to 8 bits; Pillow would truncate them."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;"):
        return image
    if image.mode == "F" or (image.mode == "I" and opened.format == "TIFF"):
        raise ValueError("its pixels have 32 bits, whose range it does not say; save it with 8 or 16")
    from PIL import Image

    depth = opened.tag_v2.get(_BITS_PER_SAMPLE, (16,))[0] if opened.format == "TIFF" else 16
    values = np.asarray(image).astype("float64") * (255 / (2**depth - 1))
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype("uint8"))


def prepare(image: Any, task: Mapping[str, Any]) -> dict[str, Array]:
    """Make a classifier's input: resize the shorter side, crop the centre, normalise."""
    from PIL import Image

    rows, columns = task["size"]
    scale = task["resize"] / min(image.width, image.height)
    width, height = max(columns, round(image.width * scale)), max(rows, round(image.height * scale))
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - columns) // 2, (height - rows) // 2
    cropped = resized.crop((left, top, left + columns, top + rows))
    return {task["input"]: normalise(np.asarray(cropped), task)}


def normalise(pixels: Array, task: Mapping[str, Any]) -> Array:
    """Turn bytes by rows, columns and channels into the model's batch of one."""
    values = pixels.reshape(*pixels.shape[:2], -1).astype("float32") / 255
    values = (values - np.asarray(task["mean"], "float32")) / np.asarray(task["std"], "float32")
    if task["layout"] == "NCHW":
        values = values.transpose(2, 0, 1)
    return np.asarray(values[None], dtype=task["dtype"], order="C")


def rank(scores: Array, labels: Sequence[str], count: int) -> list[tuple[int, str, float]]:
    """Return the best `count` classes with labels and shares; apply softmax to scores that are no shares."""
    values = np.asarray(scores, "float64").reshape(-1)
    if values.min() < 0 or not np.isclose(values.sum(), 1.0, atol=1e-3):
        values = np.exp(values - values.max())
        values /= values.sum()
    best = np.argsort(-values, kind="stable")[:count]
    return [(int(i), labels[i] if i < len(labels) else f"class {i}", float(values[i])) for i in best]
