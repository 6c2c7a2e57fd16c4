"""Apply a model's `task`: turn a user's file into inputs, and outputs into classes, boxes or plain arrays.

A classifier's `task`: `input` (name), `layout` (NCHW or NHWC), `size` (rows, columns), `resize` (shorter side before
the crop), `mean` and `std` by channel, for values from 0 to 1. A detector's: `input`, `outputs`, `strides` of the
outputs in pixels, `size`, `decoder`: yolov4 (with `anchors` by output and `growth`), yolov8 (decoded in the graph),
else YOLOX (arXiv 2107.08430, 2.1).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .inputs import Array, InputError, describe, read_arrays, reading

# Pillow decodes other formats by external programs (EPS) or rarely reviewed code.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
# More than phone cameras have; decoding, rotating and converting such an image takes about 0.5 GB.
_MOST_PIXELS = 50_000_000
_MOST_BYTES = 1 << 29
# TIFF 6.0, section 8.
_BITS_PER_SAMPLE = 258
# The grey padding in training of YOLOX and YOLOv8.
_PADDING = 114
_MOST_BOXES = 100


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


CLASSIFIER, DETECTOR = "classifier", "detector"


def read_input(path: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Array], float]:
    """Return the inputs and the scale of an image in them. Raises InputError."""
    task = manifest["task"]
    if path.suffix.lower() == ".npz":
        return read_arrays(path), 1.0
    if task["kind"] == CLASSIFIER:
        return prepare(read_image(path, len(task["mean"])), task), 1.0
    if task["kind"] == DETECTOR:
        return prepare_boxes(read_image(path, 3), task)
    takes = ", ".join(describe(each["name"], each["shape"], each["dtype"]) for each in manifest["inputs"])
    raise InputError(f"{manifest['name']} takes no image but an .npz with {takes}")


def find(
    outputs: Mapping[str, Array], task: Mapping[str, Any], labels: Sequence[str], count: int, scale: float
) -> list[dict[str, Any]]:
    """Return a classifier's or detector's results, the surest first: `class`, `label`, `share`, and `box`."""
    if task["kind"] == CLASSIFIER:
        ranked = rank(outputs[task["output"]], labels, count)
        return [{"class": index, "label": label, "share": share, "box": None} for index, label, share in ranked]
    if task["kind"] == DETECTOR:
        return [
            {
                "class": box.index,
                "label": labels[box.index] if box.index < len(labels) else f"class {box.index}",
                "share": box.score,
                "box": [box.left, box.top, box.right, box.bottom],
            }
            for box in find_boxes(outputs, task, scale)
        ]
    return []


def say(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format one line per result."""
    lines = []
    for each in found:
        where = "" if each["box"] is None else "  {:.0f},{:.0f} {:.0f},{:.0f}".format(*each["box"])
        lines.append(f"{100 * each['share']:6.2f} %  {each['class']:5d}  {each['label']}{where}")
    return lines


_LEAST_SCORE, _MOST_OVERLAP = 0.25, 0.45


@dataclasses.dataclass(frozen=True)
class Box:
    """A detection in pixels of the given image: left, top, right, bottom; `score` is from 0 to 1."""

    left: float
    top: float
    right: float
    bottom: float
    score: float
    index: int


def prepare_boxes(image: Any, task: Mapping[str, Any]) -> tuple[dict[str, Array], float]:
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
