"""Models as exporters write them for inputs of any size: shapes computed in the graph, branches, loops.

Each is small and written from what the exporter is known to emit; weights are random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.integration.onnx_graphs import random

Shapes = dict[str, tuple[int, ...]]
IMAGE = ("N", 3, "H", "W")


class Writer:
    """A graph being written: nodes get names of their own, weights and numbers become initializers."""

    def __init__(self, opset: int = 13) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._count = 0

    def op(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Append a node; inputs are names, or values. Its output's name, or several."""
        self._count += 1
        names = [f"{kind}_{self._count}_out{at}" for at in range(outputs)]
        read = [each if isinstance(each, str) else self.value(each) for each in inputs]
        self.nodes.append(helper.make_node(kind, read, names, name=f"{kind}_{self._count}", **attributes))
        return names[0] if outputs == 1 else names

    def value(self, array: Any) -> str:
        data: npt.NDArray[Any] = np.asarray(array)
        if data.dtype.kind == "i" and not isinstance(array, np.ndarray | np.generic):
            data = data.astype("int64")
        elif data.dtype == np.float64:
            data = data.astype("float32")
        name = f"value_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(data, name))
        return name

    def size(self, of: str, at: int) -> str:
        """One dimension as Paddle's exporter takes it: Shape, Slice; a vector of one."""
        return str(self.op("Slice", self.op("Shape", of), [at], [at + 1], [0]))

    def gathered(self, of: str, at: int) -> str:
        """One dimension as PyTorch's exporter takes it: Shape, Gather; a scalar."""
        return str(self.op("Gather", self.op("Shape", of), np.array(at), axis=0))

    def shape(self, *parts: Any) -> str:
        vectors = [self.op("Unsqueeze", each, [0]) if isinstance(each, str) else self.value([each]) for each in parts]
        return str(self.op("Concat", *vectors, axis=0))

    def conv(self, data: str, given: int, made: int, kernel: int = 3, stride: int = 1, group: int = 1) -> str:
        weight, pad = random(made, given // group, kernel, kernel), kernel // 2
        return str(
            self.op("Conv", data, weight, random(made), strides=[stride] * 2, pads=[pad] * 4, group=group,
                    kernel_shape=[kernel] * 2)
        )  # fmt: skip

    def model(self, inputs: Mapping[str, tuple[Any, ...]], outputs: Mapping[str, int], **types: int) -> onnx.ModelProto:
        """What was written; inputs are in float32 where `types` says nothing else, dimensions may be names."""
        graph = helper.make_graph(
            self.nodes,
            "exported",
            [helper.make_tensor_value_info(n, types.get(n, TensorProto.FLOAT), s) for n, s in inputs.items()],
            [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


def paddle_detector() -> tuple[onnx.ModelProto, Shapes]:
    """Text found in an image: levels of a pyramid are resized to each other's sizes: Shape, Slice, Concat, Resize."""
    write = Writer()
    levels, data, given = [], "image", 3
    for made in (8, 16, 24):
        data = write.op(
            "Relu", write.conv(data, given, made, stride=2))  # fmt: skip
        levels.append(write.conv(data, made, 8, 1))
        given = made
    merged = levels[-1]
    for level in reversed(levels[:-1]):
        own = write.op("Slice", write.op("Shape", merged), [0], [2], [0])
        wanted = write.op("Cast", write.op("Slice", write.op("Shape", level), [2], [4], [0]), to=7)
        target = write.op("Concat", own, wanted, axis=0)
        up = write.op("Resize", merged, "", "", target, mode="nearest", nearest_mode="floor",
                      coordinate_transformation_mode="asymmetric")  # fmt: skip
        merged = write.op("Add", level, up)
    data = write.op("Relu", write.conv(merged, 8, 8))
    data = write.op("ConvTranspose", data, random(8, 1, 2, 2), strides=[2, 2], kernel_shape=[2, 2])
    return write.model({"image": IMAGE}, {write.op("Sigmoid", data): 1}), {"image": (1, 3, 64, 96)}


def paddle_recogniser() -> tuple[onnx.ModelProto, Shapes]:
    """Text read from a line of it: attention over columns (Shape, Slice, Concat, Reshape) and a head over classes."""
    write = Writer()
    data = write.op("Relu", write.conv("line", 3, 16, stride=2))
    data = write.op("Relu", write.conv(data, 16, 32, stride=2))
    data = write.op("AveragePool", data, kernel_shape=[4, 1], strides=[4, 1])
    batch, width = write.size(data, 0), write.size(data, 3)
    data = write.op(
        "Transpose", write.op("Reshape", data, write.op("Concat", batch, [32], width, axis=0)), perm=[0, 2, 1]
    )
    joined = write.op("Add", write.op("MatMul", data, random(32, 96)), random(96))
    split = write.op("Reshape", joined, write.op("Concat", batch, width, [3], [4], [8], axis=0))
    split = write.op("Transpose", split, perm=[2, 0, 3, 1, 4])
    query, key, value = (
        write.op("Squeeze", write.op("Slice", split, [at], [at + 1], [0]), [0]) for at in range(3)
    )  # fmt: skip
    scores = write.op("Softmax", write.op("MatMul", write.op("Mul", query, np.float32(0.35)),
                                          write.op("Transpose", key, perm=[0, 1, 3, 2])), axis=3)  # fmt: skip
    seen = write.op("Transpose", write.op("MatMul", scores, value), perm=[0, 2, 1, 3])
    seen = write.op("Reshape", seen, write.op("Concat", batch, width, [32], axis=0))
    head = write.op("Add", write.op("MatMul", write.op("Add", data, seen), random(32, 50)), random(50))
    return write.model({"line": ("N", 3, 16, "W")}, {write.op("Softmax", head, axis=2): 1}), {"line": (1, 3, 16, 80)}


def paddle_classifier() -> tuple[onnx.ModelProto, Shapes]:
    """Squeeze and excitation, then flattened by Shape → Slice → Concat → Reshape with -1."""
    write = Writer()
    data = write.op("HardSwish" if write.opset > 13 else "Relu", write.conv("image", 3, 16, stride=2))
    gate = write.op("Relu", write.conv(write.op("GlobalAveragePool", data), 16, 4, 1))
    gate = write.op("HardSigmoid", write.conv(gate, 4, 16, 1), alpha=0.2, beta=0.5)
    data = write.op("GlobalAveragePool", write.conv(write.op("Mul", data, gate), 16, 16, 3, group=16))
    flat = write.op("Reshape", data, write.op("Concat", write.size(data, 0), [-1], axis=0))
    data = write.op("Softmax", write.op("Gemm", flat, random(16, 2), random(2)), axis=1)
    return write.model({"image": IMAGE}, {data: 1}), {"image": (1, 3, 48, 64)}


def yolo_head() -> tuple[onnx.ModelProto, Shapes]:
    """Boxes as integrals over distances, anchors laid out by Range, Expand and Concat, halves cut by computed sizes."""
    write = Writer()
    levels, data, given = [], "images", 3
    for made in (8, 16, 24):
        data = write.op("Mul", (x := write.conv(data, given, made, stride=2)), write.op("Sigmoid", x))
        half = write.op("Div", write.op("Add", write.gathered(data, 1), np.array(1)), np.array(2))
        half = write.op("Unsqueeze", write.op("Mul", half, np.array(1)), [0])
        rest = write.op("Slice", data, half, write.op("Mul", half, [2]), [1])
        data = write.op("Concat", write.op("Slice", data, [0], half, [1]), write.op("Sigmoid", rest), axis=1)
        levels.append((write.conv(data, made, 4 * 4 + 5, 1), data))
        given = made
    flat, grids, strides = [], [], []
    for number, (head, _) in enumerate(levels):
        shape = write.shape(write.gathered(head, 0), 21, -1)
        flat.append(write.op("Reshape", head, shape))
        counted = [write.op("Range", np.array(0), write.gathered(head, at), np.array(1)) for at in (2, 3)]
        rows, columns = (write.op("Add", write.op("Cast", each, to=1), np.float32(0.5)) for each in counted)
        both = write.shape(write.gathered(head, 2), write.gathered(head, 3))
        xs = write.op("Expand", write.op("Reshape", columns, [1, -1]), both)
        ys = write.op("Expand", write.op("Reshape", rows, [-1, 1]), both)
        pair = write.op("Concat", *(write.op("Unsqueeze", each, [2]) for each in (xs, ys)), axis=2)
        grids.append(write.op("Reshape", pair, [-1, 2]))
        many = write.op("Mul", write.gathered(head, 2), write.gathered(head, 3))
        value = numpy_helper.from_array(np.array([2.0 ** (number + 1)], "float32"))
        strides.append(write.op("ConstantOfShape", write.shape(many, 1), value=value))
    data = write.op("Concat", *flat, axis=2)
    box, classes = write.op("Split", data, [16, 5], outputs=2, axis=1)
    shape = write.shape(write.gathered(box, 0), 4, 4, write.gathered(box, 2))
    box = write.op("Transpose", write.op("Reshape", box, shape), perm=[0, 2, 1, 3])
    box = write.op("Conv", write.op("Softmax", box, axis=1), np.arange(4, dtype="float32").reshape(1, 4, 1, 1))
    box = write.op("Reshape", box, write.shape(write.gathered(box, 0), 4, write.gathered(box, 3)))
    anchors = write.op("Unsqueeze", write.op("Transpose", write.op("Concat", *grids, axis=0), perm=[1, 0]), [0])
    scale = write.op("Transpose", write.op("Concat", *strides, axis=0), perm=[1, 0])
    near, far = write.op("Split", box, [2, 2], outputs=2, axis=1)
    near, far = write.op("Sub", anchors, near), write.op("Add", anchors, far)
    centre, extent = write.op("Div", write.op("Add", near, far), np.float32(2)), write.op("Sub", far, near)
    box = write.op("Mul", write.op("Concat", centre, extent, axis=1), scale)
    found = write.op("Concat", box, write.op("Sigmoid", classes), axis=1)
    return write.model({"images": IMAGE}, {found: 1}), {"images": (1, 3, 64, 64)}


def old_yolo_head() -> tuple[onnx.ModelProto, Shapes]:
    write = Writer(11)
    data = write.op("LeakyRelu", write.conv("images", 3, 8, stride=2), alpha=0.1)
    head = write.conv(data, 8, 21, stride=2)

    def size(at: int) -> str:
        scalar = write.op("Gather", write.op("Shape", head), np.array(at), axis=0)
        return str(write.op("Unsqueeze", scalar, axes=[0]))

    shape = write.op("Concat", size(0), [3], [7], size(2), size(3), axis=0)
    data = write.op("Sigmoid", write.op("Transpose", write.op("Reshape", head, shape), perm=[0, 1, 3, 4, 2]))
    grids = []
    for at, perm in ((3, [1, -1]), (2, [-1, 1])):
        row = write.op("Range", np.array(0), write.op("Squeeze", size(at), axes=[0]), np.array(1))
        row = write.op("Cast", write.op("Reshape", row, perm), to=1)
        grids.append(
            write.op("Unsqueeze", write.op("Expand", row, write.op("Concat", size(2), size(3), axis=0)), axes=[2])
        )
    grid = write.op("Unsqueeze", write.op("Concat", *grids, axis=2), axes=[0, 1])
    place = write.op("Mul", write.op("Add", write.op("Slice", data, [0], [2], [4]), grid), np.float32(4))
    extent = write.op("Pow", write.op("Slice", data, [2], [4], [4]), np.float32(2))
    rest = write.op("Slice", data, [4], [2**63 - 1], [4])
    data = write.op("Concat", place, extent, rest, axis=4)
    return write.model(
        {"images": IMAGE}, {write.op("Reshape", data, write.op("Concat", size(0), [-1], [7], axis=0)): 1}
    ), {"images": (1, 3, 32, 48)}


def jax_mixer() -> tuple[onnx.ModelProto, Shapes]:
    """From JAX over TensorFlow: NHWC transposed around convolutions, shapes cast to 32 bits and back, StridedSlice."""
    write = Writer()
    data = write.op("Transpose", "inputs", perm=[0, 3, 1, 2])
    data = write.op("Conv", data, random(16, 3, 4, 4), strides=[4, 4], kernel_shape=[4, 4])
    data = write.op("Transpose", data, perm=[0, 2, 3, 1])
    shape = write.op("Cast", write.op("Shape", data), to=6)
    batch, rows, columns = (
        write.op("Squeeze", write.op("Slice", shape, [at], [at + 1], [0]), [0]) for at in range(3)
    )  # fmt: skip
    patches = write.op("Mul", rows, columns)
    parts = [write.op("Unsqueeze", each, [0]) for each in (batch, patches)]
    target = write.op("Cast", write.op("Concat", *parts, np.array([16], "int32"), axis=0), to=7)
    data = write.op("Reshape", data, target)
    ones = write.op("Expand", np.float32(1), target)
    tiled = write.op(
        "Tile",
        random(1, 1, 16),
        write.op("Concat", [1], write.op("Cast", write.op("Unsqueeze", patches, [0]), to=7), [1], axis=0),
    )
    data = write.op("Add", write.op("Mul", data, ones), tiled)
    mixed = write.op(
        "Transpose", write.op("MatMul", write.op("Transpose", data, perm=[0, 2, 1]), random(16, 16)), perm=[0, 2, 1]
    )
    data = write.op("Add", data, mixed)
    mean = write.op("ReduceMean", data, axes=[-1], keepdims=1)
    spread = write.op("Sub", data, mean)
    variance = write.op("ReduceMean", write.op("Mul", spread, spread), axes=[-1], keepdims=1)
    data = write.op("Div", spread, write.op("Sqrt", write.op("Add", variance, np.float32(1e-5))))
    data = write.op("ReduceMean", data, axes=[1], keepdims=0)
    return write.model({"inputs": ("N", 16, 16, 3)}, {write.op("MatMul", data, random(16, 7)): 1}), {
        "inputs": (1, 16, 16, 3)
    }


def keras_audio() -> tuple[onnx.ModelProto, Shapes]:
    write = Writer()
    data = write.op("Transpose", "samples", perm=[0, 2, 1])
    length = write.gathered(data, 2)
    frames = write.op("Div", write.op("Add", length, np.array(3)), np.array(4))
    needed = write.op("Add", write.op("Mul", write.op("Sub", frames, np.array(1)), np.array(4)), np.array(9))
    needed = write.op("Max", write.op("Sub", needed, length), np.array(0))
    before = write.op("Div", needed, np.array(2))
    pads = write.shape(0, 0, before, 0, 0, write.op("Sub", needed, before))
    data = write.op("Pad", data, pads, np.float32(0))
    data = write.op("Unsqueeze", data, [2])
    data = write.op("Conv", data, random(12, 1, 1, 9), random(12), strides=[1, 4], kernel_shape=[1, 9])
    data = write.op("Relu", write.op("Squeeze", data, [2]))
    shape = write.op("Shape", data)
    rows = write.op("Concat", write.op("Slice", shape, [0], [1], [0]), [-1], [6], axis=0)
    data = write.op("Sigmoid", write.op("MatMul", write.op("Reshape", data, rows), random(6, 5)))
    return write.model({"samples": ("N", "T", 1)}, {data: 1}), {"samples": (1, 401, 1)}


def squeezed_if() -> tuple[onnx.ModelProto, Shapes]:
    """PyTorch's `squeeze(0)` where the size is not known: If over a dimension that is compared with 1."""
    write = Writer()
    data = write.conv("image", 3, 8, stride=2)
    then, other = (
        helper.make_graph([node], name, [], [helper.make_tensor_value_info(f"{name}_out", 1, None)], values)
        for name, node, values in (
            ("then", helper.make_node("Squeeze", [data, "then_axes"], ["then_out"], name="squeeze"),
             [numpy_helper.from_array(np.array([0]), "then_axes")]),
            ("else", helper.make_node("Identity", [data], ["else_out"], name="keep"), []),
        )
    )  # fmt: skip
    alone = write.op("Equal", write.gathered(data, 0), np.array(1))
    data = write.op("If", alone, then_branch=then, else_branch=other)
    return write.model({"image": IMAGE}, {write.op("Relu", data): 1}), {"image": (1, 3, 16, 16)}


def sampling_rate_if() -> tuple[onnx.ModelProto, Shapes]:
    """A branch for each sampling rate, with weights of its own; one more inside, and the length decides."""
    write = Writer()
    nested = [
        helper.make_graph([helper.make_node(kind, ["conv"], [f"{kind}_in"], name=kind)], kind, [],
                          [helper.make_tensor_value_info(f"{kind}_in", 1, None)])
        for kind in ("Relu", "Neg")
    ]  # fmt: skip
    branches = [
        helper.make_graph(
            [
                helper.make_node("Conv", ["samples", "weight"], ["conv"], name="conv", strides=[stride]),
                helper.make_node("If", ["is_long"], ["picked"], name="inner",
                                 then_branch=nested[0], else_branch=nested[1]),
            ],
            f"rate_{stride}", [], [helper.make_tensor_value_info("picked", 1, None)],
            [numpy_helper.from_array(random(8, 1, 32 * stride), "weight")],
        )
        for stride in (16, 8)
    ]  # fmt: skip
    length = write.gathered("samples", 2)
    write.nodes.append(helper.make_node("Greater", [length, write.value(np.array(600))], ["is_long"], name="is_long"))
    data = write.op("If", "is_long", then_branch=branches[0], else_branch=branches[1])
    return write.model({"samples": ("N", 1, "T")}, {write.op("Tanh", data): 1}), {"samples": (1, 1, 512)}


def unrolled_loop() -> tuple[onnx.ModelProto, Shapes]:
    """A cell over time: Loop with as many rounds as there are frames, a state, and a result of each round."""
    write = Writer()
    write.weights.append(numpy_helper.from_array(random(8, 8), "recurrent"))
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["frames", "number"], ["frame"], name="frame", axis=1),
            helper.make_node("MatMul", ["state", "recurrent"], ["turned"], name="turn"),
            helper.make_node("Add", ["frame", "turned"], ["sum"], name="sum"),
            helper.make_node("Tanh", ["sum"], ["state_out"], name="squash"),
            helper.make_node("Identity", ["going"], ["going_out"], name="go_on"),
            helper.make_node("ReduceMax", ["state_out"], ["peak"], name="peak", axes=[1], keepdims=0),
        ],
        "cell",
        [helper.make_tensor_value_info("number", 7, []), helper.make_tensor_value_info("going", 9, []),
         helper.make_tensor_value_info("state", 1, None)],
        [helper.make_tensor_value_info("going_out", 9, []), helper.make_tensor_value_info("state_out", 1, None),
         helper.make_tensor_value_info("peak", 1, None)],
    )  # fmt: skip
    state = write.op("ConstantOfShape", write.shape(write.gathered("frames", 0), 8),
                     value=numpy_helper.from_array(np.zeros(1, "float32")))  # fmt: skip
    last, peaks = write.op("Loop", write.gathered("frames", 1), np.array(True), state, outputs=2, body=body)
    model = write.model({"frames": ("N", "T", 8)}, {last: 1, peaks: 1})
    return model, {"frames": (2, 5, 8)}


def while_loop() -> tuple[onnx.ModelProto, Shapes]:
    write = Writer()
    body = helper.make_graph(
        [
            helper.make_node("AveragePool", ["image_in"], ["halved"], kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("Shape", ["halved"], ["sizes"], name="sizes"),
            helper.make_node("Gather", ["sizes", "two"], ["rows"], name="rows", axis=0),
            helper.make_node("Greater", ["rows", "most"], ["going_out"], name="is_large"),
        ],
        "halving",
        [helper.make_tensor_value_info("number", 7, []), helper.make_tensor_value_info("going", 9, []),
         helper.make_tensor_value_info("image_in", 1, None)],
        [helper.make_tensor_value_info("going_out", 9, []), helper.make_tensor_value_info("halved", 1, None)],
        [numpy_helper.from_array(np.array(2), "two"), numpy_helper.from_array(np.array(5), "most")],
    )  # fmt: skip
    data = write.op("Loop", "", np.array(True), "image", body=body)
    return write.model({"image": IMAGE}, {write.conv(data, 3, 4): 1}), {"image": (1, 3, 32, 32)}


def masked_attention() -> tuple[onnx.ModelProto, Shapes]:
    """A text encoder: positions cut to the length, a mask expanded (Where over ConstantOfShape), heads reshaped."""
    write = Writer()
    batch, length = write.gathered("ids", 0), write.gathered("ids", 1)
    positions = write.op("Slice", np.arange(64).reshape(1, 64), [0], write.op("Unsqueeze", length, [0]), [1])
    data = write.op("Add", write.op("Gather", random(40, 16), "ids"), write.op("Gather", random(64, 16), positions))
    wanted = write.shape(batch, 1, length, length)
    ones = write.op(
        "ConstantOfShape",
        write.op("Reshape", write.op("Shape", wanted), [-1]),
        value=numpy_helper.from_array(np.array([1])),
    )
    wanted = write.op("Where", write.op("Equal", wanted, write.op("Mul", ones, np.array(-1))), ones, wanted)
    mask = write.op("Expand", write.op("Unsqueeze", write.op("Unsqueeze", "mask", [1]), [2]), wanted)
    mask = write.op("Sub", np.float32(1), write.op("Cast", mask, to=1))
    mask = write.op("Where", write.op("Cast", mask, to=9), np.float32(-1e4), mask)
    heads = []
    for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
        shape = write.shape(batch, length, 2, 8)
        heads.append(
            write.op("Transpose", write.op("Reshape", write.op("MatMul", data, random(16, 16)), shape), perm=perm)
        )
    scores = write.op("Add", write.op("Div", write.op("MatMul", heads[0], heads[1]), np.float32(2.8)), mask)
    seen = write.op("Transpose", write.op("MatMul", write.op("Softmax", scores, axis=-1), heads[2]), perm=[0, 2, 1, 3])
    data = write.op("Add", data, write.op("Reshape", seen, write.shape(batch, length, 16)))
    first = write.op("Gather", data, np.array(0), axis=1)
    model = write.model({"ids": ("N", "T"), "mask": ("N", "T")}, {write.op("Gemm", first, random(16, 3), random(3)): 1},
                        ids=TensorProto.INT64, mask=TensorProto.INT64)  # fmt: skip
    return model, {"ids": (1, 12), "mask": (1, 12)}


def computed_scales() -> tuple[onnx.ModelProto, Shapes]:
    write = Writer()
    small = write.conv("image", 3, 8, stride=4)
    factors = []
    for at in (2, 3):
        wanted, own = (write.op("Cast", write.gathered(each, at), to=1) for each in ("image", small))
        factors.append(write.op("Unsqueeze", write.op("Floor", write.op("Div", wanted, own)), [0]))
    scales = write.op("Concat", np.ones(2, "float32"), *factors, axis=0)
    data = write.op("Resize", small, "", scales, mode="linear", coordinate_transformation_mode="half_pixel")
    return write.model({"image": IMAGE}, {write.op("Concat", data, "image", axis=1): 1}), {"image": (1, 3, 32, 48)}


def quantised() -> tuple[onnx.ModelProto, Shapes]:
    """Weights and data in 8 bits (QuantizeLinear, DequantizeLinear) before a computed Reshape; they stay so."""
    write = Writer()

    def quantise(data: str, scale: float) -> str:
        step, zero = np.float32(scale), np.int8(0)
        return str(write.op("DequantizeLinear", write.op("QuantizeLinear", data, step, zero), step, zero))

    weight = np.random.default_rng(5).integers(-99, 99, (8, 3, 3, 3)).astype("int8")
    kernel = write.op("DequantizeLinear", weight, np.float32(0.01), np.int8(0))
    data = write.op("Conv", quantise("image", 0.03), kernel, pads=[1] * 4, strides=[2, 2], kernel_shape=[3, 3])
    data = write.op("GlobalAveragePool", quantise(write.op("Relu", data), 0.05))
    data = write.op("Reshape", data, write.op("Concat", write.size(data, 0), [8], axis=0))
    return write.model({"image": IMAGE}, {write.op("MatMul", data, random(8, 5)): 1}), {"image": (1, 3, 16, 16)}


def float16() -> tuple[onnx.ModelProto, Shapes]:
    write = Writer()
    data = write.op("Cast", "image", to=10)
    data = write.op("Conv", data, random(8, 3, 3, 3).astype("float16"), pads=[1] * 4, kernel_shape=[3, 3])
    data = write.op("Reshape", data, write.shape(write.gathered(data, 0), write.gathered(data, 1), -1))
    data = write.op("ReduceMean", data, axes=[2], keepdims=0)
    return write.model({"image": IMAGE}, {write.op("Cast", data, to=1): 1}), {"image": (1, 3, 8, 8)}


def frames_of_sound() -> tuple[onnx.ModelProto, Shapes]:
    """A spectrogram: ends reflected by computed widths, a transform as a convolution, power, logarithm, trimming."""
    write = Writer()
    half = write.op("Div", np.array(64), np.array(2))
    data = write.op("Unsqueeze", "samples", [1])
    data = write.op("Pad", data, write.shape(0, 0, half, 0, 0, half), mode="reflect")
    real, imaginary = (write.op("Conv", data, random(33, 1, 64), strides=[16], kernel_shape=[64]) for _ in range(2))
    power = write.op("Add", write.op("Mul", real, real), write.op("Mul", imaginary, imaginary))
    bands = write.op("MatMul", random(20, 33), power)
    data = write.op("Log", write.op("Max", bands, np.float32(1e-6)))
    last = write.op("Sub", write.gathered(data, 2), np.array(1))
    data = write.op("Slice", data, [0], write.op("Unsqueeze", last, [0]), [2])
    return write.model({"samples": ("N", "T")}, {write.op("Transpose", data, perm=[0, 2, 1]): 1}), {"samples": (1, 800)}


GRAPHS: list[Callable[[], tuple[onnx.ModelProto, Shapes]]] = [
    paddle_detector, paddle_recogniser, paddle_classifier, yolo_head, old_yolo_head, jax_mixer, keras_audio,
    squeezed_if, sampling_rate_if, unrolled_loop, while_loop, masked_attention, computed_scales, quantised, float16,
    frames_of_sound,
]  # fmt: skip
