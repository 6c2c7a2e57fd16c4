"""What is imported computes what ONNX Runtime computes, and what cannot be imported is named."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from farm.errors import UsageError
from farm.models import inputs as model_inputs
from farm.models import source, zoo
from farm.search import tvm_env, workloads
from farm.search.graph import importer, pipelines
from tests.integration import onnx_graphs
from tests.integration.onnx_graphs import make_model, node, random

tvm = tvm_env.load()

LIGHT = pathlib.Path(onnx.__file__).parent / "backend/test/data/light"
IMAGE = {"x": (1, 8, 12, 12)}


def dropout_unused_mask() -> onnx.ModelProto:
    nodes = [node("Relu", "x", "a"), helper.make_node("Dropout", ["a"], ["b", "mask"]), node("Neg", "b", "y")]
    return make_model(nodes, IMAGE)


def dropout_chain_to_output() -> onnx.ModelProto:
    """Two Dropouts in a row, the second one's result being the model's."""
    return make_model([node("Relu", "x", "a"), node("Dropout", "a", "b"), node("Dropout", "b", "y")], IMAGE)


def dropout_switched_off() -> onnx.ModelProto:
    """Dropout as newer exporters write it: a ratio and a training mode that is false."""
    off = {"ratio": np.array(0.5, "float32"), "training": np.array(False)}
    return make_model(
        [node("Relu", "x", "a"), node("Dropout", "a ratio training", "b"), node("Neg", "b", "y")], IMAGE, off
    )


def dropout_used_mask() -> onnx.ModelProto:
    drop = helper.make_node("Dropout", ["x"], ["a", "mask"], name="drop")
    return make_model([drop, node("Neg", "x", "b"), node("Where", "mask a b", "y")], IMAGE)


def sums() -> onnx.ModelProto:
    """Sums, maxima, minima and means of one to three values, with broadcasting, after a convolution."""
    nodes = [
        node("Conv", "x k", "c"),
        node("Sum", "c", "a"),
        node("Sum", "a w", "b"),
        node("Sum", "a b w", "d"),
        node("Max", "d a w", "e"),
        node("Min", "e b", "f"),
        node("Mean", "f a b", "y"),
    ]
    return make_model(nodes, IMAGE, {"w": random(1, 8, 1, 1), "k": random(8, 8, 1, 1)})


def constant_of_shape_weights() -> onnx.ModelProto:
    value = numpy_helper.from_array(np.array([0.25], "float32"))
    nodes = [node("ConstantOfShape", "shape", "w", value=value), node("Conv", "x w", "y", pads=[1, 1, 1, 1])]
    return make_model(nodes, IMAGE, {"shape": np.array([4, 8, 3, 3], "int64")})


def conv_batch_norm() -> onnx.ModelProto:
    nodes = [
        node("Conv", "x w b", "a", strides=[2, 2], pads=[1, 1, 1, 1]),
        node("BatchNormalization", "a s o m v", "n"),
        node("Relu", "n", "y"),
    ]
    weights = {"w": random(16, 8, 3, 3), "b": random(16), "s": random(16), "o": random(16), "m": random(16)}
    return make_model(nodes, IMAGE, weights | {"v": np.abs(random(16)) + np.float32(0.5)})


def conv_read_twice() -> onnx.ModelProto:
    """A convolution whose result is read before and after batch normalisation, its weights shared with another one."""
    nodes = [
        node("Conv", "x w", "a"),
        node("BatchNormalization", "a s o m v", "n", epsilon=1e-3),
        node("Add", "a n", "c"),
        node("Conv", "x w", "d"),
        node("BatchNormalization", "d s o m v", "e"),
        node("Add", "c e", "y"),
    ]
    weights = {"w": random(8, 8, 1, 1), "s": random(8), "o": random(8), "m": random(8)}
    return make_model(nodes, IMAGE, weights | {"v": np.abs(random(8)) + np.float32(0.5)})


def grouped_and_depthwise() -> onnx.ModelProto:
    nodes = [node("Conv", "x d", "a", group=8, pads=[1, 1, 1, 1]), node("Conv", "a g", "y", group=2, pads=[1, 1, 1, 1])]
    return make_model(nodes, IMAGE, {"d": random(8, 1, 3, 3), "g": random(6, 4, 3, 3)})


def residual() -> onnx.ModelProto:
    nodes = [
        node("Conv", "x w1", "a", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", "a", "b"),
        node("Conv", "b w2", "c", pads=[1, 1, 1, 1]),
        node("Conv", "x w3", "d", strides=[2, 2]),
        node("Add", "c d", "e"),
        node("Relu", "e", "f"),
        node("GlobalAveragePool", "f", "g"),
        node("Flatten", "g", "h"),
        node("Gemm", "h w4 b4", "y", transB=1),
    ]
    weights = {"w1": random(16, 8, 3, 3), "w2": random(16, 16, 3, 3), "w3": random(16, 8, 1, 1)}
    return make_model(nodes, IMAGE, weights | {"w4": random(10, 16), "b4": random(10)})


def clipped() -> onnx.ModelProto:
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("Clip", "a low high", "b"),
        node("Conv", "b w", "c", pads=[1, 1, 1, 1]),
        node("HardSwish", "c", "d"),
        node("Conv", "d w", "e", pads=[1, 1, 1, 1]),
        node("HardSigmoid", "e", "f", alpha=0.3),
        node("Conv", "f w", "g", pads=[1, 1, 1, 1]),
        helper.make_node("Clip", ["g", "", "high"], ["y"], name="node_y"),
    ]
    bounds = {"low": np.array(0.0, "float32"), "high": np.array(0.4, "float32")}
    return make_model(nodes, IMAGE, {"w": random(8, 8, 3, 3), **bounds})


def old_clip() -> onnx.ModelProto:
    """Clip with attributes, as before opset 11; and initializers listed among the inputs, as in IR version 3."""
    model = make_model([node("Clip", "x", "a", min=-0.2, max=0.3), node("Add", "a w", "y")], IMAGE, {"w": random(1)})
    model.opset_import[0].version = 9
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [1]))
    return model


def deconvolution_between_convolutions() -> onnx.ModelProto:
    weights = {"a": random(6, 8, 3, 3), "b": random(6, 5, 2, 2), "c": random(4, 5, 1, 1)}
    nodes = [
        node("Conv", "x a", "h", pads=[1, 1, 1, 1]),
        node("ConvTranspose", "h b", "d", strides=[2, 2]),
        node("Conv", "d c", "y"),
    ]
    return make_model(nodes, IMAGE, weights)


def local_function() -> onnx.ModelProto:
    model = make_model([helper.make_node("Twice", ["x"], ["y"], domain="here")], IMAGE, domains={"here": 1})
    opsets = [helper.make_opsetid("", 17)]
    body = [helper.make_node("Add", ["v", "v"], ["w"])]
    model.functions.append(helper.make_function("here", "Twice", ["v"], ["w"], body, opsets))
    return model


GRAPHS = [
    dropout_unused_mask, dropout_chain_to_output, dropout_switched_off, dropout_used_mask, sums,
    constant_of_shape_weights, conv_batch_norm, conv_read_twice, grouped_and_depthwise, residual, clipped, old_clip,
    local_function, deconvolution_between_convolutions,
]  # fmt: skip


@pytest.fixture(scope="module")
def host() -> Any:
    return tvm_env.make_target(tvm_env.host_target(2))


def prepared(model: onnx.ModelProto, host: Any) -> tuple[Any, Any]:
    shapes = {spec.name: spec.static_shape for spec in model_inputs.read_inputs(model)}
    return pipelines.prepare(importer.import_onnx(model, shapes), host, pipelines.require_pipeline("graph/2"))


def largest_error(model: onnx.ModelProto, host: Any) -> float:
    """The largest difference to ONNX Runtime's outputs as a share of an output's peak."""
    module, used = prepared(model, host)
    assert used.name == "graph/2"
    return onnx_graphs.largest_error(model, tvm.compile(pipelines.finish(module, host, None, used), target=host))


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_a_graph_computes_what_onnx_runtime_computes(build: Callable[[], onnx.ModelProto], host: Any) -> None:
    """Within 1e-4 of the output's peak, through import, graph pipeline and compiler."""
    model = build()
    before = model.SerializeToString()
    assert largest_error(model, host) < 1e-4
    assert model.SerializeToString() == before


@pytest.mark.parametrize("name", ["tiny-cnn", "mlp"])
def test_a_zoo_model_computes_what_onnx_runtime_computes(name: str, host: Any) -> None:
    """The zoo's small models do too."""
    assert largest_error(source.resolve_model(name).load(), host) < 1e-4


@pytest.mark.parametrize(
    ("name", "side", "ends"),
    [
        ("inception_v3", 75, {"scores": (1, 1000)}),
        ("yolov4-tiny", 64, {"coarse": (1, 255, 2, 2), "fine": (1, 255, 4, 4)}),
    ],
)
def test_a_zoo_model_on_a_small_image_computes_what_onnx_runtime_computes(
    name: str, side: int, ends: Mapping[str, tuple[int, ...]], host: Any
) -> None:
    """Those with operators that no small one has, too; on small images, since nothing here is tuned."""
    entry = dataclasses.replace(zoo.ZOO[name], input_shapes={"data": (1, 3, side, side)}, output_shapes=ends)
    assert largest_error(onnx.load_model_from_string(entry.build()), host) < 1e-4


def test_batch_norm_and_layout_leave_one_function(host: Any) -> None:
    """After import and pipeline a convolution with batch normalisation is one function with constant weights."""
    module, used = prepared(conv_batch_norm(), host)
    names = {w.name for w in workloads.extract(module, host, {}, used.name)}
    assert names == {"transpose_conv2d_add_relu 3x3/2 8x12x12>16", "transpose 6x6x16>16x6x6"}


@pytest.mark.parametrize("name", ["light_squeezenet", "light_resnet50"])
def test_models_that_the_project_did_not_make(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The ONNX package's own test models import, without a word on standard output."""
    model = onnx.load(LIGHT / f"{name}.onnx")
    shapes = {spec.name: spec.static_shape for spec in model_inputs.read_inputs(model)}
    module = importer.import_onnx(model, shapes)
    assert "main" in [var.name_hint for var in module.get_global_vars()]
    assert capfd.readouterr().out == ""


# What cannot be imported


def test_what_cannot_be_imported_is_named() -> None:
    """An ONNX operator without a converter: the error says which, and the first node of it. com.acme's Relu is not
    ONNX's: name, domain and node are in the error.
    Inner graphs are looked through as well. A model that takes strings: the error names the inputs.
    """
    model = make_model(
        [node("Relu", "x", "a"), node("Bernoulli", "a", "b"), node("Bernoulli", "a", "y")], {"x": (2, 3, 3)}
    )
    with pytest.raises(UsageError, match=r"operator Bernoulli \(node 'node_b'\)"):
        importer.import_onnx(model, {"x": (2, 3, 3)})
    relu = helper.make_node("Relu", ["x"], ["y"], name="theirs", domain="com.acme")
    model = make_model([relu], IMAGE, domains={"com.acme": 1})
    with pytest.raises(UsageError, match=r"com\.acme::Relu \(node 'theirs'\)"):
        importer.import_onnx(model, IMAGE)
    inner = helper.make_node("Relu", ["x"], ["z"], name="inside", domain="com.acme")
    out = [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])]
    branches = {f"{side}_branch": helper.make_graph([inner], side, [], out) for side in ("then", "else")}
    nodes = [node("ReduceSum", "x", "s", keepdims=0), node("Cast", "s", "c", to=TensorProto.BOOL)]
    model = make_model([*nodes, node("If", "c", "y", **branches)], {"x": (2,)}, domains={"com.acme": 1})
    with pytest.raises(UsageError, match=r"com\.acme::Relu \(node 'inside'\)"):
        importer.import_onnx(model, {"x": (2,)})
    model = make_model([node("Identity", "words", "y")], {"words": (3,)}, input_type=TensorProto.STRING)
    with pytest.raises(UsageError, match="text: 'words'"):
        importer.import_onnx(model, {"words": (3,)})


def test_a_failing_conversion_is_named_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A converter that gives up, also for a size: operator, node and reason are in the error, stdout stays clean."""
    model = make_model([node("Relu", "x", "a"), node("MatMul", "a w", "y")], {"x": (2, 3)}, {"w": random(4, 5)})
    with pytest.raises(UsageError, match=r"operator MatMul \(node 'node_y'\): "):
        importer.import_onnx(model, {"x": (2, 3)})
    huge = make_model([node("Tile", "x n", "y")], {"x": (1, 4)}, {"n": np.array([2**30, 2**30], "int64")})
    with pytest.raises(UsageError, match=r"operator Tile .* exceeds a board's memory"):
        importer.import_onnx(huge, {"x": (1, 4)})
    assert capfd.readouterr().out == ""


def test_an_operator_of_onnx_runtimes_own_domain(host: Any) -> None:
    """FastGelu of com.microsoft is known and computes the same; its BiasSoftmax is refused by name."""
    gelu = helper.make_node("FastGelu", ["x"], ["y"], domain="com.microsoft")
    assert largest_error(make_model([gelu], IMAGE, domains={"com.microsoft": 1}), host) < 1e-4
    foreign = helper.make_node("BiasSoftmax", ["x", "x"], ["y"], domain="com.microsoft")
    with pytest.raises(UsageError, match=r"com\.microsoft::BiasSoftmax"):
        importer.import_onnx(make_model([foreign], IMAGE, domains={"com.microsoft": 1}), IMAGE)


def test_a_shape_that_does_not_fit_is_to_blame() -> None:
    """Where the model cannot compute with the shape that was chosen for an open input, no operator is blamed."""
    nodes = [
        node("MaxPool", "x", "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("ConvTranspose", "p w", "u", strides=[2, 2]),
        node("Concat", "x u", "y", axis=1),
    ]
    model = make_model(nodes, {"x": (1, 3, 0, 0)}, {"w": random(3, 3, 2, 2)})
    for dimension, name in zip(model.graph.input[0].type.tensor_type.shape.dim[2:], ("h", "w"), strict=True):
        dimension.dim_param = name
    importer.import_onnx(model, {"x": (1, 3, 32, 32)})
    with pytest.raises(UsageError, match=r"cannot compute with the shape x=1,3,33,33") as caught:
        importer.import_onnx(model, {"x": (1, 3, 33, 33)})
    assert "node_y" in str(caught.value)
    assert "Replace the operator" not in str(caught.value)


def test_a_number_that_is_no_row_takes_the_nearest(host: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A word that is in no vocabulary, which an input may hold, reads no foreign memory; TVM has nothing to warn of."""
    gc.collect()  # what other tests left half done warns when it goes
    capfd.readouterr()
    table = random(6, 4)
    model = make_model([node("Gather", "t x", "y")], {"x": (5,)}, {"t": table}, input_type=TensorProto.INT64)
    module, used = prepared(model, host)
    machine = tvm.relax.VirtualMachine(tvm.compile(pipelines.finish(module, host, None, used), target=host), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(np.array([0, 5, -1, 2**40, 6], "int64"))).numpy()
    np.testing.assert_array_equal(found, table[[0, 5, 5, 5, 5]])
    assert capfd.readouterr().err == ""
