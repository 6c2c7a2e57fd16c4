"""Explain an artifact layer by layer: family and plan, estimated and measured latency, share of the roofline, limit."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm

from device_agent.protocol import GPU, START_S
from farm.artifacts import make
from farm.artifacts.artifact_folder import Artifact
from farm.artifacts.given_model import GivenModel
from farm.artifacts.manifest import Manifest, WorkloadServed
from farm.errors import UsageError
from farm.inventory.board_types import require_board_type
from farm.processes.jobs import compile_in_subprocess
from farm.search import cores, gpus
from farm.search.cores import Core
from farm.search.families import rule
from farm.search.families.family import Plan, Prediction, Unit, describe_plan, read_mark
from farm.search.gpus import TargetGpu
from farm.search.traces import find_default
from farm.search.tvm_env import make_target, ms
from farm.search.workloads import prepare_model
from farm.store import Store
from farm.values import Workload, name_workloads


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A device at its highest clocks: float32 FLOP/s of all its cores, and achievable bytes/s of its memory."""

    flop_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, unit: Unit) -> Roofline:
        """Return that of a target's cores or GPU."""
        if isinstance(unit, TargetGpu):
            return cls(2.0 * unit.unit.lanes * unit.processors * unit.freq_hz, unit.memory_bytes_per_s)
        rate = unit.fma_per_cycle(unit.vector_bits) * unit.lanes(4)
        return cls(2.0 * rate * unit.threads * unit.freq_hz, unit.memory_bytes_per_s)


def explain(artifact: Artifact, opened: GivenModel, store: Store) -> dict[str, Any]:
    """Return the document of `farm model explain`. Raises UsageError for a model that is not the artifact's."""
    manifest = artifact.manifest
    used = {each.record.candidate for each in manifest.workloads if each.record}
    records = store.records.fetch(workloads=[each.hash for each in manifest.workloads], simulated=None)
    traces = {each.candidate: each.trace_json for each in records if each.candidate in used}
    job = functools.partial(_list_layers, manifest, opened, traces)
    layers, roofline = compile_in_subprocess(job, manifest.name)
    times = [each["total_s"] for each in layers if each["total_s"] is not None]
    return {
        "artifact": str(artifact.folder),
        "model": manifest.name,
        "board_type": manifest.board_type,
        "device": manifest.device,
        "simulated": manifest.simulated,
        "operating_point": manifest.operating_point,
        "threads": manifest.threads,
        "roofline": dataclasses.asdict(roofline),
        "layers": layers,
        "sum_s": math.fsum(times) if len(times) == len(layers) else None,
        "flop": math.fsum(each["flop"] * each["weight"] for each in layers),
        "whole": _find_whole(manifest, store),
    }


def _find_whole(manifest: Manifest, store: Store) -> dict[str, Any] | None:
    """Return latency (s) and board of the whole model: of its last run, else of the campaign that decided on it."""
    if manifest.measured:
        newest = max(manifest.measured, key=lambda each: each.at)
        return {"board": newest.board, "latency_s": newest.latency["median"]}
    name = name_workloads(each.hash for each in manifest.workloads)
    decisions = store.decisions.fetch(
        model_sha256=manifest.model.sha256, board_type=manifest.board_type, simulated=manifest.simulated
    )
    for each in reversed(decisions):
        if (each.workloads, each.operating_point) == (name, manifest.operating_point) and "latency_s" in each.evidence:
            return {"board": each.evidence["board"], "latency_s": each.evidence["latency_s"]}
    return None


def _list_layers(
    manifest: Manifest, opened: GivenModel, traces: Mapping[str, str]
) -> tuple[list[dict[str, Any]], Roofline]:
    """Return the layers with the longest total first; runs in a compiler's process."""
    kind, target = gpus.require_device(require_board_type(manifest.board_type), manifest.device), manifest.target
    if manifest.device == GPU:  # the manifest has its host's
        target = make.to_config(make.find_target(kind, manifest.simulated))
    shapes = {each.name: each.shape for each in manifest.inputs}
    prepared = prepare_model(opened.source.load(), shapes, target, manifest.pipeline)
    known = {each.hash: each for each in prepared.workloads}
    if any(each.hash not in known for each in manifest.workloads):
        raise UsageError(f"another version of the farm compiled {manifest.name}", "Compile it again.")
    unit = gpus.gpu_of(target) if manifest.device == GPU else cores.core_of(target, manifest.threads)
    factor = cores.find_clock_factor(target, kind)
    roofline = Roofline.of(unit)
    if isinstance(unit, Core):
        roofline = dataclasses.replace(roofline, flop_per_s=roofline.flop_per_s / factor)
    layers = [_explain(each, known[each.hash], unit, factor, roofline, traces) for each in manifest.workloads]
    return sorted(layers, key=lambda each: -(each["total_s"] or 0.0)), roofline


def _explain(
    served: WorkloadServed,
    workload: Workload,
    unit: Unit,
    clock_factor: float,
    roofline: Roofline,
    traces: Mapping[str, str],
) -> dict[str, Any]:
    found = _find_plan(served, workload, traces)
    family, plan = found or (None, None)
    predicted = found and _predict(workload, unit, *found)
    moved = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in workload.arguments)
    latency_s = served.latency_s
    is_measured = served.source == "record"
    return {
        "workload": served.hash,
        "name": served.name,
        "weight": served.weight,
        "source": served.source,
        "family": family,
        "plan": plan and dict(plan),
        "words": describe_plan(family, plan) if family and plan else None,
        "estimated_s": predicted.seconds * clock_factor if predicted else None,
        "measured_s": latency_s if is_measured else None,
        "total_s": None if latency_s is None else served.weight * latency_s,
        "flop": served.flop,
        "bytes": moved,
        "compute_share": served.flop / latency_s / roofline.flop_per_s if latency_s else None,
        "bandwidth_share": moved / latency_s / roofline.bytes_per_s if latency_s else None,
        "limit": name_limit(predicted, unit, moved) if predicted else None,
    }


def _find_plan(served: WorkloadServed, workload: Workload, traces: Mapping[str, str]) -> tuple[str, Plan] | None:
    """Return family and plan: of the record's trace, else of the rule; None for TVM's own schedules."""
    if served.record is not None:
        trace = traces.get(served.record.candidate)
        return read_mark(json.loads(trace)[0][0]) if trace else None
    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(workload.module_json))
    found = find_default(workload, entry, make_target(workload.target))
    return (found.family, found.plan) if found and served.source == "rule" else None


def _predict(workload: Workload, unit: Unit, family: str, plan: Plan) -> Prediction | None:
    outlooks = rule.list_outlooks(tvm.ir.load_json(workload.module_json), unit)
    return next((each.predict(plan) for each in outlooks if each.family.name == family), None)


def name_limit(predicted: Prediction, unit: Unit, moved_bytes: float) -> str:
    """Name the largest part of an estimate, one of `family.LIMITS`; `moved_bytes` are of arguments and results."""
    terms = predicted.terms
    near, pad, far = terms.get("near", 0.0), terms.get("pad", 0.0), terms.get("far", 0.0)
    compute, transforms = terms.get("compute", 0.0) - near, terms.get("transforms", 0.0)
    if isinstance(unit, TargetGpu):
        launch = START_S * unit.freq_hz * terms.get("kernels", 1.0)
        parts = {"compute": compute, "shared memory": pad, "L2 bandwidth": near, "DRAM bandwidth": far + transforms}
    else:
        launch = unit.region_s * unit.freq_hz * unit.threads if unit.threads > 1 else 0.0
        cached = "L2" if moved_bytes <= unit.l2_bytes else "L3" if moved_bytes <= unit.l3_bytes else "DRAM"
        parts = {"compute": compute + transforms, "L2 bandwidth": near + pad}
        parts[f"{cached} bandwidth"] = parts.get(f"{cached} bandwidth", 0.0) + far
    parts["launch overhead"] = launch
    return max(parts, key=lambda each: parts[each])
