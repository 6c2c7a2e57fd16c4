"""Import a campaign's models in a separate process (`farm.processes.compile_subprocess`) and list their workloads."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm.campaign.plan_models import ModelVariant
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.models.inputs import InputSpec
from farm.models.source import ModelSource
from farm.processes.compile_subprocess import Apart
from farm.search import default_schedule, target
from farm.search import target as search_target
from farm.search import workloads as search_workloads
from farm.search.graph import pipeline as graph_prepared


def survey_model(source: ModelSource, inputs: Sequence[InputSpec], board_type: BoardType) -> tuple[list[Any], str]:
    """Return the workloads, the heaviest first, and the name of the graph pipeline used. Raises UsageError."""
    if board_type.target is None:
        config = target.host_target(len(os.sched_getaffinity(0)))
    else:
        config = board_type.target.to_tvm()
    shapes = {spec.name: spec.static_shape for spec in inputs}
    prepared = graph_prepared.prepare_model(source.load(), shapes, config, board_type.pipeline)
    return prepared.workloads, prepared.pipeline.name


# The biggest models take a minute to import.
TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Form:
    """What decides a model's workloads besides the model: TVM's target (None: this host's, with `cores`), graph
    pipeline.
    """

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
            return search_target.host_target(self.cores)
        target: dict[str, Any] = json.loads(self.config)
        return target


@dataclasses.dataclass(frozen=True)
class WorkloadSurvey:
    """The workloads of a model in a form, and the pipeline used.

    Without `texts` (`survey_apart`) the workloads lack their functions. `predicted_s`: estimated time of a call (s), by
    hash, where a family has one.
    """

    workloads: tuple[search_workloads.Workload, ...]
    pipeline: str
    predicted_s: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Surveying(Apart):
    """Surveys made by a child process, which starts at once and ends with the block."""

    def __init__(self, jobs: Sequence[tuple[ModelVariant, Form]], *, texts: bool = False) -> None:
        """`texts`: include the text of every workload's function, which a run needs and a plan does not."""
        self._models = [model for model, _ in jobs]
        super().__init__([functools.partial(_survey, model, form, texts) for model, form in jobs])

    def __enter__(self) -> Surveying:
        return self

    def take_all(self, note: Callable[[str], None]) -> list[WorkloadSurvey | UsageError]:
        """Return a survey for each job, in order, or why TVM cannot import the model.

        Raises DeadlineError where one import takes longer than `TIMEOUT_S`.
        """
        done: list[WorkloadSurvey | UsageError] = []
        for number, model in enumerate(self._models, 1):
            note(f"reading {model.name}" + (f" ({number} of {len(self._models)})" if len(self._models) > 1 else ""))
            try:
                done.append(self.take(TIMEOUT_S, f"{model.name} was not imported"))
            except UsageError as error:
                done.append(error)
        return done


def survey_apart(
    jobs: Sequence[tuple[ModelVariant, Form]], note: Callable[[str], None], *, texts: bool = False
) -> list[WorkloadSurvey | UsageError]:
    """Survey all jobs at once; see `Surveying`."""
    if not jobs:
        return []
    with Surveying(jobs, texts=texts) as surveying:
        return surveying.take_all(note)


def _survey(model: ModelVariant, form: Form, texts: bool) -> WorkloadSurvey:
    shapes = {spec.name: spec.static_shape for spec in model.inputs}
    prepared = graph_prepared.prepare_model(model.load(), shapes, form.to_target(), form.pipeline)
    predicted_s = {
        w.hash: seconds for w in prepared.workloads if (seconds := default_schedule.predict_seconds(w)) is not None
    }
    workloads = prepared.workloads if texts else [dataclasses.replace(w, module_json="") for w in prepared.workloads]
    return WorkloadSurvey(tuple(workloads), prepared.pipeline.name, predicted_s)
