"""Run an artifact on a board, to verify its outputs by ONNX Runtime's, or on the user's inputs for outputs and figures.

Verdict and figures are stored in the artifact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.protocol import Engine, Outcome, RunSpec
from farm.artifacts.artifact_folder import Artifact, new_file
from farm.artifacts.given_model import GivenModel, refusing
from farm.artifacts.manifest import Manifest, MeasuredModel, Verified
from farm.artifacts.on_board import HeldForModels, require_ok
from farm.artifacts.runtime import tasks
from farm.artifacts.runtime.inputs import fit, write_arrays
from farm.artifacts.timing import Turns, Variant, ordered
from farm.artifacts.verify import OutputComparison, compare, find_worst
from farm.crew.visits import plan_window
from farm.errors import PermanentError, UnavailableError
from farm.foreign import show_controls
from farm.measure.statistics import summarise
from farm.models.inputs import InputSpec, is_float, make_edges, make_inputs
from farm.models.quantise import open_session
from farm.models.source import ModelSource

# Reveals a variance computed as E[x^2] - E[x]^2 and stagnating sums, yet stays far from float32's limits.
_OFFSET = 100.0
# Within 16-bit range and resolution through a deep network.
_OFFSET_16_BITS = 10.0
_LEAST_16_BITS = 200.0
# Below the epsilon of most normalisations.
_SMALL = 1e-3
_NOT_FINITE = (np.nan, np.inf, -np.inf)
_ASKING = frozenset({"IsNaN", "IsInf"})
# Error relative to a direct convolution, per algorithm. Winograd: the table in `farm.search.graph.winograd`. 8 bits: a
# sum near a half rounds either way and layers propagate it; whole models differed by up to 2 % of their outputs' peak
# (`benchmarks/quantised.py`). bfloat16: weights are off by up to one part in 256; models differed by up to 0.8 % of
# their outputs' peak (mobilenet_v2).
_FACTORS = {"winograd F(4, 3)": 2.0, "winograd F(6, 3)": 8.0, "8 bits": 500.0, "bf16 weights": 200.0, "fp16": 200.0}

Arrays = Mapping[str, Any]
# How long power is sampled; slower sensors get longer.
_WINDOW_S = 2.0
# Kept number of the latest runs.
_MOST_KEPT = 16


def make_cases(opened: GivenModel, manifest: Manifest, given: Sequence[tuple[str, Arrays]]) -> list[tuple[str, Arrays]]:
    """Return names and inputs of verification: those given, else seeded ones. Raises UsageError for a misfit."""
    if given:
        return [(show_controls(name), take_inputs(manifest, arrays)) for name, arrays in given]
    cases = make_seeded(opened.source, opened.inputs, _find_factor(manifest))
    if (lengths := opened.lengths) is None:
        return cases
    found = [(each, make_seeded(opened.source, lengths.set_length(opened.inputs, each))) for each in lengths.sizes[:-1]]
    for before, size in zip((lengths.least - 1, *lengths.sizes), lengths.sizes, strict=False):
        if (between := (before + 1 + size) // 2) < size:
            found.append((between, make_unmasked(lengths.set_length(opened.inputs, between))))
    cases += [(f"{length} {lengths.name}, {name}", arrays) for length, own in found for name, arrays in own]
    return cases


def make_seeded(
    source: ModelSource, specs: Sequence[InputSpec], tolerance_factor: float = 1.0
) -> list[tuple[str, Arrays]]:
    """Make inputs of several scales and edge values; a model with IsNaN or IsInf also gets such values."""
    cases: list[tuple[str, Arrays]] = [("seed 0", make_inputs(specs, 0))]
    if any(is_float(spec) for spec in specs):
        is_short = tolerance_factor >= _LEAST_16_BITS or any(np.dtype(spec.dtype).itemsize <= 2 for spec in specs)
        offset = _OFFSET_16_BITS if is_short else _OFFSET
        cases.append((f"seed 1, times {_SMALL:g}", _scale(specs, 1, _SMALL, 0.0)))
        cases.append((f"seed 2, plus {offset:g}", _scale(specs, 2, 1.0, offset)))
    elif specs:
        cases.append(("seed 1", make_inputs(specs, 1)))
    if specs:
        cases.append(("edge values", make_edges(specs)))
    if any(node.op_type in _ASKING for node in source.load().graph.node):
        cases.append(("NaN and infinities", _break_some(specs)))
    return cases


def make_unmasked(specs: Sequence[InputSpec]) -> list[tuple[str, Arrays]]:
    """Make inputs that mask no position: integers beside other inputs are taken for masks, and are ones.

    With all positions masked, outputs mean nothing and depend on the padding.
    """
    others = [spec for spec in specs if is_float(spec) or spec.rows is not None]
    ones = {spec.name: np.ones(spec.static_shape, spec.dtype) for spec in specs if others and spec not in others}
    return [(f"seed {seed}", make_inputs(specs, seed) | ones) for seed in (0, 1)]


def _scale(specs: Sequence[InputSpec], seed: int, factor: float, offset: float) -> Arrays:
    arrays: dict[str, Any] = make_inputs(specs, seed)
    for spec in filter(is_float, specs):
        arrays[spec.name] = (arrays[spec.name].astype("float64") * factor + offset).astype(spec.dtype)
    return arrays


def _break_some(specs: Sequence[InputSpec]) -> Arrays:
    """Make seeded values of which every seventh float is not finite."""
    arrays: dict[str, Any] = make_inputs(specs, 3)
    for spec in filter(is_float, specs):
        flat = arrays[spec.name].reshape(-1)
        flat[::7] = np.resize(np.array(_NOT_FINITE), flat[::7].shape).astype(spec.dtype)
        arrays[spec.name] = flat.reshape(spec.static_shape)
    return arrays


@refusing()
def take_inputs(manifest: Manifest, arrays: Any) -> Arrays:
    """Return arrays in the model's order. Raises UsageError that says what it takes and what was given."""
    return fit(manifest.to_runtime(), arrays).given


def find_tolerance_factor(algorithms: Iterable[str]) -> float:
    """Return the tolerance relative to direct computation, by the least exact of a model's algorithms."""
    found = (factor for each in algorithms for name, factor in _FACTORS.items() if each.endswith(name))
    return max(found, default=1.0)


def _find_factor(manifest: Manifest) -> float:
    return find_tolerance_factor(each.algorithm for each in manifest.list_workloads())


def run_reference(
    source: ModelSource, cases: Sequence[tuple[str, Arrays]], *, optimised: bool = True
) -> list[list[Any]]:
    """Return ONNX Runtime's outputs for every case, on this machine. Raises the errors of `open_reference`."""
    run = open_reference(source, optimised=optimised)
    return [run(arrays) for _, arrays in cases]


def open_reference(source: ModelSource, *, optimised: bool = True) -> Callable[[Arrays], list[Any]]:
    """Return a function that runs a model in ONNX Runtime. Both raise UnavailableError, PermanentError.

    Not `optimised`, it computes node by node: the same with other rounding.
    """
    try:
        session = open_session(source.onnx_bytes, optimised=optimised)
    except ImportError as error:
        raise UnavailableError("ONNX Runtime is not installed, so there is no reference to verify against") from error
    except Exception as error:  # its exceptions have no common base class
        raise PermanentError(f"ONNX Runtime does not run the model: {error}") from error

    def run(arrays: Arrays) -> list[Any]:
        try:
            return [np.asarray(each) for each in session.run(None, dict(arrays))]
        except Exception as error:
            raise PermanentError(f"ONNX Runtime does not run the model: {error}") from error

    return run


def _nudge(arrays: Arrays) -> Arrays:
    """Move floats by one unit in the last place, up or down, except at halves, where functions may jump."""
    nudged = dict(arrays)
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            up = np.random.default_rng(0).random(array.shape) < 0.5
            moved = np.nextafter(array, np.where(up, np.inf, -np.inf).astype(array.dtype))
            nudged[name] = np.where(np.isfinite(array) & (array * 2 != np.round(array * 2)), moved, array)
    return nudged


def compare_case(
    source: ModelSource, case: tuple[str, Arrays], outputs: Sequence[Any], reference: Sequence[Any], factor: float
) -> OutputComparison:
    """Compare with the reference; where they differ, ask it how far the model amplifies rounding on this input."""
    found = compare(outputs, reference, factor)
    if not found.matches:
        with contextlib.suppress(PermanentError):
            (again,) = run_reference(source, [(case[0], _nudge(case[1]))], optimised=False)
            found = compare(outputs, reference, factor, again)
    return dataclasses.replace(found, reason=found.reason and f"{case[0]}: {found.reason}")


def verify_artifact(
    artifact: Artifact, board: HeldForModels, source: ModelSource, cases: Sequence[tuple[str, Arrays]]
) -> Verified:
    """Run every case on the board, compare, and store the verdict in the artifact, good or bad."""
    manifest = artifact.manifest
    called = manifest.to_runtime()
    board.require_fit(manifest)
    factor = _find_factor(manifest)
    compared = []
    for case, reference in zip(cases, run_reference(source, cases), strict=True):
        spec = RunSpec(Engine.RELAX_VM, device=manifest.device, limits=board.limits(manifest.threads))
        fitted = fit(called, case[1])
        outcome, outputs = board.run(spec, artifact.read_file(fitted.library), ordered(fitted.inputs))
        require_ok(outcome, manifest.name, board.name)
        cropped = fitted.crop([np.asarray(each) for each in outputs.values()])
        compared.append(compare_case(source, case, cropped, reference, factor))
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
        library_sha256=manifest.code_sha256,
    )
    artifact.update(verified=verified)
    return verified


def find_fault(manifest: Manifest) -> PermanentError | None:
    """Return the error for a wrong verdict; None where the library is correct or unverified."""
    verified = manifest.verified
    if verified is None or verified.matches or verified.library_sha256 != manifest.code_sha256:
        return None
    return PermanentError(
        f"{manifest.name} computes something else than {verified.reference}: {verified.reason}",
        "Do not use its outputs. `farm model verify ARTIFACT --board NAME` says what to do.",
    )


def require_verified(artifact: Artifact) -> None:
    """Raise PermanentError for an artifact that is unverified, wrong, or changed since."""
    verified, folder = artifact.manifest.verified, artifact.folder
    if verified is None:
        raise PermanentError(
            f"{folder} was never verified, so it is not packaged", f"`farm model verify {folder} --board NAME` does."
        )
    if not verified.matches:
        raise PermanentError(
            f"{folder} computes something else than {verified.reference}: {verified.reason}",
            f"It is not packaged. `farm model verify {folder} --board NAME` says what to do.",
        )
    artifact.require_whole()
    if verified.library_sha256 != artifact.manifest.code_sha256:
        raise PermanentError(f"{folder} was verified with another library", "Verify it again.")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Outputs by name, the figures stored in the artifact, layers, and a reason to doubt them ("" for none)."""

    outputs: Mapping[str, Any]
    measured: MeasuredModel
    layers: list[dict[str, Any]]
    doubt: str = ""


@refusing()
def read_input(manifest: Manifest, path: Path) -> tuple[Mapping[str, Any], float]:
    """Read a model's inputs from an .npz, or from an image with its scale. Raises UsageError."""
    arrays, scale = tasks.read_input(path, manifest.model_dump(include={"name", "inputs", "task"}))
    return take_inputs(manifest, arrays), scale


def run_artifact(
    artifact: Artifact, board: HeldForModels, inputs: Mapping[str, Any], repeat: int, per_layer: bool = False
) -> RunResult:
    """Run it `repeat` times after a warm-up; read energy if there is a sensor. Raises PermanentError, UsageError."""
    manifest = artifact.manifest
    fitted = fit(manifest.to_runtime(), inputs)
    library = artifact.read_file(fitted.library)
    board.require_fit(manifest)
    window = plan_window(board.description, _WINDOW_S)
    limits = board.limits(manifest.threads)
    variant = Variant(manifest.name, Engine.RELAX_VM, library, ordered(fitted.inputs), True, manifest.device)
    turns = Turns([variant], repeat, limits, rounds=1, energy=window.to_energy(), per_layer=per_layer)
    timed = turns.run_all(board.run)
    figures = {key: float(value) for key, value in dataclasses.asdict(summarise(timed.samples[manifest.name])).items()}
    energy_j, power_w = read_energy(timed.outcomes[manifest.name])
    details = timed.describe_details(manifest.name)
    measured = MeasuredModel(
        at=time.time(),
        board=board.name,
        board_type=board.description.board_type,
        simulated=board.description.simulated,
        operating_point=board.point,
        threads=limits.threads or 0,
        clocks=board.read_clocks(timed.outcomes[manifest.name], manifest.device),
        latency=figures,
        energy_j=energy_j,
        power_w=power_w,
        first_s=details["first_s"],
        peak_memory_bytes=details["peak_memory_bytes"],
    )
    artifact.update(measured=(*manifest.measured, measured)[-_MOST_KEPT:])
    names, arrays = [output.name for output in manifest.outputs], timed.outputs[manifest.name]
    if len(names) != len(arrays):
        raise PermanentError(f"{board.name} gave {len(arrays)} outputs; {manifest.name} has {len(names)}")
    return RunResult(
        dict(zip(names, fitted.crop(arrays), strict=True)), measured, details["layers"], timed.find_doubt()
    )


def read_energy(outcome: Outcome) -> tuple[float | None, float | None]:
    """Return joules per inference and watts while running; None without a sensor."""
    if outcome.energy is None:
        return None, None
    total = outcome.energy.busy.total
    return outcome.energy.per_call_j, None if total is None else total.power_w


def write_outputs(outputs: Mapping[str, Any], path: Path) -> None:
    """Write an .npz of outputs by name, atomically."""
    with new_file(path) as partial, partial.open("wb") as file:
        write_arrays(file, outputs)


def find(artifact: Artifact, outputs: Mapping[str, Any], count: int, scale: float) -> list[dict[str, Any]]:
    """Return the classes or boxes of `runtime.tasks`; empty for other models."""
    return tasks.find(outputs, artifact.manifest.task, read_labels(artifact), count, scale)


def read_labels(artifact: Artifact) -> list[str]:
    """Return the names of an artifact's classes; [] where it has none."""
    known = "labels.txt" in artifact.manifest.files
    return artifact.read_file("labels.txt").decode().splitlines() if known else []
