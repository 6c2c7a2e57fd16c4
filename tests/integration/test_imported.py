"""The model without schedules, as TVM imports it, beside ONNX Runtime."""

from __future__ import annotations

import onnx
import pytest

from farm.artifacts.checking import make_seeded
from farm.artifacts.import_check import compare_import, require_right_import
from farm.errors import PermanentError
from farm.models.inputs import read_inputs
from farm.models.source import ModelSource
from tests.integration.onnx_graphs import make_model, node


class Misread(ModelSource):
    def load(self) -> onnx.ModelProto:
        return make_model([node("Tanh", "x", "y")], {"x": (2, 8)})


def make_source(operator: str, kind: type[ModelSource] = ModelSource) -> ModelSource:
    return kind(operator, make_model([node(operator, "x", "y")], {"x": (2, 8)}).SerializeToString(), "0" * 64, "m.onnx")


def test_a_wrong_import_is_found_before_a_trial_is_spent() -> None:
    """A model that is imported right passes; of one that is imported as another the error says what does not help."""
    said: list[str] = []
    right, wrong = make_source("Tanh"), make_source("Sigmoid", Misread)
    require_right_import(right, read_inputs(right.load()), said.append)
    with pytest.raises(PermanentError, match="seed 0: output 0 differs") as raised:
        require_right_import(wrong, read_inputs(wrong.load()), said.append)
    assert "neither --exact nor other records help" in raised.value.hint
    # On a busy machine each of them says more than once that it still compiles.
    assert list(dict.fromkeys(line.partition(":")[0] for line in said)) == ["Tanh", "Sigmoid"]


def test_what_does_not_compile_is_left_to_its_compilation() -> None:
    """A model that TVM has no import for is no wrong import."""
    source = make_source("Bernoulli")
    inputs = read_inputs(source.load())
    assert compare_import(source, inputs, make_seeded(source, inputs)) is None
