"""Look at a model as tuning would, without tuning: its workloads for a board type."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from farm.inventory.board_types import BoardType
from farm.models.inputs import InputSpec
from farm.models.source import ModelSource
from farm.search import target
from farm.search.graph import prepared as graph_prepared


def survey_model(source: ModelSource, inputs: Sequence[InputSpec], board_type: BoardType) -> tuple[list[Any], str]:
    """The workloads, the heaviest first, and the name of the graph pipeline used. Raises UsageError."""
    if board_type.target is None:
        config = target.host_target(len(os.sched_getaffinity(0)))
    else:
        config = board_type.target.to_tvm()
    shapes = {spec.name: spec.static_shape for spec in inputs}
    prepared = graph_prepared.prepare_model(source.load(), shapes, config, board_type.pipeline)
    return prepared.workloads, prepared.pipeline.name
