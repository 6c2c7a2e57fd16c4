"""Compile a model for a board type from its records into one linked library with a Relax VM executable.

`farm.selection.decision` decides which record serves a workload. Where a board may run a model on two devices, the
estimated time of one inference decides between them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import tvm
from tvm import relax, tirx

from farm import linker, units
from farm.artifacts.manifest import DeviceEstimate, Manifest, Tensor
from farm.errors import FarmError, InternalError, PermanentError, UsageError
from farm.gpu.code import Usage
from farm.inventory.board_types import BoardType
from farm.search import gpus, traces, tvm_env, workloads
from farm.search.codegen import lowering
from farm.search.graph import half_precision, pipelines, recurrent
from farm.search.tvm_env import make_code_target, ms
from farm.search.tvm_errors import find_reason
from farm.search.workloads import Prepared, prepare_model
from farm.selection.decision import RecordChoice, Records
from farm.values import COMPUTED_PREFIX, Record, Workload

# Assumed time to request a copy from the driver and wait for it.
_COPY_START_S = 20e-6
# Workloads named in an error.
MOST_NAMED = 4
# Kept length of a compiler's message.
_MOST_SAID = 500

_log = logging.getLogger(__name__)

# Untuned TVM: its own operator schedules in the model's layout, unpacked weights.
UNTUNED_PIPELINE = "graph/2-plain"
# Memory of Python, NumPy and TVM's runtime before a model is loaded: 95 MB on aarch64, rounded up.
_RUNTIME_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Served:
    """How one workload was scheduled: by the record of `choice`, by prediction (`by_rule`), or by TVM's default.

    `latency_s` is one call's, recorded or predicted; None where unknown. `code` is the hash of the scheduled function.
    `left_out`: its record lost within the model.
    """

    workload: Workload = dataclasses.field(repr=False)
    choice: RecordChoice | None = None
    by_rule: bool = False
    latency_s: float | None = None
    code: str = ""
    left_out: bool = False

    @property
    def algorithm(self) -> str:
        """The name of its algorithm."""
        return find_algorithm(self.workload.name)


def find_algorithm(workload: str) -> str:
    """Name the algorithm of a convolution, or of 8-bit and 16-bit code, by its workload's name; "" for others."""
    if workload.startswith(half_precision.PREFIX):
        return ", ".join(filter(None, (find_algorithm(workload.removeprefix(half_precision.PREFIX)), "bf16 weights")))
    if workload.startswith(COMPUTED_PREFIX):
        own = find_algorithm(workload.removeprefix(COMPUTED_PREFIX))
        return ", ".join(filter(None, (own, "fp16")))
    if re.search(r"int8|quantize", workload):
        return "8 bits"
    winograd = re.match(r"winograd(\d)", workload)
    return f"winograd F({winograd[1]}, 3)" if winograd else "direct" if "conv2d" in workload else ""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """`library` is a linked shared object.

    Of the model's `workloads` distinct functions, `applied` are from records and `by_rule` predicted; `served` has all.
    `outputs` are shapes and NumPy's types. `activations_bytes` are allocated per inference; `usages` are the kernels'
    GPU resources; `half_bytes` are 16-bit weights. Compiling took `seconds`.
    """

    library: bytes = dataclasses.field(repr=False)
    workloads: int
    applied: int
    pipeline: str
    by_rule: int = 0
    served: tuple[Served, ...] = dataclasses.field(default=(), repr=False)
    outputs: tuple[tuple[tuple[int, ...], str], ...] = ()
    activations_bytes: int = 0
    usages: tuple[Usage, ...] = ()
    half_bytes: int = 0
    seconds: float = 0.0

    @property
    def memory_bytes(self) -> int:
        """What a process needs, estimated. The file passes through a buffer before it is loaded."""
        return _RUNTIME_BYTES + 2 * len(self.library) + self.activations_bytes

    @property
    def imported(self) -> int:
        """How many applied records are imported."""
        return sum(one.choice is not None and one.choice.record.origin is not None for one in self.served)


def compile_model(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    target_config: Mapping[str, Any],
    pipeline_name: str,
    records: Records | Sequence[Record],
    link_triple: str | None,
) -> Compiled:
    """Compile `model`; functions without a record get predicted schedules, or on a GPU TVM's defaults.

    A plain sequence of records counts as of the compiled board type and point. `link_triple` is Zig's name of the
    board's system, None for this machine. Raises UsageError, PermanentError.
    """
    return compile_prepared(
        prepare_model(model, shapes, target_config, pipeline_name), target_config, records, link_triple
    )


def compile_prepared(
    prepared: Prepared,
    target_config: Mapping[str, Any],
    records: Records | Sequence[Record],
    link_triple: str | None,
    known: dict[tuple[str, ...], Compiled] | None = None,
) -> Compiled:
    """Compile a prepared model, which stays as it is, like `compile_model`; `known` keeps programs by their code."""
    tvm_env.load()
    began = time.monotonic()
    module, compile_target, used, found = prepared.module, prepared.target, prepared.pipeline, prepared.workloads
    book = records if isinstance(records, Records) else Records(records)
    database = ms.database.MemoryDatabase()
    refused = book.find_refused(workload.hash for workload in found)
    served: list[Served] = []
    for workload in found:
        entry = database.commit_workload(tvm.ir.load_json(workload.module_json))
        item, one = _schedule(workload, entry, compile_target, book, refused.get(workload.hash), used.canonical)
        served.append(one)
        if item is not None:
            latency_s = one.choice.record.median_s if one.choice else 1.0
            database.commit_tuning_record(traces.as_record(item, entry, compile_target, latency_s))
    applied, by_rule = (sum(bool(getattr(one, name)) for one in served) for name in ("choice", "by_rule"))
    codes = tuple(one.code for one in served)
    if known is not None and codes in known:
        return dataclasses.replace(known[codes], served=tuple(served), applied=applied, by_rule=by_rule)
    finished = pipelines.finish(module, compile_target, database if applied or by_rule else None, used)
    # TVM silently drops a schedule that it cannot apply. Functions that pack weights do not count.
    scheduled = sum(
        isinstance(function, tirx.PrimFunc)
        and bool(function.attrs and "tirx.is_scheduled" in function.attrs)
        and not variable.name_hint.endswith("_weight_prepack")
        and not recurrent.is_loop(function)
        for variable, function in finished.functions.items()
    )
    _log.info("%d of %d functions from records, %d by the rule", applied, len(found), by_rule)

    with lowering.making(target_config) as made:
        if gpus.is_gpu(target_config):
            finished = lowering.bind_rest(finished, compile_target)
        compiled = build_library(finished, make_code_target(target_config), link_triple, used.name, tuple(served))
    usages = tuple(usage for each in made for usage in each.usages)
    compiled = dataclasses.replace(
        compiled,
        applied=min(applied, scheduled),
        by_rule=min(by_rule, scheduled),
        usages=usages,
        half_bytes=half_precision.count_bytes(module),
        seconds=time.monotonic() - began,
    )
    return compiled if known is None else known.setdefault(codes, compiled)


def build_library(
    module: Any, target: Any, link_triple: str | None, pipeline_name: str, served: tuple[Served, ...]
) -> Compiled:
    """Build and link a scheduled module. Raises PermanentError where TVM cannot."""

    def link(output: str, objects: list[str] | str, options: list[str] | None = None, **_: Any) -> None:
        linker.link_artifact(output, [objects] if isinstance(objects, str) else list(objects), link_triple, options)

    try:
        ty = module["main"].ret_ty
        outputs = tuple(
            (tuple(int(d) for d in each.shape), str(each.dtype)) for each in (getattr(ty, "fields", None) or [ty])
        )
        with target:
            lowered = relax.get_pipeline("default")(module)
        executable = relax.build(lowered, target, relax_pipeline=None, tir_pipeline=lowering.use_pipeline())
        with tempfile.TemporaryDirectory(prefix="farm-compile-") as folder:
            path = Path(folder) / "model.so"
            executable.export_library(str(path), fcompile=link)
            return Compiled(path.read_bytes(), len(served), 0, pipeline_name, 0, served, outputs, _sum_storage(lowered))
    except (tvm.error.InternalError, RuntimeError, ValueError, TypeError) as error:
        raise PermanentError(f"the model does not compile: {find_reason(error)}") from error


def _schedule(
    workload: Workload, entry: Any, target: Any, book: Records, refused: str | None, canonical: bool
) -> tuple[Any, Served]:
    """Return the scheduled candidate of a workload (None: TVM's own code) and its source."""
    hash_for, code = functools.partial(workloads.hash_for, workload), workloads.hash_structure
    best = next(book.find(workload.hash, hash_for), None)
    left_out = best is not None and best.record.candidate == refused
    for choice in book.find(workload.hash, hash_for, refused):
        try:
            item = traces.restore(choice.record.trace_json, entry, target)
        except (InternalError, tvm.error.InternalError, ValueError) as error:
            _log.warning("the record of %s cannot be applied: %s", choice.record.workload_name, error)
            continue
        return item, Served(workload, choice, latency_s=choice.record.median_s, code=code(item.sch.mod))
    default = traces.find_default(workload, entry, target) if canonical else None
    if default is None:
        return None, Served(workload, left_out=left_out)
    latency_s = default.seconds if math.isfinite(default.seconds) else None
    return default.candidate, Served(workload, None, True, latency_s, code(default.candidate.sch.mod), left_out)


def _sum_storage(module: Any) -> int:
    """Sum the bytes that a lowered program allocates per inference; shared storage counts once."""
    total = 0

    def look(expression: Any) -> None:
        nonlocal total
        if isinstance(expression, relax.Call) and "alloc_storage" in str(getattr(expression.op, "name", "")):
            total += math.prod(int(d) for d in expression.args[0].values)

    relax.analysis.post_order_visit(module["main"], look)
    return total


def choose_device(
    made: Mapping[str, Manifest], failed: Mapping[str, FarmError], kind: BoardType
) -> tuple[str, dict[str, Any]]:
    """Choose among the devices with code; return it and the manifest's fields about the choice.

    A single device needs no comparison. Raises PermanentError where a needed time is unknown, and the joined errors of
    `failed` where no device has code.
    """
    if not made:
        raise _join(failed, kind)
    times = {device: estimate(manifest, kind) for device, manifest in made.items()} if len(made) > 1 else {}
    taken = min(times, key=lambda device: times[device].latency_s, default=next(iter(made)))
    return taken, {"devices": times, "not_made": {device: say_why(each) for device, each in failed.items()}}


def say_why(error: FarmError) -> str:
    """Return why there is no code, shortened; name an internal error as such."""
    said = error.message[:_MOST_SAID]
    return f"internal error of the farm: {said}" if isinstance(error, InternalError) else said


def _join(failed: Mapping[str, FarmError], kind: BoardType) -> FarmError:
    """Join the errors of all devices: an internal one if any is, else the model's fault."""
    first, *others = failed.values()
    if all(each.message == first.message for each in others):
        return first
    said = "; ".join(f"not for the {device}: {say_why(each)}" for device, each in failed.items())
    message = f"no code was made for a {kind.name}: {said}"
    if any(isinstance(each, InternalError) for each in failed.values()):
        return InternalError(message)
    is_usage = all(isinstance(each, UsageError) for each in failed.values())
    return (UsageError if is_usage else PermanentError)(message, first.hint)


def estimate(manifest: Manifest, kind: BoardType) -> DeviceEstimate:
    """Estimate the time of one inference. Raises PermanentError where a workload has no time."""
    if manifest.predicted_latency_s is None:
        named = units.name_some([each.name for each in manifest.workloads if each.latency_s is None], MOST_NAMED)
        raise PermanentError(
            f"how long {manifest.name} takes on the {manifest.device} of a {kind.name} is not known: no record and no "
            f"prediction for {named}",
            "Compile for each device, and compare both with `farm model bench`.",
        )
    copied_s = 0.0
    if manifest.gpu is not None:
        copied_s = count_copies_s((*manifest.inputs, *manifest.outputs), kind)
    return DeviceEstimate(
        latency_s=manifest.predicted_latency_s + copied_s,
        copies_s=copied_s,
        workloads=len(manifest.workloads),
        measured=manifest.count("record"),
    )


def count_copies_s(tensors: Sequence[Tensor], kind: BoardType) -> float:
    """Return the time to copy a model's inputs to the GPU and its outputs back.

    A Jetson's CPU and GPU share the memory, so a copy reads and writes it.
    """
    rate = gpus.count_memory_rate(kind)
    return math.fsum(_COPY_START_S + 2 * each.size_bytes / rate for each in tensors)
