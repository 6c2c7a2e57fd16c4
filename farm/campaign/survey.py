"""Look at a model as tuning would, without tuning: its workloads for a board type."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from farm.inventory.board_types import BoardType
from farm.models.inputs import InputSpec
from farm.models.source import ModelSource
from farm.search import importer, pipeline, target, workloads


def survey_model(source: ModelSource, inputs: Sequence[InputSpec], board_type: BoardType) -> tuple[list[Any], str]:
    """The workloads, the heaviest first, and the name of the graph pipeline used. Raises UsageError."""
    if board_type.target is None:
        config = target.host_target(len(os.sched_getaffinity(0)))
    else:
        config = board_type.target.to_tvm()
    compile_target = target.make_target(config)
    module = importer.import_onnx(source.load(), {spec.name: spec.static_shape for spec in inputs})
    module, used = pipeline.prepare(module, compile_target, pipeline.require_pipeline(board_type.pipeline))
    return workloads.extract(module, compile_target, config, used.name), used.name
