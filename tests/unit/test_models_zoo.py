"""The zoo: real topologies, random weights, outputs in which an error shows."""

from __future__ import annotations

import hashlib

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
    proto = onnx.load_model_from_string(model.build())
    onnx.checker.check_model(proto, full_check=True)
    assert {spec.name: spec.shape for spec in inputs.read_inputs(proto)} == dict(model.input_shapes)


@pytest.mark.parametrize("name", ["squeezenet1.1", "resnet18", "mobilenet_v2"])
def test_known_parameter_counts(name: str) -> None:
    """The counts are those that torchvision documents."""
    published = {"squeezenet1.1": 1_235_496, "resnet18": 11_689_512, "mobilenet_v2": 3_504_872}
    assert zoo.ZOO[name].parameters == published[name]


@pytest.mark.parametrize("model", zoo.ZOO.values(), ids=lambda m: m.name)
def test_output_is_finite_and_spread(model: zoo.ZooModel) -> None:
    """Scores have the declared shape, a spread of order one, and depend on the input."""
    session = onnxruntime.InferenceSession(model.build(), providers=["CPUExecutionProvider"])
    specs = inputs.read_inputs(onnx.load_model_from_string(model.build()))
    first, second = (session.run(None, inputs.make_inputs(specs, seed))[0] for seed in (0, 1))
    assert first.shape == model.output_shape
    assert np.isfinite(first).all()
    assert 0.3 < first.std() < 10
    assert len(np.unique(first)) > 0.7 * first.size
    assert np.abs(first - second).max() > 0.02


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
    for tensor in onnx.load_model_from_string(model.build()).graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        assert values.ndim == 0 or len(np.unique(values)) > 0.9 * min(values.size, 1000), tensor.name


def test_default_is_in_the_zoo() -> None:
    """The model that quickstart takes exists."""
    assert zoo.DEFAULT in zoo.ZOO
