"""Run an artifact on a board with the user's inputs; return outputs and figures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device_agent.protocol import Engine, Outcome
from farm.artifacts.artifact_folder import Artifact
from farm.artifacts.checking import take_inputs
from farm.artifacts.given_model import refusing
from farm.artifacts.manifest import Manifest, MeasuredModel
from farm.artifacts.on_board import HeldForModels
from farm.artifacts.places import new_file
from farm.artifacts.runtime import tasks
from farm.artifacts.runtime.inputs import write_arrays
from farm.artifacts.runtime.lengths import fit
from farm.artifacts.timing import Variant, ordered, time_in_turns
from farm.crew.visits import plan_window
from farm.errors import PermanentError
from farm.measure.statistics import summarise

# How long power is sampled; slower sensors get longer.
_WINDOW_S = 2.0
# Kept number of the latest runs.
_MOST_KEPT = 16


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
    timed = time_in_turns(
        board.run, [variant], repeat, limits, rounds=1, energy=window.to_energy(), per_layer=per_layer
    )
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
