"""Apply a model's `task`: turn a user's file into inputs, and outputs into classes, boxes or plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import boxes, images
from .inputs import Array, InputError, describe, read_arrays

CLASSIFIER, DETECTOR = "classifier", "detector"


def read_input(path: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Array], float]:
    """Return the inputs and the scale of an image in them. Raises InputError."""
    task = manifest["task"]
    if path.suffix.lower() == ".npz":
        return read_arrays(path), 1.0
    if task["kind"] == CLASSIFIER:
        return images.prepare(images.read_image(path, len(task["mean"])), task), 1.0
    if task["kind"] == DETECTOR:
        return boxes.prepare(images.read_image(path, 3), task)
    takes = ", ".join(describe(each["name"], each["shape"], each["dtype"]) for each in manifest["inputs"])
    raise InputError(f"{manifest['name']} takes no image but an .npz with {takes}")


def find(
    outputs: Mapping[str, Array], task: Mapping[str, Any], labels: Sequence[str], count: int, scale: float
) -> list[dict[str, Any]]:
    """Return a classifier's or detector's results, the surest first: `class`, `label`, `share`, and `box`."""
    if task["kind"] == CLASSIFIER:
        ranked = images.rank(outputs[task["output"]], labels, count)
        return [{"class": index, "label": label, "share": share, "box": None} for index, label, share in ranked]
    if task["kind"] == DETECTOR:
        return [
            {
                "class": box.index,
                "label": labels[box.index] if box.index < len(labels) else f"class {box.index}",
                "share": box.score,
                "box": [box.left, box.top, box.right, box.bottom],
            }
            for box in boxes.find_boxes(outputs, task, scale)
        ]
    return []


def say(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format one line per result."""
    lines = []
    for each in found:
        where = "" if each["box"] is None else "  {:.0f},{:.0f} {:.0f},{:.0f}".format(*each["box"])
        lines.append(f"{100 * each['share']:6.2f} %  {each['class']:5d}  {each['label']}{where}")
    return lines
