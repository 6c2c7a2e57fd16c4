"""A model's inputs: reading them, settling open dimensions, filling them."""

from __future__ import annotations

import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import onnx
import pytest

from farm.errors import UsageError
from farm.models import inputs, zoo
from farm.models.inputs import InputSpec
from farm.models.lengths import set_batch
from farm.models.source import ModelSource, resolve_model

LIGHT = pathlib.Path(onnx.__file__).parent / "backend/test/data/light"
IMAGE = InputSpec("data", ("batch", 3, "?", "?"), "float32")
MASK = InputSpec("mask", ("batch", 10), "int64")


def model_with(*values: onnx.ValueInfoProto) -> onnx.ModelProto:
    return onnx.helper.make_model(onnx.helper.make_graph([], "g", values, []))


def tensor(name: str, shape: list[int | str | None] | None, dtype: int = onnx.TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, dtype, shape)


def test_inputs_of_a_graph_are_read_or_refused() -> None:
    """A named open dimension keeps its name; unnamed, zero and negative ones are '?'. Without even a rank no shape can
    be given, and the error says so. The farm feeds number tensors; anything else is named for what it is.
    """
    (spec,) = inputs.read_inputs(model_with(tensor("data", ["batch", 3, None, -1])))
    assert spec == InputSpec("data", ("batch", 3, "?", "?"), "float32")
    assert spec.is_dynamic
    with pytest.raises(UsageError, match="no shape"):
        inputs.read_inputs(model_with(tensor("data", None)))
    with pytest.raises(UsageError, match="text"):
        inputs.read_inputs(model_with(tensor("words", [1], onnx.TensorProto.STRING)))
    sequence = onnx.helper.make_tensor_sequence_value_info("list", onnx.TensorProto.FLOAT, None)
    with pytest.raises(UsageError, match="sequence"):
        inputs.read_inputs(model_with(sequence))


@pytest.mark.parametrize("name", ["light_squeezenet", "light_resnet50"])
def test_weights_listed_as_inputs_are_not_inputs(name: str) -> None:
    """Of the hundreds of inputs of an IR version 3 file only the image remains."""
    (spec,) = inputs.read_inputs(onnx.load(LIGHT / f"{name}.onnx"))
    assert spec.static_shape == (1, 3, 224, 224)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("data=1,3,224,224", ("data", (1, 3, 224, 224))),
        ("data=1x3x8x8", ("data", (1, 3, 8, 8))),
        ("data = [1, 3]", ("data", (1, 3))),
        ("data=", ("data", ())),
        ("gpu_0/data_0=1", ("gpu_0/data_0", (1,))),
        ("a=b:0=2,2", ("a=b:0", (2, 2))),
    ],
)
def test_shape_option(text: str, parsed: tuple[str, tuple[int, ...]]) -> None:
    """The forms that people type are read, names with '=' included."""
    assert inputs.parse_shape(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "data", "=1,2", "data=1,two", "data=1,0", "data=1,-3", "data=1.5", "data=1,,²", "data=" + "9" * 6000]
)
def test_bad_shape_option(text: str) -> None:
    """Anything else is refused, quoting what was typed."""
    with pytest.raises(UsageError, match="--shape"):
        inputs.parse_shape(text)


def test_same_input_twice() -> None:
    """Two different shapes for one input contradict; the same shape twice does not."""
    assert inputs.parse_shapes(["a=1,2", "a=1x2"]) == {"a": (1, 2)}
    with pytest.raises(UsageError, match="twice"):
        inputs.parse_shapes(["a=1,2", "a=1,3"])


def test_open_inputs_are_named_and_settled() -> None:
    """Without `--shape` the error names each open input and gives a command to copy. A named dimension settled for one
    input holds for the others. The hint holds the names that would have worked.
    """
    with pytest.raises(UsageError, match=r"data \(batch, 3, \?, \?\) float32; mask") as raised:
        inputs.resolve_inputs([IMAGE, MASK], {})
    assert "--shape data=1,3,224,224 --shape mask=1,10 (this assumes a batch of 1)" in raised.value.hint
    image, mask = inputs.resolve_inputs([IMAGE, MASK], {"data": (2, 3, 8, 8)})
    assert image.static_shape == (2, 3, 8, 8)
    assert mask.static_shape == (2, 10)
    with pytest.raises(UsageError) as raised:
        inputs.resolve_inputs([IMAGE, MASK], {"image": (1, 3, 8, 8)})
    assert "data" in raised.value.hint
    assert "mask" in raised.value.hint


@pytest.mark.parametrize(
    ("spec", "example"),
    [
        (InputSpec("image", ("N", "H", "W", 3), "uint8"), "image=1,224,224,3 (this assumes a batch of 1)"),
        (InputSpec("image", (1, "C", "H", "W"), "float32"), "image=1,3,224,224"),
        (InputSpec("line", ("?", 3, 48, "?"), "float32"), "line=1,3,48,224 (this assumes a batch of 1)"),
        (InputSpec("ids", ("batch_size", "sequence_length"), "int64"), "ids=1,128 (this assumes a batch of 1)"),
        (InputSpec("samples", ("N", 1, "T"), "float32"), "samples=1,1,16000 (this assumes a batch of 1)"),
        (InputSpec("features", ("seq_len", "batch", 80), "float32"), "features=128,1,80"),
    ],
    ids=lambda value: value.name if isinstance(value, InputSpec) else "",
)
def test_examples_are_of_usual_sizes(spec: InputSpec, example: str) -> None:
    """Images, words, sound and rows of numbers are distinguished by rank, type and names."""
    with pytest.raises(UsageError) as raised:
        inputs.resolve_inputs([spec], {})
    assert raised.value.hint == f"Give the shape, for example: --shape {example}"


@pytest.mark.parametrize(
    ("name", "rest", "is_batch"),
    [("N", (13,), True), ("?", (3, 8, 8), True), ("seq_len", (80,), False), ("N", (), False)],
)
def test_a_batch_that_alone_is_open_is_one(
    name: str, rest: tuple[int, ...], is_batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said; a length, and the only dimension of an input, are asked for."""
    specs = [InputSpec(f"row-{name}", (name, *rest), "float32"), InputSpec("scale", (4,), "float32")]
    if not is_batch:
        with pytest.raises(UsageError, match="leaves dimensions open"):
            inputs.resolve_inputs(specs, {})
        return
    assert [each.shape for each in inputs.resolve_inputs(specs, {})] == [(1, *rest), (4,)]
    assert f"the open batch of row-{name} is taken as 1" in caplog.text


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"image": (1, 3, 8, 8)}, "no input 'image'"),
        ({"data": (1, 3, 8)}, "3 dimensions"),
        ({"data": (1, 4, 8, 8)}, "fixes"),
        ({"data": (1, 3, 8, 8), "mask": (2, 10)}, "'batch' twice"),
        ({"data": (1, 3, 2**30, 2**30)}, "exceeds 2 GiB"),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    """An unknown name, a wrong rank, a fixed dimension, a contradiction and an excessive size are each reported."""
    with pytest.raises(UsageError, match=message):
        inputs.resolve_inputs([IMAGE, MASK], shapes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64", "int32", "uint8", "int8", "bool"])
def test_values_have_the_dtype_and_vary(dtype: str) -> None:
    """Values have the input's type and shape, and are not all one number."""
    spec = InputSpec("x", (4, 8), dtype)
    array = inputs.make_inputs([spec], seed=3)["x"]
    assert array.dtype == np.dtype(dtype)
    assert array.shape == (4, 8)
    assert len(np.unique(array)) > 1


def test_values_are_seeded_per_input() -> None:
    """The same seed gives the same values beside any other inputs; another seed, others. Filling an input with open
    dimensions is refused, not guessed.
    """
    a, b = InputSpec("a", (8,), "float32"), InputSpec("b", (8,), "float32")
    both, alone = inputs.make_inputs([a, b], 5), inputs.make_inputs([b], 5)
    np.testing.assert_array_equal(both["b"], alone["b"])
    assert not np.array_equal(both["a"], both["b"])
    assert not np.array_equal(alone["b"], inputs.make_inputs([b], 6)["b"])
    with pytest.raises(UsageError, match="open dimensions"):
        inputs.make_inputs([IMAGE])


def test_the_batch_is_the_first_dimension() -> None:
    """A first dimension of 1 becomes the batch in a copy; --shape that says otherwise is refused."""
    source = resolve_model("mlp")
    model, inputs = set_batch(source, (), 4)
    assert inputs[0].static_shape == (4, 64)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 4
    assert set_batch(source, (), 1)[1][0].static_shape == (1, 64)
    assert source.load().graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    with pytest.raises(UsageError, match="--shape disagree"):
        set_batch(source, ("data=1,64",), 4)


@pytest.mark.parametrize("model", zoo.ZOO.values(), ids=lambda m: m.name)
def test_zoo_models_have_any_batch_size(model: zoo.ZooModel) -> None:
    """Nothing inside a network fixes the batch: with three inputs at once there are three outputs."""
    data = model.outline()
    proto, _ = set_batch(ModelSource(model.name, data, "", f"zoo:{model.name}"), (), 3)
    graph = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True).graph
    shapes = {value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim) for value in graph.output}
    assert shapes == {name: (3, *shape[1:]) for name, shape in model.output_shapes.items()}


@hypothesis.given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text makes the option's reader fail in another way than UsageError."""
    try:
        name, shape = inputs.parse_shape(text)
    except UsageError:
        return
    assert name
    assert all(d > 0 for d in shape)
