"""Models that a family of schedules, or a pass over their graphs, once computed wrongly: against ONNX Runtime."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from farm.artifacts.compile import compile_model
from farm.search import tvm_env
from farm.search.tvm_env import host_target

tvm = tvm_env.load_compiler()


def check_model(model: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    """Whether all functions of a model of one input `x` are scheduled by families, and its result is right."""
    built = compile_model(model, {"x": shape}, host_target(2), "graph/2", (), None)
    assert all(each.by_rule for each in built.served)
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    [wanted] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(built.library)
        file.flush()
        machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(file.name), tvm.cpu())
        given_back = machine["main"](tvm.runtime.tensor(x))
    result = given_back if hasattr(given_back, "numpy") else given_back[0]
    assert np.abs(result.numpy() - wanted).max() < 1e-4 * np.abs(wanted).max()


def make_model(
    nodes: list[onnx.NodeProto], shape: tuple[int, ...], result: tuple[int, ...] | None, **weights: npt.NDArray[Any]
) -> onnx.ModelProto:
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, result)],
        [onnx.numpy_helper.from_array(each, name) for name, each in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_an_odd_number_of_channels_is_computed_right() -> None:
    """A convolution whose channels are padded and cut again."""
    random = np.random.default_rng(0)
    nodes, weights, last, channels = [], {}, "x", 3
    for out in (37, 53, 19):
        weights[f"w{out}"] = random.standard_normal((out, channels, 3, 3)).astype("float32") / (3 * channels**0.5)
        weights[f"b{out}"] = random.standard_normal(out).astype("float32")
        written = "y" if out == 19 else f"y{out}"
        nodes += [
            onnx.helper.make_node("Conv", [last, f"w{out}", f"b{out}"], [f"c{out}"], pads=[1, 1, 1, 1]),
            onnx.helper.make_node("Relu", [f"c{out}"], [written]),
        ]
        last, channels = written, out
    check_model(make_model(nodes, (1, 3, 41, 41), (1, 19, 41, 41), **weights), (1, 3, 41, 41))


def test_a_cut_may_be_a_part_of_a_concatenation() -> None:
    """A step of a DenseNet with an odd growth: what is cut is written beside what was there."""
    weights = np.random.default_rng(0).standard_normal((18, 40, 3, 3)).astype("float32") / 20
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        onnx.helper.make_node("Concat", ["x", "c"], ["y"], axis=1),
    ]
    check_model(make_model(nodes, (1, 40, 20, 20), None, w=weights), (1, 40, 20, 20))


def test_weights_of_which_a_part_is_read_are_packed_right() -> None:
    """TVM takes the read part of a constant for all of it and packs the wrong one: it is left as it is then."""
    random = np.random.default_rng(0)
    nodes = [
        onnx.helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["n"], axis=-1),
        onnx.helper.make_node("Slice", ["n", "start", "end", "axis"], ["y"]),
    ]
    model = make_model(
        nodes,
        (1, 50, 24),
        (1, 50, 19),
        scale=random.standard_normal(24).astype("float32"),
        bias=random.standard_normal(24).astype("float32"),
        start=np.array([0]),
        end=np.array([19]),
        axis=np.array([2]),
    )
    check_model(model, (1, 50, 24))


def test_a_gather_of_what_a_constant_was_added_to_is_computed_right() -> None:
    """The first word of a text with its positions: of these one row alone is read."""
    nodes = [
        onnx.helper.make_node("Add", ["x", "positions"], ["sum"]),
        onnx.helper.make_node("Gather", ["sum", "first"], ["y"], axis=1),
    ]
    positions = np.random.default_rng(0).standard_normal((1, 50, 24)).astype("float32")
    check_model(make_model(nodes, (1, 50, 24), None, positions=positions, first=np.array(3)), (1, 50, 24))


def test_transposed_convolutions_are_computed_right() -> None:
    """They become convolutions that families serve: kernels longer and shorter than strides, cut on all sides."""
    random = np.random.default_rng(0)
    nodes, weights, last, channels = [], {}, "x", 8
    for number, (out, kernel, strides, pads) in enumerate(
        [(20, (4, 4), (2, 2), (1, 1, 1, 1)), (9, (5, 3), (3, 2), (2, 1, 0, 2)), (7, (2, 2), (2, 3), (0, 0, 0, 0))]
    ):
        written = "y" if number == 2 else f"y{number}"
        weights[f"w{number}"] = random.standard_normal((channels, out, *kernel)).astype("float32") / channels
        weights[f"b{number}"] = random.standard_normal(out).astype("float32")
        names = [last, f"w{number}", f"b{number}"]
        nodes.append(onnx.helper.make_node("ConvTranspose", names, [f"c{number}"], strides=strides, pads=pads))
        nodes.append(onnx.helper.make_node("Relu", [f"c{number}"], [written]))
        last, channels = written, out
    check_model(make_model(nodes, (1, 8, 5, 6), None, **weights), (1, 8, 5, 6))


def test_pools_that_are_written_beside_each_other_are_computed_right() -> None:
    """Pools of stride 2 with columns innermost, then a mean and a maximum of whole maps in one concatenation."""
    pool = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [
        onnx.helper.make_node("MaxPool", ["x"], ["a"], **pool),
        onnx.helper.make_node("AveragePool", ["a"], ["b"], **pool, count_include_pad=1),
        onnx.helper.make_node("GlobalAveragePool", ["b"], ["mean"]),
        onnx.helper.make_node("GlobalMaxPool", ["b"], ["most"]),
        onnx.helper.make_node("Concat", ["most", "mean"], ["y"], axis=1),
    ]
    check_model(make_model(nodes, (1, 6, 37, 41), (1, 12, 1, 1)), (1, 6, 37, 41))
