"""The shapes that a hint offers are such that the model can compute with them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from farm.errors import UsageError
from farm.models import inputs
from tests.integration.exported_graphs import Shapes, Writer, masked_attention
from tests.integration.onnx_graphs import random


def flattened(size: int) -> onnx.ModelProto:
    """A dense layer over a whole image: of one size only, in steps of two."""
    write = Writer()
    data = write.op("Relu", write.conv("image", 1, 4, stride=2))
    data = write.op("Gemm", write.op("Flatten", data), random(4 * (size // 2) ** 2, 3), random(3))
    return write.model({"image": ("N", 1, "H", "W")}, {data: 1})


def reshaped(size: int) -> onnx.ModelProto:
    write = Writer()
    data = write.op("Transpose", write.op("Reshape", "image", [1, 3, 4, size // 4, size]), perm=[0, 2, 1, 3, 4])
    return write.model({"image": ("N", 3, "H", "W")}, {data: 1})


def pyramid() -> onnx.ModelProto:
    """Halved five times and doubled again, each level joined with its counterpart; six channels by the first one's."""
    write = Writer()
    levels, data = ["image"], "image"
    for _ in range(6):
        data = write.conv(data, 3, 3, stride=2)
        levels.append(data)
    for level in reversed(levels[:-1]):
        double = write.op("Resize", data, "", np.array([1, 1, 2, 2], "float32"), mode="nearest")
        data = write.op("Add", double, level)
    return write.model({"image": ("N", 3, "H", "W")}, {data: 1})


def wide_window() -> onnx.ModelProto:
    write = Writer()
    data = write.op("AveragePool", "image", kernel_shape=[400, 1])
    return write.model({"image": ("N", 3, "H", "W")}, {data: 1})


def lookup() -> onnx.ModelProto:
    return masked_attention()[0]


CASES: list[tuple[str, Callable[[], onnx.ModelProto], Shapes]] = [
    ("a usual size that the dense layer wants", lambda: flattened(28), {"image": (1, 1, 28, 28)}),
    ("an unusual one", lambda: flattened(72), {"image": (1, 1, 72, 72)}),
    ("an odd one", lambda: flattened(50), {"image": (1, 1, 49, 49)}),
    ("numbers in a Reshape", lambda: reshaped(48), {"image": (1, 3, 48, 48)}),
    ("a multiple of 64", pyramid, {"image": (1, 3, 320, 320)}),
    ("larger than a window", wide_window, {"image": (1, 3, 640, 640)}),
    ("as many words as there are positions", lookup, {"ids": (1, 64), "mask": (1, 64)}),
]


@pytest.mark.parametrize(("build", "shapes"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_model_can_compute_with_the_example(build: Callable[[], onnx.ModelProto], shapes: Shapes) -> None:
    """Of the usual sizes the first that fits; where none does, others are tried."""
    model = build()
    with pytest.raises(UsageError, match="leaves dimensions open") as raised:
        inputs.resolve_inputs(inputs.read_inputs(model), {}, model)
    options = " ".join(f"--shape {name}={','.join(map(str, shape))}" for name, shape in shapes.items())
    assert raised.value.hint == f"Give the shape, for example: {options} (this assumes a batch of 1)"


def test_what_was_given_is_kept() -> None:
    """Where one input's shape is given, the examples for the others go with it."""
    model = lookup()
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "M"
    with pytest.raises(UsageError) as raised:
        inputs.resolve_inputs(inputs.read_inputs(model), {"ids": (1, 12)}, model)
    assert raised.value.hint == "Give the shape, for example: --shape mask=1,12"
