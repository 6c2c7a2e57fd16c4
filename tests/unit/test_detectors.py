"""Boxes of the YOLO family are found in a model's outputs, and in pixels of the image."""

from __future__ import annotations

import numpy as np
import pytest

from farm.artifacts.given_model import count_classes, find_task
from farm.artifacts.manifest import Tensor
from farm.artifacts.runtime import tasks


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name=f"t{index}", shape=shape, dtype="float32") for index, shape in enumerate(shapes))


def test_yolov4_tiny() -> None:
    """A cell of the coarse head with a certain score gives its anchor's box; the published anchors are known."""
    outputs = tensors((1, 255, 13, 13), (1, 255, 26, 26))
    task = find_task(tensors((1, 3, 416, 416)), outputs)
    assert (task["decoder"], task["strides"], count_classes(task, outputs)) == ("yolov4", [32, 16], 80)
    arrays = {each.name: np.full(each.shape, -20.0, "float32") for each in outputs}
    cell = arrays["t0"][0, 85:170, 4, 6]  # the second anchor, 135 x 169
    cell[:5], cell[5 + 16] = (0, 0, 0, 0, 20), 20
    [box] = tasks.find_boxes(arrays, task, 0.5)
    assert box.index == 16
    corners = (208 - 67.5, 144 - 84.5, 208 + 67.5, 144 + 84.5)
    assert (box.left, box.top, box.right, box.bottom) == pytest.approx([2 * each for each in corners])


def test_yolov8() -> None:
    """One output of decoded boxes: centre, size and a score per class, in pixels of the input."""
    outputs = tensors((1, 6, 2100))
    task = find_task(tensors((1, 3, 320, 320)), outputs)
    assert (task["decoder"], count_classes(task, outputs)) == ("yolov8", 2)
    array = np.zeros((1, 6, 2100), "float32")
    array[0, :, 7] = 100, 50, 20, 10, 0.1, 0.75
    [box] = tasks.find_boxes({"t0": array}, task, 2.0)
    assert (box.left, box.top, box.right, box.bottom, box.score, box.index) == (45, 22.5, 55, 27.5, 0.75, 1)
    assert tasks.find_boxes({"t0": array}, task, 2.0, least=0.8) == []


def test_other_shapes_are_no_detector() -> None:
    """Another number of boxes or channels is an array like any other."""
    for shapes in (((1, 6, 2101),), ((1, 4, 2100),), ((1, 15, 10, 10), (1, 15, 20, 20)), ((2, 6, 2100),)):
        assert find_task(tensors((1, 3, 320, 320)), tensors(*shapes))["kind"] == "arrays"
