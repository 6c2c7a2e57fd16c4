"""Models in 8 bits: what they are calibrated with, what is refused, what the loss says."""

from __future__ import annotations

import hashlib
import pathlib

import numpy as np
import onnx
import pytest

from farm.artifacts import given_model
from farm.errors import UsageError
from farm.models import inputs, quantise
from farm.models.inputs import InputSpec
from farm.models.source import ModelSource, resolve_model

SPECS = (InputSpec("a", (1, 4), "float32"), InputSpec("b", (2,), "int64"))


def source_of(model: onnx.ModelProto) -> ModelSource:
    data = model.SerializeToString()
    return ModelSource("made", data, hashlib.sha256(data).hexdigest(), "made")


def test_a_model_is_quantised_and_its_loss_known() -> None:
    """Weights become bytes, per channel; the outputs move a little and their order hardly."""
    source = resolve_model("mlp")
    examples = given_model.read_calibration("random", inputs.read_inputs(source.load()), 8)
    done = quantise.quantise(source, examples)
    assert len(done.onnx_bytes) < 0.4 * len(source.onnx_bytes)
    graph = onnx.load_model_from_string(done.onnx_bytes).graph
    assert {node.op_type for node in graph.node} >= {"QuantizeLinear", "DequantizeLinear", "Gemm"}
    held = {tensor.name: tensor for tensor in graph.initializer}
    weights = [held[n.input[0]] for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in held]
    assert {tensor.data_type for tensor in weights} == {onnx.TensorProto.INT8, onnx.TensorProto.INT32}
    scales = [held[n.input[1]].dims for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in held]
    assert [10] in scales
    (loss,) = done.losses
    assert loss.output == "scores"
    assert 0.001 < loss.rms < 0.1
    assert loss.top1 is not None
    assert loss.top1 >= 0.75
    assert done.examples == 8


def test_batch_norm_is_gone_and_so_are_its_numbers() -> None:
    """It is part of the convolutions, whose old weights do not stay in the file."""
    source = resolve_model("tiny-cnn")
    done = quantise.quantise(source, given_model.read_calibration("random", inputs.read_inputs(source.load()), 1))
    graph = onnx.load_model_from_string(done.onnx_bytes).graph
    assert "BatchNormalization" not in {node.op_type for node in graph.node}
    read = {name for node in graph.node for name in node.input}
    assert {tensor.name for tensor in graph.initializer} <= read


def test_the_loss_of_a_model_against_itself_is_none() -> None:
    """Errors are zero, and all rows keep their largest entry."""
    source = resolve_model("mlp")
    examples = given_model.read_calibration("random", inputs.read_inputs(source.load()), 2)
    assert quantise.measure_loss(source.onnx_bytes, source.onnx_bytes, examples) == (
        quantise.Loss("scores", 0.0, 0.0, 1.0),
    )


def test_examples_come_from_files(tmp_path: pathlib.Path) -> None:
    """In the order of their names; what else lies there does not matter."""
    arrays = {"a": np.ones((1, 4), "float32"), "b": np.arange(2)}
    np.savez(tmp_path / "2.npz", **arrays)
    np.savez(tmp_path / "1.npz", **(arrays | {"a": np.zeros((1, 4), "float32")}))
    (tmp_path / "notes.txt").write_text("nothing")
    first, second = given_model.read_calibration(str(tmp_path), SPECS, 99)
    assert first["a"].sum() == 0
    assert second["a"].sum() == 4


def test_a_bare_array_is_the_only_input(tmp_path: pathlib.Path) -> None:
    """No names are needed where there is one input."""
    np.save(tmp_path / "x.npy", np.ones((1, 4), "float32"))
    (example,) = given_model.read_calibration(str(tmp_path), SPECS[:1], 1)
    assert list(example) == ["a"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.ones((1, 4), "float32")}, "no array for the input b"),
        (
            {"a": np.ones((1, 5), "float32"), "b": np.arange(2)},
            r"a is \(1, 5\) float32; the model's input is a \(1, 4\)",
        ),
        ({"a": np.ones((1, 4), "float64"), "b": np.arange(2)}, "a is .* float64"),
    ],
)
def test_examples_that_do_not_fit(tmp_path: pathlib.Path, arrays: dict[str, np.ndarray], message: str) -> None:
    """The file is named, with what it holds and what the model takes."""
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UsageError, match=message):
        given_model.read_calibration(str(tmp_path), SPECS, 1)


def test_folders_without_examples(tmp_path: pathlib.Path) -> None:
    """None, an empty one, and one with a broken file."""
    with pytest.raises(UsageError, match="is no folder"):
        given_model.read_calibration(str(tmp_path / "none"), SPECS, 1)
    with pytest.raises(UsageError, match="holds no") as raised:
        given_model.read_calibration(str(tmp_path), SPECS, 1)
    assert "np.savez(FILE, a=..., b=...)" in raised.value.hint
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(UsageError, match=r"x\.npz is not an \.npz"):
        given_model.read_calibration(str(tmp_path), SPECS, 1)


def test_what_cannot_be_quantised() -> None:
    """A model in 8 bits, one of an old opset, and one without weights are each refused for what they are."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 4])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", [value], [result])

    def source(opset: int) -> ModelSource:
        opsets = [onnx.helper.make_opsetid("", opset)]
        return source_of(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))

    examples = [{"x": np.ones((1, 4), "float32")}]
    with pytest.raises(UsageError, match="no operator that can be quantised"):
        quantise.quantise(source(17), examples)
    with pytest.raises(UsageError, match="opset 11; scales per channel need 13"):
        quantise.quantise(source(11), examples)
    mlp = resolve_model("mlp")
    done = quantise.quantise(mlp, given_model.read_calibration("random", inputs.read_inputs(mlp.load()), 1))
    with pytest.raises(UsageError, match="quantised already"):
        quantise.quantise(source_of(onnx.load_model_from_string(done.onnx_bytes)), examples)
