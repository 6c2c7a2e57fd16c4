"""A campaign's models: find them, set their shapes (one variant for each batch size), list their workloads.

Imports run in a separate process (`farm.processes.jobs`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import onnx

from farm.artifacts import import_check
from farm.artifacts.given_model import GivenModel, open_source
from farm.campaign.spec import CampaignFile, ModelSpec
from farm.errors import UsageError
from farm.inventory import documents
from farm.inventory.board_types import BoardType
from farm.inventory.documents import Place
from farm.models.inputs import InputSpec, parse_shapes, read_inputs, resolve_inputs
from farm.models.lengths import set_batch, split_shapes
from farm.models.source import ModelSource, resolve_model
from farm.processes.jobs import JobProcess, take
from farm.search import traces, tvm_env
from farm.search import workloads as search_workloads
from farm.values import Workload

# The biggest models take a minute to import.
TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class ModelVariant:
    """A model with the shape of every input set. `index` is its place in the file; `batch` None: the model's own.

    `least_bytes` is the memory of its weights and inputs: a lower bound. `lengths` is the range that it is one size of,
    the last of its `shapes`; "" for none.
    """

    index: int
    name: str
    source: ModelSource
    shapes: tuple[str, ...]
    batch: int | None
    inputs: tuple[InputSpec, ...]
    least_bytes: int
    lengths: str = ""

    def load(self) -> onnx.ModelProto:
        """Load a fresh copy with these shapes."""
        if self.batch is not None:
            return set_batch(self.source, self.shapes, self.batch)[0]
        model = self.source.load()
        resolve_inputs(read_inputs(model), parse_shapes(self.shapes), model)
        return model


def to_variants(opened: GivenModel) -> list[ModelVariant]:
    """Make a variant of a model for each of its lengths, the greatest first."""
    about, source = opened.about, opened.original or opened.source
    if opened.lengths is not None:
        return _list_variants(0, about.name, source, about.shapes, about.batch)[::-1]
    return [to_variant(source, opened.inputs, about.batch)]


def to_variant(source: ModelSource, inputs: Sequence[InputSpec], batch: int | None = None) -> ModelVariant:
    """Make a variant of a model whose inputs are set."""
    own = {each.name: each.shape for each in read_inputs(source.load())}
    settled = [each for each in inputs if own[each.name] != each.static_shape]
    if batch is not None:  # sets the first dimension by itself, also where the model fixes it
        settled = [each for each in settled if own[each.name][1:] != each.static_shape[1:]]
    shapes = tuple(f"{each.name}={','.join(map(str, each.static_shape))}" for each in settled)
    return ModelVariant(0, source.name, source, shapes, batch, tuple(inputs), _count_bytes(source, inputs))


def read_models(campaign: CampaignFile) -> tuple[list[ModelVariant], list[tuple[Place, str]]]:
    """Return every variant of every model, and the errors of those that cannot be read."""
    variants: list[ModelVariant] = []
    faults: list[tuple[Place, str]] = []
    for index, spec in enumerate(campaign.spec.models):
        try:
            source = resolve_model(spec.zoo or str(_locate(spec, campaign.path)))
            source.require_float(campaign.spec.weights)
            for name, batch in spec.variants:
                shapes = _choose_shapes(spec, read_inputs(source.load()), batch)
                variants += _list_variants(index, name, source, (*shapes, *filter(None, [spec.lengths])), batch)
        except UsageError as error:
            faults.append((("models", index), f"{spec.called}: {documents.to_text(error)}"))
    return variants, faults


def _locate(spec: ModelSpec, file: pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(spec.path or "")
    try:
        return file.absolute().parent / path.expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: there is no such user") from error


def _list_variants(
    index: int, name: str, source: ModelSource, shapes: Sequence[str], batch: int | None
) -> list[ModelVariant]:
    """Return the model with these shapes; with a range of lengths one for each size, ascending."""
    opened = open_source(source, shapes, batch)
    import_check.find_output_axes(opened)
    plain, lengths = split_shapes(shapes)
    variants = []
    for number, each in enumerate(opened.list_sizes()):
        fixed = [lengths.fix(lengths.sizes[number])] if lengths else []
        called, text = " ".join([name, *fixed]), lengths.text if lengths else ""
        size = _count_bytes(source, each.inputs)
        variants.append(ModelVariant(index, called, source, (*plain, *fixed), batch, each.inputs, size, text))
    return variants


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
        is_input = name in own and len(own[name]) == len(shape)
        numbers = (batch, *shape[1:]) if batch is not None and shape and is_input else shape
        chosen.append(f"{name}={','.join(map(str, numbers))}")
    return tuple(chosen)


def survey_model(source: ModelSource, inputs: Sequence[InputSpec], board_type: BoardType) -> tuple[list[Any], str]:
    """Return the workloads, the heaviest first, and the name of the graph pipeline used. Raises UsageError."""
    if board_type.target is None:
        config = tvm_env.host_target(len(os.sched_getaffinity(0)))
    else:
        config = board_type.target.to_tvm()
    shapes = {spec.name: spec.static_shape for spec in inputs}
    prepared = search_workloads.prepare_model(source.load(), shapes, config, board_type.pipeline)
    return prepared.workloads, prepared.pipeline.name


@dataclasses.dataclass(frozen=True)
class Form:
    """What decides a model's workloads besides the model: target (None: this host's, with `cores`), pipeline."""

    config: str | None
    cores: int
    pipeline: str

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, cores: int, pipeline: str) -> Form:
        """Return equal forms for equal targets, in any order of keys, so that a model is imported once for them."""
        if config is None:
            return cls(None, cores, pipeline)
        return cls(json.dumps(dict(config), sort_keys=True), 0, pipeline)

    def to_target(self) -> dict[str, Any]:
        """Return TVM's target as a dict. Loads TVM where it is this host's."""
        if self.config is None:
            return tvm_env.host_target(self.cores)
        config: dict[str, Any] = json.loads(self.config)
        return config


@dataclasses.dataclass(frozen=True)
class WorkloadSurvey:
    """The workloads of a model in a form, and the pipeline used.

    Without `texts` (`start_surveys`) the workloads lack their functions. `predicted_s`: estimated time of a call (s),
    by hash, where a family has one.
    """

    workloads: tuple[Workload, ...]
    pipeline: str
    predicted_s: Mapping[str, float] = dataclasses.field(default_factory=dict)


Surveys = list[tuple[ModelVariant, Future[WorkloadSurvey]]]


def start_surveys(process: JobProcess, jobs: Sequence[tuple[ModelVariant, Form]], *, texts: bool = False) -> Surveys:
    """Have a child process survey models; `take_surveys` returns the results.

    `texts`: include the text of every workload's function, which a run needs and a plan does not.
    """
    return [(model, process.give(functools.partial(_survey, model, form, texts))) for model, form in jobs]


def take_surveys(surveys: Surveys, note: Callable[[str], None]) -> list[WorkloadSurvey | UsageError]:
    """Return the surveys, in order, or why TVM cannot import the model.

    Raises DeadlineError where one import takes longer than `TIMEOUT_S`.
    """
    done: list[WorkloadSurvey | UsageError] = []
    for number, (model, survey) in enumerate(surveys, 1):
        note(f"reading {model.name}" + (f" ({number} of {len(surveys)})" if len(surveys) > 1 else ""))
        try:
            done.append(take(survey, TIMEOUT_S, f"{model.name} was not imported"))
        except UsageError as error:
            done.append(error)
    return done


def _survey(model: ModelVariant, form: Form, texts: bool) -> WorkloadSurvey:
    shapes = {spec.name: spec.static_shape for spec in model.inputs}
    prepared = search_workloads.prepare_model(model.load(), shapes, form.to_target(), form.pipeline)
    predicted_s = {w.hash: seconds for w in prepared.workloads if (seconds := traces.predict_seconds(w)) is not None}
    workloads = prepared.workloads if texts else [dataclasses.replace(w, module_json="") for w in prepared.workloads]
    return WorkloadSurvey(tuple(workloads), prepared.pipeline.name, predicted_s)
