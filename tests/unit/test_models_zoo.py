"""The zoo: real topologies, random weights, outputs in which an error shows."""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import onnx
import onnxruntime
import pytest

from farm.models import inputs, onnx_builder, zoo

SMALL = ("tiny-cnn", "mlp", "squeezenet1.1")


@pytest.mark.parametrize("model", zoo.ZOO.values(), ids=lambda m: m.name)
def test_is_valid_onnx_with_the_published_parameter_count(model: zoo.ZooModel) -> None:
    """Every network is checker-clean and has as many trained weights as its paper's reference code."""
    builder = onnx_builder.GraphBuilder(0)
    ((name, shape),) = model.input_shapes.items()
    model.network(builder, builder.input(name, shape))
    assert builder.parameters == model.parameters
    proto = onnx.load_model_from_string(built(model.name))
    onnx.checker.check_model(proto, full_check=True)
    assert {spec.name: spec.shape for spec in inputs.read_inputs(proto)} == dict(model.input_shapes)


@functools.cache
def built(name: str) -> bytes:
    """A zoo model's bytes, made once."""
    return zoo.ZOO[name].build()


# Parameters as documented, and thousand millions of multiply-adds to as many digits: torchvision's tables of weights.
# Inception's there has an auxiliary classifier (768>128 1x1, 128>768 5x5, each with batch norm, dense 768>1000).
# Darknet's README counts YOLOv4-tiny's FLOP; its file of weights holds 6,062,814 numbers, of which two per channel of
# its 3,104 with batch norm are running statistics.
AUXILIARY = 768 * 128 + 2 * 128 + 128 * 768 * 25 + 2 * 768 + 768 * 1000 + 1000
PUBLISHED = {
    "squeezenet1.1": (1_235_496, 0.35, 2),
    "resnet18": (11_689_512, 1.81, 2),
    "resnet50": (25_557_032, 4.09, 2),
    "mobilenet_v2": (3_504_872, 0.30, 2),
    "inception_v3": (27_161_264 - AUXILIARY, 5.71, 2),
    "yolov4-tiny": (6_062_814 - 2 * 3_104, 6.9 / 2, 1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_flop_are_the_published_ones(name: str) -> None:
    """The table says what others count, to the digit that they give, and where."""
    parameters, multiply_adds, digits = PUBLISHED[name]
    model = zoo.ZOO[name]
    assert model.parameters == parameters
    assert model.flop / 2e9 == pytest.approx(multiply_adds, abs=0.5 * 10**-digits)
    assert model.published


@pytest.mark.parametrize("model", zoo.ZOO.values(), ids=lambda m: m.name)
def test_flop_are_those_of_the_graph(model: zoo.ZooModel) -> None:
    """The table's FLOP are what the convolutions and dense layers of the ONNX file come to."""
    graph = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(built(model.name))).graph
    shapes = {t.name: tuple(t.dims) for t in graph.initializer}
    for value in (*graph.value_info, *graph.output):
        shapes[value.name] = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
    # Both operators keep the output's channels in their weight's first dimension.
    per_output = {n.output[0]: shapes[n.input[1]][1:] for n in graph.node if n.op_type in ("Conv", "Gemm")}
    assert model.flop == sum(2 * math.prod(shapes[name]) * math.prod(rest) for name, rest in per_output.items())


@pytest.mark.parametrize("model", zoo.ZOO.values(), ids=lambda m: m.name)
def test_output_is_finite_and_spread(model: zoo.ZooModel) -> None:
    """Outputs have the declared names and shapes, a spread of order one, and depend on the input."""
    session = onnxruntime.InferenceSession(built(model.name), providers=["CPUExecutionProvider"])
    specs = inputs.read_inputs(onnx.load_model_from_string(built(model.name)))
    runs = (session.run(None, inputs.make_inputs(specs, seed)) for seed in (0, 1))
    names = [output.name for output in session.get_outputs()]
    for name, first, second in zip(names, *runs, strict=True):
        assert first.shape == model.output_shapes[name]
        assert np.isfinite(first).all()
        assert 0.3 < first.std() < 10
        assert len(np.unique(first)) > 0.7 * first.size
        assert np.abs(first - second).max() > 0.02
    assert names == list(model.output_shapes)


@pytest.mark.parametrize("name", SMALL)
def test_same_seed_same_bytes(name: str) -> None:
    """A model is a function of its seed; another seed gives other weights and the same graph."""
    first, again, other = (zoo.ZOO[name].build(seed) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    graphs = [onnx.load_model_from_string(data).graph for data in (first, other)]
    assert [n.SerializeToString() for n in graphs[0].node] == [n.SerializeToString() for n in graphs[1].node]


def test_bytes_are_the_same_on_every_machine() -> None:
    """The identity of a zoo model does not depend on the NumPy or Python that built it."""
    digest = hashlib.sha256(zoo.ZOO["tiny-cnn"].build()).hexdigest()
    assert digest == "5f911f63634259486b01e3440aa7bfe7102080a48c071cf92bdcd4f7da73326a"


@pytest.mark.parametrize("model", zoo.ZOO.values(), ids=lambda m: m.name)
def test_no_weight_is_constant(model: zoo.ZooModel) -> None:
    """No weight tensor repeats one value: a swapped or broadcast weight must change the result."""
    graph = onnx.load_model_from_string(built(model.name)).graph
    bounds = {name for node in graph.node if node.op_type in ("Slice", "Resize") for name in node.input[1:]}
    for tensor in graph.initializer:
        if tensor.name in bounds:
            continue
        values = onnx.numpy_helper.to_array(tensor)
        assert values.ndim == 0 or len(np.unique(values)) > 0.9 * min(values.size, 1000), tensor.name


def test_default_is_in_the_zoo() -> None:
    """The model that quickstart takes exists."""
    assert zoo.DEFAULT in zoo.ZOO
