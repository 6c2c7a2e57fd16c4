"""Another batch size for a model: its inputs' first dimension, and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx

from farm.errors import UsageError
from farm.models.inputs import InputSpec, parse_shapes, read_inputs, resolve_inputs
from farm.models.source import ModelSource


def set_batch(source: ModelSource, shapes: Sequence[str], batch: int) -> tuple[onnx.ModelProto, tuple[InputSpec, ...]]:
    """Return the model with first dimension `batch` in its inputs. Raises UsageError where it fixes another one.

    An open first dimension is the batch; one of 1 is taken for it.
    """
    model = source.load()
    given = parse_shapes(shapes)
    opened = []
    for spec in read_inputs(model):
        first = spec.shape[0] if spec.shape else None
        # An input may be called like a dimension that is given.
        is_given = spec.name in given and len(given[spec.name]) == len(spec.shape)
        if is_given or first == batch or first is None:
            opened.append(spec)
        elif isinstance(first, str) or first == 1:
            opened.append(dataclasses.replace(spec, shape=(batch, *spec.shape[1:])))
        else:
            raise UsageError(
                f"--batch {batch}: the model's input {spec} has a first dimension of {first}",
                "Export the model with an open batch dimension.",
            )
    inputs = resolve_inputs(opened, given, model)
    if batch > 1 and (wrong := [spec for spec in inputs if spec.static_shape[:1] != (batch,)]):
        raise UsageError(f"--batch {batch} and --shape disagree about the input {wrong[0]}", "Remove one of them.")
    if any(spec.shape != was.shape for spec, was in zip(inputs, read_inputs(model), strict=True)):
        _forget_shapes(model, inputs)
    return model, inputs


def _forget_shapes(model: onnx.ModelProto, inputs: Sequence[InputSpec]) -> None:
    """Write the inputs' shapes into the model and drop the shapes derived from them."""
    shapes = {spec.name: spec.static_shape for spec in inputs}
    for value in model.graph.input:
        for dimension, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            dimension.dim_value = size
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
