"""From an image to a model's input, and from its output to words. What a model wants is in its manifest's `task`.

`task` of a classifier: `input` (its name), `layout` (NCHW or NHWC), `size` (rows, columns), `resize` (the shorter side
before the crop), `mean` and `std` by channel, of values from 0 to 1.
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

# Others of Pillow's start programs (EPS) or are decoded by code that few look at.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# More than phones' cameras have; decoded, turned and converted such an image takes about 0.5 GB.
_MOST_PIXELS = 50_000_000
_MOST_BYTES = 1 << 29
# TIFF 6.0, section 8.
_BITS_PER_SAMPLE = 258


def read_image(path: Path, channels: int) -> Any:
    """The image, upright, in 8 bits, with so many channels. Raises InputError, also where Pillow is not installed."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise InputError(
            f"reading {path.name} needs Pillow, which is not installed: `pip install pillow`, or give an .npz"
        ) from error
    with (
        reading(path, f"an image ({', '.join(_FORMATS)})", _MOST_BYTES) as file,
        warnings.catch_warnings(),
    ):
        # What Pillow warns of is refused below.
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
    """An image whose grey values have 16 bits, or as many as a TIFF says, scaled to 8; Pillow would cut them off."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;"):
        return image
    if image.mode == "F" or (image.mode == "I" and opened.format == "TIFF"):
        raise ValueError("its pixels have 32 bits, whose range it does not say; save it with 8 or 16")
    from PIL import Image

    depth = opened.tag_v2.get(_BITS_PER_SAMPLE, (16,))[0] if opened.format == "TIFF" else 16
    values = np.asarray(image).astype("float64") * (255 / (2**depth - 1))
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype("uint8"))


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
