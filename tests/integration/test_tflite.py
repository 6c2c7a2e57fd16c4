"""TensorFlow Lite models compute what LiteRT's interpreter computes, or are refused by name."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import interpreter as litert
from ai_edge_litert import schema_py_generated as schema

from farm.artifacts import compile as compiling
from farm.errors import UsageError
from farm.models import inputs as model_inputs
from farm.models import source, tflite
from farm.models.lengths import set_batch
from farm.models.quantise import open_session
from farm.models.tflite import operators
from farm.search import tvm_env
from tests.integration.tflite_models import Writer

tvm = tvm_env.load()

SAME, VALID = schema.Padding.SAME, schema.Padding.VALID
RELU, RELU6 = schema.ActivationFunctionType.RELU, schema.ActivationFunctionType.RELU6
RANDOM = np.random.default_rng(1)


def weight(*shape: int, dtype: str = "float32") -> Any:
    return RANDOM.standard_normal(shape).astype(dtype)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def steps(padding: int, stride: int, dilation: int | None = None) -> dict[str, int]:
    dilations = {} if dilation is None else {"dilationHFactor": dilation, "dilationWFactor": dilation}
    return {"padding": padding, "strideH": stride, "strideW": stride, **dilations}


def convolutions(w: Writer) -> list[int]:
    """Strides, dilations, groups and multipliers; weights of 16 bits; a graph that ends in both layouts."""
    x = w.input(1, 9, 8, 3)
    a, b, c, d, e = (w.tensor(s) for s in ((1, 5, 4, 8), (1, 5, 4, 16), (1, 3, 2, 4), (1, 5, 4, 8), (1, 6, 4, 2)))
    short, long = w.constant(weight(8, 3, 3, 3, dtype="float16")), w.tensor((8, 3, 3, 3))
    w.add("DEQUANTIZE", [short], long)
    w.add("CONV_2D", [x, long, w.constant(weight(8))], a, **steps(SAME, 2, 1), fusedActivationFunction=RELU6)
    wide = {**steps(SAME, 1, 2), "dilationWFactor": 1, "depthMultiplier": 2, "fusedActivationFunction": RELU}
    w.add("DEPTHWISE_CONV_2D", [a, w.constant(weight(1, 2, 3, 16)), w.constant(weight(16))], b, **wide)
    w.add("CONV_2D", [b, w.constant(weight(4, 3, 3, 4)), w.constant(weight(4))], c, **steps(VALID, 1, 1))
    w.add("PRELU", [a, w.constant(weight(1, 1, 8))], d)
    w.add("TRANSPOSE_CONV", [w.constant(ints(1, 6, 4, 2)), w.constant(weight(2, 3, 2, 4)), c], e, **steps(SAME, 2))
    return [c, d, e]  # fmt: skip


def pools(w: Writer) -> list[int]:
    """Pools, padding, resizing and blocks, joined along channels and rows."""
    x = w.input(1, 8, 8, 4)
    a, b, c, d, e = (w.tensor(s) for s in ((1, 4, 4, 4), (1, 4, 4, 4), (1, 4, 4, 8), (1, 6, 4, 8), (1, 12, 9, 8)))
    f, g, h, i = (w.tensor(s) for s in ((1, 24, 18, 2), (1, 2, 2, 32), (1, 8, 8, 8), (1, 8, 8, 4)))
    w.add("AVERAGE_POOL_2D", [x], a, padding=SAME, strideH=2, strideW=2, filterHeight=3, filterWidth=3)
    w.add("MAX_POOL_2D", [x], b, padding=VALID, strideH=2, strideW=2, filterHeight=2, filterWidth=2)
    w.add("CONCATENATION", [a, b], c, axis=3)
    w.add("PAD", [c, w.constant(np.array([[0, 0], [0, 2], [0, 0], [0, 0]], np.int32))], d)
    w.add("RESIZE_BILINEAR", [d, w.constant(ints(12, 9))], e, halfPixelCenters=True)
    w.add("DEPTH_TO_SPACE", [e], f, blockSize=2)
    w.add("SPACE_TO_DEPTH", [c], g, blockSize=2)
    w.add("RESIZE_NEAREST_NEIGHBOR", [c, w.constant(ints(8, 8))], h, halfPixelCenters=False)
    w.add("PADV2", [x, w.constant(np.zeros((4, 2), np.int32)), w.constant(np.float32(3))], i)
    return [f, g, h, i]


def elements(w: Writer) -> list[int]:
    """Activations and arithmetic, broadcast in both layouts, reductions and joins."""
    x = w.input(1, 4, 6, 8)
    pooled, made = w.tensor((1, 2, 3, 8)), []
    w.add("MAX_POOL_2D", [x], pooled, padding=VALID, strideH=2, strideW=2, filterHeight=2, filterWidth=2)
    for base, shape in ((x, (1, 4, 6, 8)), (pooled, (1, 2, 3, 8))):
        for kind in ("RELU", "RELU6", "RELU_N1_TO_1", "LOGISTIC", "TANH", "HARD_SWISH", "ELU", "EXP", "ABS", "SQUARE",
                     "NEG", "FLOOR", "SIN", "COS", "ROUND"):  # fmt: skip
            w.add(kind, [base], made.append(w.tensor(shape)) or made[-1])
        for kind in ("ADD", "SUB", "MUL", "DIV", "MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE"):
            w.add(kind, [base, w.constant(weight(shape[2], 8))], made.append(w.tensor(shape)) or made[-1])
        w.add("SOFTMAX", [base], made.append(w.tensor(shape)) or made[-1], beta=0.5)
        w.add("LEAKY_RELU", [base], made.append(w.tensor(shape)) or made[-1], alpha=0.3)
        w.add("L2_NORMALIZATION", [base], made.append(w.tensor(shape)) or made[-1])
        for kind in ("MEAN", "SUM", "REDUCE_MAX"):
            w.add(kind, [base, w.constant(ints(1, 2))], made.append(w.tensor((1, 8))) or made[-1])
            w.add(kind, [base, w.constant(ints(2))], made.append(w.tensor((1, shape[1], 8))) or made[-1])
            w.add(kind, [base, w.constant(ints(3))], made.append(w.tensor((*shape[:3], 1))) or made[-1], keepDims=True)
    return made


def shapes(w: Writer) -> list[int]:
    """Dense layers, matrices and everything that moves elements."""
    x = w.input(1, 4, 4, 6)
    a, b, c, d = w.tensor((1, 2, 2, 6)), w.tensor((4, 6)), w.tensor((4, 5)), w.tensor((5, 4))
    w.add("MAX_POOL_2D", [x], a, padding=VALID, strideH=2, strideW=2, filterHeight=2, filterWidth=2)
    w.add("RESHAPE", [a, w.constant(ints(4, 6))], b)
    w.add("FULLY_CONNECTED", [b, w.constant(weight(5, 6)), w.constant(weight(5))], c, fusedActivationFunction=RELU)
    w.add("TRANSPOSE", [c, w.constant(ints(1, 0))], d)
    e, f, g, h, i = (w.tensor(s) for s in ((4, 4), (1, 2, 1, 3), (2, 2, 6), (1, 2, 2, 2), (1, 2, 2, 4)))
    w.add("BATCH_MATMUL", [c, d], e)
    w.add(
        "STRIDED_SLICE", [a, *(w.constant(each) for each in (ints(0, 0, 1, 5), ints(1, 2, 2, 0), ints(1, 1, 1, -2)))], f
    )
    w.add(
        "STRIDED_SLICE",
        [a, *(w.constant(each) for each in (ints(0, 0, 0, 0), ints(1, 2, 2, 6), ints(1, 1, 1, 1)))],
        g,
        shrinkAxisMask=1,
    )
    w.add("SPLIT_V", [a, w.constant(ints(2, -1)), w.constant(ints(3))], h, i, numSplits=2)
    j, k, m, n = w.tensor((2, 4, 6)), w.tensor((1, 3, 2, 6)), w.tensor((4,), "int64"), w.tensor((4, 12))
    w.add("PACK", [b, b], j, valuesCount=2, axis=0)
    w.add("GATHER", [a, w.constant(ints(1, 0, 1))], k, axis=1)
    w.add("ARG_MAX", [b, w.constant(ints(1))], m, outputType=schema.TensorType.INT64)
    w.add("TILE", [b, w.constant(ints(1, 2))], n)
    o, p, q, r = *(w.tensor((1, 2, 2, 3)) for _ in range(2)), w.tensor((1, 2, 2, 6)), w.tensor((2, 2, 6))
    w.add("SPLIT", [w.constant(ints(3)), a], o, p, numSplits=2)
    w.add("UNPACK", [a], r, num=1, axis=0)
    w.add("SLICE", [x, w.constant(ints(0, 1, 1, 0)), w.constant(ints(1, 2, 2, -1))], q)
    return [e, f, g, h, i, j, k, m, n, o, p, q, r]  # fmt: skip


def quantised(w: Writer, dtype: str = "int8") -> list[int]:
    """A convolution per channel, a sum, a pool and a dense layer in 8 bits."""
    zero = {"int8": -3, "uint8": 125, "int16": 0}[dtype]
    step = 3e-4 if dtype == "int16" else 0.05
    x = w.input(1, 8, 8, 3, dtype=dtype, scale=step, zero=zero)
    # Files of the older kind have one scale and a zero point for all weights.
    old = dtype == "uint8"
    scales = 0.01 if old else np.linspace(0.01, 0.02, 8)
    numbers = RANDOM.integers(-127, 128, (8, 3, 3, 3))
    kernel = w.constant((numbers + 127).astype(np.uint8) if old else numbers.astype(np.int8), scales, 120 if old else 0)
    wide = "int64" if dtype == "int16" else "int32"
    bias = w.constant(RANDOM.integers(-99, 99, 8).astype(wide), scale=scales * step)
    a = w.tensor((1, 8, 8, 8), dtype, step * 2, zero)
    w.add("CONV_2D", [x, kernel, bias], a, **steps(SAME, 1, 1), fusedActivationFunction=RELU)
    b, c, d, e = (
        w.tensor((1, 8, 8, 8), dtype, step * 3, zero),
        *(w.tensor(s, dtype, step * 3, zero) for s in ((1, 4, 4, 8), (1, 128), (1, 5))),
    )
    w.add("ADD", [a, a], b)
    w.add("MAX_POOL_2D", [b], c, padding=VALID, strideH=2, strideW=2, filterHeight=2, filterWidth=2)
    w.add("RESHAPE", [c, w.constant(ints(1, 128))], d)
    rows = RANDOM.integers(-127, 128, (5, 128))
    table = w.constant((rows + 127).astype(np.uint8) if old else rows.astype(np.int8), 0.002, 120 if old else 0)
    more = w.constant(RANDOM.integers(-99, 99, 5).astype(wide), scale=0.002 * step * 3)
    w.add("FULLY_CONNECTED", [d, table, more], e)
    f = w.tensor((1, 5))
    w.add("DEQUANTIZE", [e], f)
    return [e, f]  # fmt: skip


def write(build: Callable[..., list[int]], *arguments: Any) -> bytes:
    writer = Writer()
    return writer.finish(*build(writer, *arguments))


def interpret(data: bytes, values: Any) -> list[Any]:
    machine = litert.Interpreter(model_content=data, num_threads=1)
    machine.allocate_tensors()
    machine.set_tensor(machine.get_input_details()[0]["index"], values)
    machine.invoke()
    return [machine.get_tensor(about["index"]) for about in machine.get_output_details()]


def make_values(data: bytes) -> Any:
    machine = litert.Interpreter(model_content=data)
    about = machine.get_input_details()[0]
    if about["dtype"] is np.float32:
        return RANDOM.standard_normal(about["shape"]).astype(np.float32)
    limits = np.iinfo(about["dtype"])
    return RANDOM.integers(limits.min, limits.max + 1, about["shape"]).astype(about["dtype"])


def require_close(found: list[Any], wanted: list[Any], steps: float = 0.0) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        off = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
        assert off <= (steps or 2e-5 * max(1.0, np.abs(other).max()))


@pytest.mark.parametrize("build", [convolutions, pools, elements, shapes], ids=lambda each: each.__name__)
def test_it_computes_what_the_interpreter_computes(tmp_path: pathlib.Path, build: Callable[..., list[int]]) -> None:
    """The converted model, under ONNX Runtime."""
    path = tmp_path / "net.tflite"
    path.write_bytes(data := write(build))
    model = source.resolve_model(str(path))
    session = open_session(model.onnx_bytes)
    values = make_values(data)
    require_close(session.run(None, {session.get_inputs()[0].name: values}), interpret(data, values))


def test_crops_around_landmarks(tmp_path: pathlib.Path) -> None:
    """MediaPipe's operators, which LiteRT lacks, against their definition."""
    w = Writer()
    image, landmarks = w.input(1, 12, 10, 2), w.input(1, 6, 3)
    crop, matrix, moved = w.tensor((1, 4, 5, 2)), w.tensor((1, 4, 4)), w.tensor((1, 6, 3))
    about = {"target_rotation_radians": 0.3, "scale_x": 1.5, "scale_y": 1.2, "subset_idxs": [0, 1, 2, 4],
             "left_rotation_idx": 1, "right_rotation_idx": 4, "output_width": 5, "output_height": 4}  # fmt: skip
    w.add("CUSTOM", [landmarks], matrix, custom="Landmarks2TransformMatrix", **about)
    w.add("CUSTOM", [image, matrix], crop, custom="TransformTensorBilinear", output_width=5, output_height=4)
    w.add("CUSTOM", [landmarks, matrix], moved, custom="TransformLandmarks")
    (path := tmp_path / "net.tflite").write_bytes(w.finish(matrix, crop, moved))
    pixels = RANDOM.random((1, 12, 10, 2), np.float32)
    points = (RANDOM.random((1, 6, 3)) * 8).astype(np.float32)

    (dx, dy), chosen = (points[0, 4] - points[0, 1])[:2], points[0, [0, 1, 2, 4], :2]
    turn = 0.3 - np.arctan2(dy, dx)
    there = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    turned = chosen @ there.T
    width, height = np.ptp(turned, axis=0)
    wanted = np.eye(4)
    wanted[:2, :2] = there.T @ np.diag([1.5 * width / 5, 1.2 * height / 4])
    wanted[:2, 3] = there.T @ (turned.min(0) + turned.max(0)) / 2 - wanted[:2, :2] @ [2.5, 2.0]
    cut = np.zeros((4, 5, 2))
    for row, column in np.ndindex(4, 5):
        x, y = wanted[:2, :2] @ [column + 0.5, row + 0.5] + wanted[:2, 3] - 0.5
        if 0 <= x <= 9 and 0 <= y <= 11:
            left, top = min(int(x), 8), min(int(y), 10)
            rows = pixels[0, top : top + 2, left : left + 2]
            lines = rows[:, 0] * (left + 1 - x) + rows[:, 1] * (x - left)
            cut[row, column] = lines[0] * (top + 1 - y) + lines[1] * (y - top)
    flat = points[0, :, :2] @ wanted[:2, :2].T + wanted[:2, 3]
    session = open_session(source.resolve_model(str(path)).onnx_bytes)
    found = session.run(None, {"t0": pixels, "t1": points})
    assert 0 < np.count_nonzero(cut) < cut.size
    for one, other in zip(found, (wanted, cut, np.concatenate([flat, points[0, :, 2:]], axis=1)), strict=True):
        np.testing.assert_allclose(one[0], other, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_scales_stay_and_results_are_within_a_step(tmp_path: pathlib.Path, dtype: str) -> None:
    """Bytes as inputs and outputs, under ONNX Runtime and compiled for this machine."""
    path = tmp_path / "net.tflite"
    path.write_bytes(data := write(quantised, dtype))
    model = source.resolve_model(str(path))
    assert model.is_quantised
    values = make_values(data)
    integers, floats = interpret(data, values)
    steps = {"int8": 1.0, "uint8": 1.0, "int16": 4.0}[dtype]
    scale = {"int16": 9e-4}.get(dtype, 0.15)
    session = open_session(model.onnx_bytes)
    for found in (session.run(None, {session.get_inputs()[0].name: values}), compile_and_run(model, values)):
        require_close(found[:1], [integers], steps)
        require_close(found[1:], [floats], steps * scale * 1.01)


def compile_and_run(model: source.ModelSource, values: Any) -> list[Any]:
    specs = model_inputs.read_inputs(model.load())
    shapes = {spec.name: spec.static_shape for spec in specs}
    made = compiling.compile_model(model.load(), shapes, tvm_env.host_target(1), "graph/2", [], link_triple=None)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.so"
        path.write_bytes(made.library)
        machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
        return [each.numpy() for each in machine["main"](tvm.runtime.tensor(values))]


def test_images_need_no_transposes(tmp_path: pathlib.Path) -> None:
    """Images stay in one layout from the input to the output, also through activations."""
    writer = Writer()
    before = writer.input(1, 8, 8, 4)
    for kind in ("RELU", "SOFTMAX", "TANH"):
        after = writer.tensor((1, 8, 8, 4))
        kernel, bias = writer.constant(weight(4, 3, 3, 4)), writer.constant(weight(4))
        writer.add("CONV_2D", [before, kernel, bias], after, **steps(SAME, 1, 1))
        before = writer.tensor((1, 8, 8, 4))
        writer.add(kind, [after], before, **({"beta": 1.0} if kind == "SOFTMAX" else {}))
    (path := tmp_path / "net.tflite").write_bytes(writer.finish(before))
    nodes = source.resolve_model(str(path)).load().graph.node
    assert [node.op_type for node in nodes].count("Transpose") == 2


def test_a_batch_is_taken_through_reshapes(tmp_path: pathlib.Path) -> None:
    """`--batch` works as for ONNX files."""
    (path := tmp_path / "net.tflite").write_bytes(write(quantised))
    model, _ = set_batch(source.resolve_model(str(path)), (), 3)
    session = open_session(model.SerializeToString())
    assert session.run(None, {"t0": np.zeros((3, 8, 8, 3), np.int8)})[0].shape == (3, 5)


def biased(w: Writer, axis: int) -> list[int]:
    kernel = w.constant(np.ones((2, 4), np.int8), [0.1, 0.2])
    bias = w.constant(np.array([1, 2], np.int32), [0.01, 0.02], axis=axis)
    w.add(
        "FULLY_CONNECTED", [w.input(1, 4, dtype="int8", scale=0.1), kernel, bias], out := w.tensor((1, 2), "int8", 1.0)
    )
    return [out]


def test_a_bias_with_the_axis_of_its_weights_is_taken() -> None:
    """It has one dimension, along which its scales lie."""
    assert operators.convert(write(biased, 3)) == operators.convert(write(biased, 0))


def custom(w: Writer) -> list[int]:
    w.add("CUSTOM", [w.input(1, 4)], out := w.tensor((1, 4)), custom="Wobble")
    return [out]


def computed_axis(w: Writer) -> list[int]:
    w.add("MEAN", [w.input(1, 4), w.input(1, dtype="int32")], out := w.tensor((1,)))
    return [out]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (write(custom), r"no converter for its operator Wobble \(node 't1'\)"),
        (write(computed_axis), r"operator MEAN \(node 't2'\) is not supported: its operand 't1' is computed"),
        (write(pools)[:900], "cannot be converted: it is truncated or damaged"),
        (b"\x1c\x00\x00\x00TFL3" + b"\xff" * 200, "cannot be converted: it is truncated or damaged"),
        (b"just some text", "is not a TensorFlow Lite model"),
        (b"", "is empty"),
        (b"<!DOCTYPE html>", "web page"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: pathlib.Path, data: bytes, message: str) -> None:
    """One sentence names the file, the operator and its node, and a hint says what to do."""
    (path := tmp_path / "net.tflite").write_bytes(data)
    with pytest.raises(UsageError, match=message) as raised:
        source.resolve_model(str(path))
    assert str(path) in raised.value.message


def test_damaged_files_end_in_an_error_or_a_model() -> None:
    """No changed byte crashes or hangs the converter, or takes more than its memory."""
    data = write(shapes)
    for at in RANDOM.integers(8, len(data), 12):
        damaged = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
        with contextlib.suppress(UsageError):
            assert tflite.convert(pathlib.Path("net.tflite"), damaged)


def test_without_the_schema_it_is_asked_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is an extra."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (path := tmp_path / "net.tflite").write_bytes(write(pools))
    with pytest.raises(UsageError, match="needs the package tflite") as raised:
        source.resolve_model(str(path))
    assert "pip install" in raised.value.hint
