"""Make an artifact: choose target and records, compile in a child process, write the folder."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from device_agent.protocol import CPU, GPU
from farm import units
from farm.artifacts import artifact_folder, compile, import_check
from farm.artifacts import manifest as manifests
from farm.artifacts.artifact_folder import Artifact, list_model_options, list_options, note_artifact, require_place
from farm.artifacts.given_model import GivenModel, find_labels, find_task, require_labels
from farm.artifacts.manifest import GpuCode, Manifest, RecordUsed, StoredWeights, Tensor, WorkloadServed
from farm.crew.choice import TargetPlan, describe_type, plan_target
from farm.errors import FarmError, InternalError, ModelRefusedError, PermanentError, UsageError
from farm.gpu.code import plan_gpu
from farm.inventory.board_types import BoardType, load_board_types
from farm.inventory.core_types import find_core_type
from farm.models.source import ModelSource
from farm.processes.jobs import compile_in_subprocess
from farm.search import gpus, tvm_env
from farm.search.cores import find_clock_factor
from farm.search.graph import half_precision, pipelines
from farm.selection.decision import Records, Relative, describe_imported
from farm.settings import Settings
from farm.store import Store
from farm.types.states import ModelDecision
from farm.values import DEFAULT_POINT, Record, is_for_gpu
from farm.version import __version__

_log = logging.getLogger(__name__)

RULE, TUNE, REFUSE = "rule", "tune", "refuse"
MISSING = (RULE, TUNE, REFUSE)
_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "onnx", "ziglang")

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class CompileOrder:
    """What to compile for which boards: `simulated` or real ones of a type, at an operating point.

    A type from `gpus.require_device` may stand for its GPU.
    """

    opened: GivenModel
    board_type: BoardType
    operating_point: str = DEFAULT_POINT
    simulated: bool = False
    missing: str = RULE
    labels: bytes | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What can serve an order: records of its board type and of `relatives` with the same cores, and decisions.

    Relatives come with their targets; decisions are about the model itself.
    """

    records: tuple[Record, ...]
    relatives: tuple[tuple[str, TargetPlan], ...] = ()
    decisions: tuple[ModelDecision, ...] = ()


@dataclasses.dataclass(frozen=True)
class CompileWay:
    """A variant of a compilation: graph pipeline, whether records apply, and the refused candidate of each workload.

    None refuses what was decided.
    """

    pipeline: str
    recorded: bool = True
    refused: Mapping[str, str] | None = None


def make_artifact(order: CompileOrder, out: Path, settings: Settings, store: Store, say: Say | None = None) -> Artifact:
    """Compile and write. `say` and the errors are those of `compile_in_subprocess`; also UsageError, PermanentError."""
    require_place(out)
    return _write(out, *_compile(order, settings, store, say), settings, say)


def make_faster(
    orders: Sequence[CompileOrder], out: Path, settings: Settings, store: Store, say: Say | None = None
) -> Artifact:
    """Compile for each device of a board type and write the fastest, including copies.

    The manifest says why a device has no code; an internal error is also logged. Raises the errors of
    `compile.choose_device`, and those that concern all devices.
    """
    require_place(out)
    made: dict[str, tuple[Manifest, dict[str, bytes]]] = {}
    failed: dict[str, FarmError] = {}
    for order in orders:
        try:
            manifest, files = _compile(order, settings, store, say)
        except (ModelRefusedError, PermanentError, InternalError) as error:
            device = GPU if is_for_gpu(order.board_type.pipeline) else CPU
            failed[device] = error
            if isinstance(error, InternalError):
                _log.warning("no code for the %s: %s", device, compile.say_why(error))
        else:
            made[manifest.device] = manifest, files
    offered = {name: each for name, (each, _) in made.items()}
    taken, changes = compile.choose_device(offered, failed, orders[0].board_type)
    manifest, files = made[taken]
    return _write(out, manifest.model_copy(update=changes), files, settings, say)


def _write(out: Path, manifest: Manifest, files: Mapping[str, bytes], settings: Settings, say: Say | None) -> Artifact:
    artifact = artifact_folder.write_artifact(out, manifest, files)
    note_artifact(settings.home_path, artifact)
    imported = sum(each.record is not None and each.record.imported for each in manifest.workloads)
    if say is not None and (note := describe_imported(imported, manifest.count("record"))):
        say(f"{manifest.name}: {note}")
    return artifact


def _compile(
    order: CompileOrder, settings: Settings, store: Store, say: Say | None
) -> tuple[Manifest, dict[str, bytes]]:
    """Return an artifact's manifest and files; a library for each compiled length."""
    given = order.opened.lengths
    if given is None:
        return _compile_one(order, settings, store, say)
    cropped = import_check.find_output_axes(order.opened)
    sized = [dataclasses.replace(order, opened=each) for each in order.opened.list_sizes()]
    return import_check.join_sizes(given, cropped, [_compile_one(each, settings, store, say) for each in sized])


def _compile_one(
    order: CompileOrder, settings: Settings, store: Store, say: Say | None
) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and files of one set of input shapes."""
    about = {"model": order.opened.about.model_dump(), "inputs": [each.name for each in order.opened.inputs]}
    artifact_folder.require_plain(about | {"outputs": _list_outputs(order.opened.source)}, order.opened.source.name)
    settings.share_linker_cache()
    target = find_target(order.board_type, order.simulated)
    ways = {order.board_type.name: CompileWay(order.board_type.pipeline)}
    job = functools.partial(compile_ways, order, target, fetch_candidates(order, store), ways)
    done, config = compile_in_subprocess(job, order.opened.source.name, say=say)
    (compiled,) = done.values()
    if order.missing == REFUSE:
        _require_records(order, compiled.served)
    files = {manifests.LIBRARY: compiled.library}
    if labels := order.labels or find_labels(order.opened):
        files["labels.txt"] = labels
    manifest = _describe(order, target, dict(gpus.reference_of(config)), compiled, files)
    if order.labels is not None:
        require_labels(order.labels, manifest.task, manifest.outputs)
    if gpus.is_gpu(config):
        # Weights are in the library and again in the GPU's memory, which is also the CPU's.
        needed = manifest.memory_bytes + len(compiled.library)
        used = _describe_gpu(order.board_type, compiled)
        manifest = manifest.model_copy(update={"gpu": used, "memory_bytes": needed})
        if (kind := order.board_type).memory_bytes is not None and kind.memory_bytes < needed:
            raise PermanentError(
                f"{manifest.name} needs about {needed >> 20} MiB; a {kind.name} has "
                f"{kind.memory_bytes >> 20} MiB for processor and GPU together",
                "Take a smaller model or batch, or another board type.",
            )
    return manifest, files


def _describe_gpu(kind: BoardType, compiled: compile.Compiled) -> GpuCode:
    plan = plan_gpu(kind)
    return GpuCode(
        arch=plan.arch,
        ptx=plan.newest_ptx,
        kernels=len(compiled.usages),
        **{
            name: max((getattr(usage, name) for usage in compiled.usages), default=0)
            for name in ("registers", "shared_bytes", "threads", "spilled_bytes")
        },
    )


def find_missing(served: Sequence[compile.Served]) -> list[str]:
    """Name the workloads without a record, the heaviest first."""
    return [each.workload.name for each in served if each.choice is None and not each.left_out]


def find_target(board_type: BoardType, simulated: bool) -> TargetPlan:
    """Return the target to compile for. Virtual boards run native code unless theirs is emulated."""
    return plan_target(board_type, describe_type(board_type, board_type.name, simulated), len(os.sched_getaffinity(0)))


def fetch_candidates(order: CompileOrder, store: Store) -> Candidates:
    """Fetch what can serve an order. Raises UsageError for an operating point without records."""
    found = list_candidates(order.opened.about.sha256, order.board_type, order.simulated, store)
    points = sorted({r.operating_point for r in found.records if r.board_type == order.board_type.name})
    if order.operating_point != DEFAULT_POINT and order.operating_point not in points:
        raise UsageError(
            f"no record of {order.board_type.name} was made at the operating point {order.operating_point!r}",
            f"There are records at: {', '.join(points) or 'none'}.",
        )
    return found


def list_candidates(model_sha256: str, own: BoardType, simulated: bool, store: Store) -> Candidates:
    """Fetch what can serve a model on boards of a type, simulated or real."""
    relatives = list_relatives(own, simulated)
    wanted = {own.name, *(name for name, _ in relatives)}
    records = [r for r in store.records.fetch(simulated=simulated) if r.board_type in wanted]
    decisions = store.decisions.fetch(model_sha256=model_sha256, board_type=own.name, simulated=simulated)
    return Candidates(tuple(records), tuple(relatives), tuple(decisions))


def list_relatives(own: BoardType, simulated: bool) -> list[tuple[str, TargetPlan]]:
    """List the other board types with the same kind of cores, with their targets."""
    kind = _core(own)
    is_known = kind is not None and not is_for_gpu(own.pipeline)
    types = load_board_types().values() if is_known else ()
    return [
        (each.name, find_target(each, simulated)) for each in types if each.name != own.name and _core(each) == kind
    ]


def _core(board_type: BoardType) -> str | None:
    """Return the core type of a board type's target; None where only the machine knows."""
    if board_type.target is None:
        return None
    found = find_core_type(board_type.target.mcpu, board_type.target.mtriple.partition("-")[0])
    return found.name if found else None


def make_book(
    board_type: BoardType, operating_point: str, candidates: Candidates, refused: Mapping[str, str] | None = None
) -> Records:
    """Make the records for `compile_model`. Loads TVM's compiler."""
    known = [Relative(name, to_config(plan)) for name, plan in candidates.relatives]
    return Records(candidates.records, board_type.name, operating_point, known, candidates.decisions, refused)


def to_config(plan: TargetPlan) -> dict[str, Any]:
    """Return TVM's target. Loads TVM's compiler, so not for a process that talks to boards."""
    return tvm_env.host_target(plan.cores) if plan.config is None else dict(plan.config)


def compile_ways(
    order: CompileOrder, target: TargetPlan, candidates: Candidates, ways: Mapping[str, CompileWay]
) -> tuple[dict[str, compile.Compiled], dict[str, Any]]:
    """Compile an order in several variants, in a child process; return the results and TVM's target."""
    config = to_config(target)
    shapes = {spec.name: spec.static_shape for spec in order.opened.inputs}
    model, triple = order.opened.source.load(), find_triple(order.board_type, target)
    return {
        name: compile.compile_model(
            model,
            shapes,
            config,
            way.pipeline,
            make_book(order.board_type, order.operating_point, candidates, way.refused) if way.recorded else [],
            triple,
        )
        for name, way in ways.items()
    }, config


def find_triple(board_type: BoardType, target: TargetPlan) -> str | None:
    """Return Zig's name of the boards' system; None where they run native code."""
    return None if target.is_for_host else board_type.link_triple


def _require_records(order: CompileOrder, served: Sequence[compile.Served]) -> None:
    if missing := find_missing(served):
        named = units.name_some(missing, compile.MOST_NAMED)
        kind, about = order.board_type.name, order.opened.about
        words = ["farm", "tune", about.typed, "--board-type", kind, *list_model_options(about.batch, about.shapes)]
        command = shlex.join([*words, *list_options(order.board_type.pipeline)])
        raise UsageError(
            f"{len(missing)} of {len(served)} workloads of {about.name} have no record for {kind}: {named}",
            f"`{command}` makes some; --missing rule does without.",
        )


def _describe(
    order: CompileOrder, target: TargetPlan, config: dict[str, Any], compiled: compile.Compiled, files: dict[str, bytes]
) -> Manifest:
    source = order.opened.source
    inputs = tuple(Tensor(name=i.name, shape=i.static_shape, dtype=i.dtype) for i in order.opened.inputs)
    outputs = tuple(
        Tensor(name=name, shape=shape, dtype=dtype)
        for name, (shape, dtype) in zip(_list_outputs(source), compiled.outputs, strict=True)
    )
    factor = find_clock_factor(config, order.board_type)
    served = tuple(_describe_workload(each, factor) for each in compiled.served)
    times = [each.weight * each.latency_s for each in served if each.latency_s is not None]
    predicted = math.fsum(times) if len(times) == len(served) else None
    return Manifest(
        name=source.name,
        model=order.opened.about,
        inputs=inputs,
        outputs=outputs,
        board_type=order.board_type.name,
        operating_point=order.operating_point,
        simulated=order.simulated,
        architecture=str(config["mtriple"]).partition("-")[0],
        target=config,
        link_triple=find_triple(order.board_type, target),
        threads=target.threads,
        pipeline=compiled.pipeline,
        workloads=served,
        weights=_describe_weights(order.board_type.pipeline, compiled),
        memory_bytes=compiled.memory_bytes,
        predicted_latency_s=predicted,
        task=find_task(inputs, outputs, source.read_metadata()),
        files={name: artifact_folder.describe_file(data) for name, data in files.items()},
        versions={"tvm-farm": __version__} | {name: importlib.metadata.version(name) for name in _PACKAGES},
        created_at=time.time(),
    )


def _list_outputs(source: ModelSource) -> list[str]:
    return [output.name for output in source.load().graph.output]


def _describe_weights(pipeline: str, compiled: compile.Compiled) -> StoredWeights:
    asked = pipelines.require_pipeline(pipeline).weights
    halved = [
        each
        for each in compiled.served
        if half_precision.is_halved(each.workload.arguments)
        or half_precision.is_computed(asked, each.workload.arguments)
    ]
    return StoredWeights(asked=asked, workloads=len(halved), bytes=compiled.half_bytes)


def _describe_workload(served: compile.Served, clock_factor: float) -> WorkloadServed:
    workload, choice = served.workload, served.choice
    used = None
    if choice is not None:
        record = choice.record
        used = RecordUsed(
            fit=choice.fit,
            candidate=record.candidate,
            board_type=record.board_type,
            operating_point=record.operating_point,
            latency_s=record.median_s,
            simulated=record.simulated,
            verified_at=record.verified_at,
            imported=record.origin is not None,
        )
    return WorkloadServed(
        hash=workload.hash,
        name=workload.name,
        flop=workload.flop,
        weight=int(workload.weight),
        algorithm=served.algorithm,
        source="record" if choice else "rule" if served.by_rule else "none",
        latency_s=served.latency_s if choice or served.latency_s is None else served.latency_s * clock_factor,
        record=used,
    )
