"""Import a campaign's models in a process of its own and tell their workloads: TVM takes seconds and hundreds of
megabytes, holds up signals, and cannot be loaded beside the runtime that talks to boards.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm.campaign.plan_models import ModelVariant
from farm.errors import FarmError, UsageError
from farm.processes.partners import Child, Parent
from farm.search.prepared import prepare_model
from farm.search.target import host_target
from farm.search.workloads import Workload

# The biggest models take a minute to import.
TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Form:
    """What besides the model decides its workloads: TVM's target (None: this host's, with `cores`), graph pipeline."""

    config: str | None
    cores: int
    pipeline: str

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, cores: int, pipeline: str) -> Form:
        """Equal targets, written in whatever order, give equal forms, so that a model is imported once for them."""
        if config is None:
            return cls(None, cores, pipeline)
        return cls(json.dumps(dict(config), sort_keys=True), 0, pipeline)

    def to_target(self) -> dict[str, Any]:
        """TVM's target as a dict. Loads TVM where it is this host's."""
        if self.config is None:
            return host_target(self.cores)
        target: dict[str, Any] = json.loads(self.config)
        return target


@dataclasses.dataclass(frozen=True)
class Survey:
    """The workloads of a model in a form, and the name of the pipeline really used. Without `texts` (`survey_apart`)
    the workloads lack their functions.
    """

    workloads: tuple[Workload, ...]
    pipeline: str


class Surveying:
    """Surveys that are being made in a process of its own, which begins at once and ends with the block."""

    def __init__(self, jobs: Sequence[tuple[ModelVariant, Form]], *, texts: bool = False) -> None:
        """`texts`: with the text of every workload's function, which a run needs and a plan does not."""
        self._jobs = list(jobs)
        self._child = Child.start(__name__)
        self._child.send(self._jobs, texts)  # where it is gone, `take` tells how it ended

    def __enter__(self) -> Surveying:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()

    def take(self, note: Callable[[str], None]) -> list[Survey | UsageError]:
        """A survey for each job, in order, or why TVM cannot import the model.

        Raises DeadlineError where one import takes longer than `TIMEOUT_S`.
        """
        done: list[Survey | UsageError] = []
        for number, (model, _) in enumerate(self._jobs, 1):
            note(f"reading {model.name}" + (f" ({number} of {len(self._jobs)})" if len(self._jobs) > 1 else ""))
            (answer,) = self._child.receive(TIMEOUT_S, f"{model.name} was not imported")
            if isinstance(answer, FarmError) and not isinstance(answer, UsageError):
                raise answer
            done.append(answer)
        return done


def survey_apart(
    jobs: Sequence[tuple[ModelVariant, Form]], note: Callable[[str], None], *, texts: bool = False
) -> list[Survey | UsageError]:
    """All of it at once; see `Surveying`."""
    if not jobs:
        return []
    with Surveying(jobs, texts=texts) as surveying:
        return surveying.take(note)


def main(parent: Parent) -> None:
    """The life of the process: jobs come, and answers go back."""
    # TVM in the middle of an import hears no signal.
    parent.on_stop = functools.partial(os._exit, 1)
    jobs, texts = parent.receive() or ((), False)
    for model, form in jobs:
        try:
            parent.send(_survey(model, form, texts))
        except FarmError as error:
            parent.send(error)


def _survey(model: ModelVariant, form: Form, texts: bool) -> Survey:
    shapes = {spec.name: spec.static_shape for spec in model.inputs}
    prepared = prepare_model(model.load(), shapes, form.to_target(), form.pipeline)
    workloads = prepared.workloads if texts else [dataclasses.replace(w, module_json="") for w in prepared.workloads]
    return Survey(tuple(workloads), prepared.pipeline.name)
