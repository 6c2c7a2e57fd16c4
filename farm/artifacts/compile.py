"""Compile a model for a board type from the records there are, into one linked library with a Relax VM executable."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from farm.errors import InternalError, PermanentError
from farm.search import default_schedule, linker, pipeline, traces, tvm_env
from farm.search.prepared import prepare_model
from farm.search.tvm_errors import find_reason
from farm.values import Record

_log = logging.getLogger(__name__)

# What TVM makes of a model when nobody tunes: its own operator schedules in the model's layout, weights as they are.
UNTUNED_PIPELINE = "graph/1-plain"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """`library` is a linked shared object.

    Of the model's `workloads` distinct functions, `applied` are from records and `by_rule` scheduled by prediction.
    """

    library: bytes = dataclasses.field(repr=False)
    workloads: int
    applied: int
    pipeline: str
    by_rule: int = 0


def compile_model(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    target_config: Mapping[str, Any],
    pipeline_name: str,
    records: Sequence[Record],
    link_triple: str | None,
) -> Compiled:
    """Compile `model`. A function without a record is scheduled by the best prediction where the pipeline has families.

    `link_triple` is Zig's name of the board's system, None for this machine. Raises UsageError, PermanentError.
    """
    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms
    from tvm import relax

    prepared = prepare_model(model, shapes, target_config, pipeline_name)
    module, compile_target, used, found = prepared.module, prepared.target, prepared.pipeline, prepared.workloads
    best = {record.workload: record for record in records}
    database = ms.database.MemoryDatabase()
    applied: list[str] = []
    by_rule: list[str] = []
    for workload in found:
        entry = database.commit_workload(tvm.ir.load_json(workload.module_json))
        item, latency_s = None, 1.0
        if (record := best.get(workload.hash)) is not None:
            try:
                item, latency_s = traces.restore(record.trace_json, entry, compile_target), record.median_s
                applied.append(workload.hash)
            except (InternalError, tvm.error.InternalError, ValueError) as error:
                _log.warning("the record of %s cannot be applied: %s", record.workload_name, error)
        if item is None and used.canonical:
            default = default_schedule.find_default(workload, entry, compile_target)
            if default is not None:
                item = default.candidate
                by_rule.append(workload.hash)
        if item is not None:
            database.commit_tuning_record(traces.as_record(item, entry, compile_target, latency_s))
    finished = pipeline.finish(module, compile_target, database if applied or by_rule else None, used)
    # TVM leaves out, without a word, a schedule that it cannot apply.
    scheduled = _count_scheduled(finished)
    _log.info("%d of %d functions from records, %d by the rule", len(applied), len(found), len(by_rule))

    def link(output: str, objects: list[str] | str, options: list[str] | None = None, **_: Any) -> None:
        linker.link_artifact(output, [objects] if isinstance(objects, str) else list(objects), link_triple, options)

    try:
        executable = relax.build(finished, compile_target)
        with tempfile.TemporaryDirectory(prefix="farm-compile-") as folder:
            path = Path(folder) / "model.so"
            executable.export_library(str(path), fcompile=link)
            return Compiled(
                path.read_bytes(), len(found), min(len(applied), scheduled), used.name, min(len(by_rule), scheduled)
            )
    except (tvm.error.InternalError, RuntimeError, ValueError, TypeError) as error:
        raise PermanentError(f"the model does not compile: {find_reason(error)}") from error


def _count_scheduled(module: Any) -> int:
    """Functions whose schedule came from a record, as TVM marks them; what packs a weight is part of another one."""
    from tvm import tirx

    return sum(
        isinstance(function, tirx.PrimFunc)
        and bool(function.attrs and "tirx.is_scheduled" in function.attrs)
        and not variable.name_hint.endswith("_weight_prepack")
        for variable, function in module.functions.items()
    )
