"""Several schedules of each of a model's workloads, built to be timed, and built to be checked. Needs TVM's compiler.

Which schedules, and what is done with them, is `refit.py`'s business.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from farm.errors import InternalError, PermanentError
from farm.models.batches import set_batch
from farm.search import traces
from farm.search.build import builder
from farm.search.graph import prepared as graph_prepared
from farm.sweep.run.programs import SweepRecipe

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rival:
    """One schedule of a workload, built to be timed. `default_s` is what it took at the default point."""

    candidate: str
    default_s: float
    trace_json: str = dataclasses.field(repr=False)
    scheduled_json: str = dataclasses.field(repr=False)
    library: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class TriedWorkload:
    """A workload of the model, and two or more rivals; the first is the one that its record has."""

    workload: str
    name: str
    flop: float
    weight: int
    pipeline: str
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    module_json: str = dataclasses.field(repr=False)
    rivals: tuple[Rival, ...] = dataclasses.field(repr=False)


def build_rivals(
    recipe: SweepRecipe, batch: int, chosen: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[TriedWorkload]:
    """Every workload of the model at `batch` for which `chosen` has rows, the record's candidate first.

    A schedule that does not build any more is left out, and a workload that has one left with it.
    """
    model, inputs = set_batch(recipe.source, recipe.shapes, batch)
    shapes = {spec.name: spec.static_shape for spec in inputs}
    prepared = graph_prepared.prepare_model(model, shapes, recipe.target_config, recipe.board_type.pipeline)
    tried = []
    for workload in prepared.workloads:
        rivals = []
        for row in chosen.get(workload.hash, ()):
            try:
                scheduled = traces.replay(workload.module_json, row["trace_json"], prepared.target)
                library = builder.build_candidate(scheduled, recipe.target_config)
            except (InternalError, PermanentError, RuntimeError, ValueError) as error:
                _log.warning("%s: candidate %s cannot be built: %s", workload.name, row["candidate"], error)
                continue
            rivals.append(Rival(row["candidate"], row["median_s"], row["trace_json"], scheduled, library))
        if len(rivals) > 1:
            tried.append(
                TriedWorkload(
                    workload.hash, workload.name, workload.flop, workload.weight, workload.pipeline,
                    workload.arguments, workload.module_json, tuple(rivals),
                )
            )  # fmt: skip
    return tried


def build_checks(recipe: SweepRecipe, pairs: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Libraries of unscheduled and scheduled functions that take ordinary weights, so that outputs can be compared."""
    config = recipe.target_config

    def build(module_json: str) -> bytes:
        return builder.build_candidate(module_json, config, standalone=True)

    return [(build(plain), build(scheduled)) for plain, scheduled in pairs]
