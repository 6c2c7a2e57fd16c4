"""A model brought to the form that is tuned and compiled. Both go through here, so both see the same functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import onnx

from farm.search import target, workloads
from farm.search.graph import importer, pipeline
from farm.search.graph.pipeline import GraphPipeline
from farm.search.workloads import Workload


@dataclasses.dataclass(frozen=True)
class Prepared:
    """TVM's `module` and `target`, the `pipeline` really used, and the `workloads`, the heaviest first."""

    module: Any
    target: Any
    pipeline: GraphPipeline
    workloads: list[Workload]


def prepare_model(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    target_config: Mapping[str, Any],
    pipeline_name: str,
) -> Prepared:
    """Import `model` with static `shapes`, run the graph pipeline, extract the workloads. Raises UsageError."""
    compile_target = target.make_target(target_config)
    module = importer.import_onnx(model, shapes)
    module, used = pipeline.prepare(module, compile_target, pipeline.require_pipeline(pipeline_name))
    return Prepared(module, compile_target, used, workloads.extract(module, compile_target, target_config, used.name))
