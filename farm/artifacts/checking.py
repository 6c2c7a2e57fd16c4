"""Verify an artifact: its outputs on a board against ONNX Runtime's for the same inputs. The verdict goes into it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from device_agent.protocol import Engine, RunSpec
from farm.artifacts import runtime
from farm.artifacts.manifest import Artifact, Manifest, Verified
from farm.artifacts.on_board import HeldForModels, require_ok
from farm.artifacts.runtime.inputs import check_inputs
from farm.artifacts.timing import ordered
from farm.artifacts.verify import compare, find_worst
from farm.errors import PermanentError, UnavailableError, UsageError
from farm.foreign import show_controls
from farm.models.inputs import InputSpec, make_inputs
from farm.models.source import ModelSource

# Besides those that the user gives.
SEEDS = (0, 1)
# How much less exact a convolution by Winograd's algorithm is than a direct one: the table in
# `farm.search.graph.winograd`. In 8 bits a sum near a half is rounded either way, a step of one part in 255, and layers
# pass it on: whole models were seen to be up to 2 % of their outputs' peak from ONNX Runtime's
# (`benchmarks/quantised.py`).
# Weights in bfloat16 are off by up to one part in 256; models whose every weight is were seen to be up to 0.8 % of
# their outputs' peak from float32 (mobilenet_v2; docs/performance.md).
_FACTORS = {"winograd F(4, 3)": 2.0, "winograd F(6, 3)": 8.0, "8 bits": 500.0, "bf16 weights": 200.0, "fp16": 200.0}

Arrays = Mapping[str, Any]


def make_cases(manifest: Manifest, given: Sequence[tuple[str, Arrays]]) -> list[tuple[str, Arrays]]:
    """Names and inputs to verify with: seeded ones, and those given. Raises UsageError where the model takes others."""
    specs = [InputSpec(each.name, each.shape, each.dtype) for each in manifest.inputs]
    cases: list[tuple[str, Arrays]] = [(f"seed {seed}", make_inputs(specs, seed)) for seed in SEEDS]
    return cases + [(show_controls(name), take_inputs(manifest, arrays)) for name, arrays in given]


def take_inputs(manifest: Manifest, arrays: Any) -> Arrays:
    """Arrays in the order in which the model takes them. Raises UsageError saying what it takes and what was given."""
    try:
        return check_inputs([each.model_dump() for each in manifest.inputs], arrays)
    except runtime.InputError as error:
        raise UsageError(str(error)) from error


def find_tolerance_factor(algorithms: Iterable[str]) -> float:
    """How much more than a direct computation's rounding is let pass, by the least exact algorithm among a model's."""
    found = (factor for each in algorithms for name, factor in _FACTORS.items() if each.endswith(name))
    return max(found, default=1.0)


def run_reference(source: ModelSource, cases: Sequence[tuple[str, Arrays]]) -> list[list[Any]]:
    """ONNX Runtime's outputs for every case, on this machine. Raises UnavailableError, PermanentError."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UnavailableError("ONNX Runtime is not installed, so there is no reference to verify against") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(source.onnx_bytes, options, providers=["CPUExecutionProvider"])
        return [[np.asarray(each) for each in session.run(None, dict(arrays))] for _, arrays in cases]
    except Exception as error:  # its exceptions have no base class of their own
        raise PermanentError(f"ONNX Runtime does not run the model: {error}") from error


def verify_artifact(
    artifact: Artifact, board: HeldForModels, source: ModelSource, cases: Sequence[tuple[str, Arrays]]
) -> Verified:
    """Run every case on the board, compare, and keep the verdict in the artifact, whatever it is."""
    manifest, library = artifact.manifest, artifact.read_library()
    board.require_fit(manifest)
    factor = find_tolerance_factor(each.algorithm for each in manifest.workloads)
    compared = []
    for (name, arrays), reference in zip(cases, run_reference(source, cases), strict=True):
        spec = RunSpec(Engine.RELAX_VM, device=manifest.device, limits=board.limits(manifest.threads))
        outcome, outputs = board.run(spec, library, ordered(arrays))
        require_ok(outcome, manifest.name, board.name)
        one = compare([np.asarray(each) for each in outputs.values()], reference, factor)
        compared.append(dataclasses.replace(one, reason=one.reason and f"{name}: {one.reason}"))
    worst = find_worst(compared)
    verified = Verified(
        at=time.time(),
        matches=worst.matches,
        reason=worst.reason,
        board=board.name,
        board_type=board.description.board_type,
        simulated=board.description.simulated,
        reference=f"ONNX Runtime {importlib.metadata.version('onnxruntime')}",
        inputs=tuple(name for name, _ in cases),
        max_abs_error=_finite(worst.max_abs_error),
        max_rel_error=_finite(worst.max_rel_error),
        rms_rel_error=_finite(worst.rms_rel_error),
        tolerance_factor=factor,
        library_sha256=manifest.library.sha256,
    )
    artifact.update(verified=verified)
    return verified


def require_verified(artifact: Artifact) -> None:
    """Refuse an artifact that was not found right, or was changed since. Raises PermanentError."""
    verified, folder = artifact.manifest.verified, artifact.folder
    if verified is None:
        raise PermanentError(
            f"{folder} was never verified, so it is not packaged", f"`farm model verify {folder} --board NAME` does."
        )
    if not verified.matches:
        raise PermanentError(
            f"{folder} computes something else than {verified.reference}: {verified.reason}",
            "It is not packaged. Compile it again, with --exact where a little less rounding would do.",
        )
    artifact.require_whole()
    if verified.library_sha256 != artifact.manifest.library.sha256:
        raise PermanentError(f"{folder} was verified with another library", "Verify it again.")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
