"""Find a campaign's models and set their shapes: one variant for each batch size. TVM is not needed."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence

import numpy as np
import onnx

from farm.campaign.spec import CampaignFile, ModelSpec
from farm.errors import UsageError
from farm.inventory import documents
from farm.inventory.documents import Place
from farm.models.inputs import InputSpec, parse_shapes, read_inputs, resolve_inputs
from farm.models.shape_hints import set_batch
from farm.models.source import ModelSource, resolve_model


@dataclasses.dataclass(frozen=True)
class ModelVariant:
    """A model with the shape of every input set. `index` is its place in the file; `batch` None: the model's own.

    `least_bytes` is the memory of its weights and inputs: a lower bound.
    """

    index: int
    name: str
    source: ModelSource
    shapes: tuple[str, ...]
    batch: int | None
    inputs: tuple[InputSpec, ...]
    least_bytes: int

    def load(self) -> onnx.ModelProto:
        """Load a fresh copy with these shapes."""
        return _set_shapes(self.source, self.shapes, self.batch)[0]


def to_variant(source: ModelSource, inputs: Sequence[InputSpec]) -> ModelVariant:
    """Make a variant of a model whose inputs are set."""
    own = {each.name: each.shape for each in read_inputs(source.load())}
    settled = [each for each in inputs if own[each.name] != each.static_shape]
    shapes = tuple(f"{each.name}={','.join(map(str, each.static_shape))}" for each in settled)
    return ModelVariant(0, source.name, source, shapes, None, tuple(inputs), _count_bytes(source, inputs))


def read_models(campaign: CampaignFile) -> tuple[list[ModelVariant], list[tuple[Place, str]]]:
    """Return every variant of every model, and the errors of those that cannot be read."""
    variants: list[ModelVariant] = []
    faults: list[tuple[Place, str]] = []
    for index, spec in enumerate(campaign.spec.models):
        try:
            source = resolve_model(spec.zoo or str(_locate(spec, campaign.path)))
            variants += [_read_variant(index, name, spec, source, batch) for name, batch in spec.variants]
        except UsageError as error:
            # Written for a command's options, which are keys here.
            text = documents.to_text(error).replace("--shape ", "shape ").replace("--batch ", "batch ")
            faults.append((("models", index), f"{spec.called}: {text}"))
    return variants, faults


def _locate(spec: ModelSpec, file: pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(spec.path or "")
    try:
        return file.absolute().parent / path.expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: there is no such user") from error


def _read_variant(index: int, name: str, spec: ModelSpec, source: ModelSource, batch: int | None) -> ModelVariant:
    shapes = _choose_shapes(spec, read_inputs(source.load()), batch)
    _, inputs = _set_shapes(source, shapes, batch)
    return ModelVariant(index, name, source, shapes, batch, inputs, _count_bytes(source, inputs))


def _count_bytes(source: ModelSource, inputs: Sequence[InputSpec]) -> int:
    fed = sum(math.prod(each.static_shape) * np.dtype(each.dtype).itemsize for each in inputs)
    return len(source.onnx_bytes) + fed


def _choose_shapes(spec: ModelSpec, inputs: Sequence[InputSpec], batch: int | None) -> tuple[str, ...]:
    """Return the shapes to set, as `NAME=1,3`, with the batch as the first dimension of each."""
    own = {each.name: each.shape for each in inputs}
    chosen = []
    for name, shape in spec.shape.items():
        # A given shape cannot be changed: one that equals the model's own is left to the batch.
        if batch is not None and name in own and own[name] and own[name][1:] == shape[1:]:
            continue
        numbers = (batch, *shape[1:]) if batch is not None and shape else shape
        chosen.append(f"{name}={','.join(map(str, numbers))}")
    return tuple(chosen)


def _set_shapes(
    source: ModelSource, shapes: Sequence[str], batch: int | None
) -> tuple[onnx.ModelProto, tuple[InputSpec, ...]]:
    if batch is not None:
        return set_batch(source, shapes, batch)
    model = source.load()
    return model, resolve_inputs(read_inputs(model), parse_shapes(shapes), model)
