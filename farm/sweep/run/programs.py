"""The programs of a sweep: the model compiled for a board type, in variants and batch sizes, or any program.

`compiled` is what `farm model compile` makes now: from records, or by prediction without one. `tuned` is the same, but
refused without a record. `untuned` is stock TVM's code.
"""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from device_agent.protocol import CPU, Command, Engine, Outcome, RunSpec
from farm.artifacts import compile
from farm.artifacts.make import Candidates, make_book, to_config
from farm.artifacts.verify import compare
from farm.crew.choice import TargetPlan
from farm.errors import PermanentError, UsageError
from farm.inventory.board_types import BoardType
from farm.models.inputs import InputSpec, make_inputs
from farm.models.lengths import set_batch
from farm.models.source import ModelSource
from farm.points.values import Estimate, PointMeasurement
from farm.programs.metrics import LATENCY, ProgramMetric, read_runs
from farm.programs.order import PROGRAM, ProgramOrder
from farm.search.gpus import device_of
from farm.selection.decision import describe_imported
from farm.values import DEFAULT_POINT

UNTUNED, TUNED, COMPILED = "untuned", "tuned", "compiled"
VARIANTS = (UNTUNED, TUNED, COMPILED)

Arrays = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class SweepProgram:
    """One series of a sweep: a library for a device, and its inputs in call order.

    `about` describes how it was made, `note` the caveats of its figures.
    """

    variant: str
    batch: int
    library: bytes = dataclasses.field(repr=False)
    inputs: Arrays = dataclasses.field(repr=False)
    about: str = ""
    device: str = CPU
    note: str = ""
    command: Command | None = None
    metrics: tuple[ProgramMetric, ...] = (LATENCY,)

    @property
    def series(self) -> tuple[str, int]:
        """The key of its visits."""
        return (self.variant, self.batch)

    @property
    def title(self) -> str:
        """What it is, for messages."""
        own = "the program" + (f" with {self.variant}" if self.variant != PROGRAM else "")
        return own if self.command else f"the {self.variant} model"

    def fit(self, spec: RunSpec) -> RunSpec:
        """Return a spec, which is for a model on the CPU, for this program and its device."""
        if self.command is not None:
            spec = dataclasses.replace(spec, engine=Engine.PROGRAM, command=self.command, return_outputs=True)
        return dataclasses.replace(spec, device=self.device)

    def read(self, outcome: Outcome, outputs: Arrays) -> tuple[Outcome, dict[str, float]]:
        """Return an outcome with the objective, in s, as latency, and the medians of all metrics; a model's as it is.

        Raises PermanentError where a run lacks a metric.
        """
        if self.command is None or not outcome.latency_s:
            return outcome, {}
        found = read_runs(self.metrics, outcome.latency_s, outputs, outcome.details.stretch if outcome.details else 1.0)
        seconds = tuple(map(self.metrics[0].to_seconds, found[self.metrics[0].name]))
        medians = {name: statistics.median(values) for name, values in found.items()}
        return dataclasses.replace(outcome, latency_s=seconds), medians

    def convert(self, visit: PointMeasurement, medians: Mapping[str, float]) -> PointMeasurement:
        """Return a visit with these metrics, its energies not of a run but of what the objective counts or times."""
        ratio = 1.0
        if visit.power and visit.energy and self.metrics[0].pattern:
            ratio = visit.power.value * visit.latency.value / visit.energy.value
        energies = {
            name: each and Estimate(each.value * ratio, each.low * ratio, each.high * ratio)
            for name, each in (("energy", visit.energy), ("energy_above_idle", visit.energy_above_idle))
        }
        return dataclasses.replace(visit, metrics=medians, **energies)  # type: ignore[arg-type]


def list_programs(order: ProgramOrder, device: str) -> list[SweepProgram]:
    """Return a program for each series of settings. Raises UsageError."""
    sent = "".join(f"; {name} is {digest}" for name, digest in order.digests.items())
    found, metrics = [], order.read_metrics()
    for name, settings in order.list_settings().items():
        command = order.to_command(settings)
        about = shlex.join(command.arguments) + sent
        found.append(SweepProgram(name, 1, b"", dict(order.contents), about, device, "", command, metrics))
    return found


def read_variants(text: str) -> tuple[str, ...]:
    """Parse variants in the order of `VARIANTS`, each once. Raises UsageError."""
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in wanted if word not in VARIANTS]:
        raise UsageError(f"--variants: there is no variant {unknown[0]!r}", f"Known: {', '.join(VARIANTS)}.")
    if not wanted:
        raise UsageError("--variants names none", f"Known: {', '.join(VARIANTS)}.")
    return tuple(name for name in VARIANTS if name in wanted)


def read_batches(text: str) -> tuple[int, ...]:
    """Parse `1,4`, ascending. Raises UsageError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 0 < int(word[:9]) <= 4096 for word in words):
        raise UsageError(f"--batch {text[:80]!r} is no list of batch sizes", "Examples: 1, or 1,4.")
    return tuple(sorted({int(word) for word in words}))


@dataclasses.dataclass(frozen=True)
class SweepRecipe:
    """The inputs of compiling. `target` is for boards of `board_type` that are, or are not, `simulated`."""

    source: ModelSource
    shapes: tuple[str, ...]
    board_type: BoardType
    target: TargetPlan
    simulated: bool
    candidates: Candidates
    seed: int = 0

    def compile_all(self, variants: Sequence[str], batches: Sequence[int]) -> list[SweepProgram]:
        """Compile a program for every variant and batch.

        Raises UsageError where records are missing or a batch is impossible, PermanentError where it does not compile.
        """
        if TUNED in variants and not self.candidates.records:
            raise self._untuned()
        programs = []
        for batch in batches:
            model, inputs = set_batch(self.source, self.shapes, batch)
            arrays = make_inputs(inputs, self.seed).values()
            ordered: Arrays = {f"arg_{index:03d}": array for index, array in enumerate(arrays)}
            for variant in variants:
                done = self._compile(model, inputs, variant, batch)
                about = f"graph pipeline {done.pipeline}"
                if variant != UNTUNED:
                    about += f", {done.applied} of {done.workloads} functions from records"
                note = describe_imported(done.imported, done.applied)
                device = device_of(self.target_config)
                programs.append(SweepProgram(variant, batch, done.library, ordered, about, device, note))
        return programs

    @property
    def target_config(self) -> Mapping[str, Any]:
        """Return TVM's target. Loads TVM's compiler, so not for a process that talks to boards."""
        return to_config(self.target)

    def _compile(
        self, model: onnx.ModelProto, inputs: Sequence[InputSpec], variant: str, batch: int
    ) -> compile.Compiled:
        target, kind = self.target, self.board_type
        shapes = {spec.name: spec.static_shape for spec in inputs}
        book = make_book(kind, DEFAULT_POINT, Candidates(()) if variant == UNTUNED else self.candidates)
        pipeline = compile.UNTUNED_PIPELINE if variant == UNTUNED else kind.pipeline
        triple = None if target.is_for_host else kind.link_triple
        try:
            done = compile.compile_model(model, shapes, self.target_config, pipeline, book, triple)
        except PermanentError as error:
            if batch == 1:
                raise
            raise UsageError(
                f"--batch {batch}: {error.message}", "The model may fix its batch inside; export it with an open one."
            ) from error
        has_records = done.applied or book.find_refused(each.workload.hash for each in done.served)
        if variant == TUNED and not has_records:
            raise self._untuned()
        return done

    def _untuned(self) -> UsageError:
        name, kind = self.source.name, self.board_type.name
        boards = f"simulated boards of type {kind}" if self.simulated else f"boards of type {kind}"
        return UsageError(
            f"there is no record of {name} for {boards}, so there is no tuned code",
            f"`farm tune {name} --board-type {kind}` makes some; --variants compiled sweeps what there is now.",
        )


def require_equal_outputs(outputs: Mapping[tuple[str, int], Sequence[npt.NDArray[Any]]]) -> list[str]:
    """Refuse variants whose outputs differ from untuned code's, PermanentError; return each one's error."""
    said = []
    for (variant, batch), arrays in outputs.items():
        if any(array.ndim and array.shape[0] != batch for array in arrays) and batch > 1:
            shapes = ", ".join(str(list(array.shape)) for array in arrays)
            raise UsageError(
                f"--batch {batch}: the model gives outputs of shape {shapes} then, so its batch cannot be changed",
                "Export the model with an open batch dimension.",
            )
        if any(not np.isfinite(array).all() for array in arrays if array.dtype.kind == "f"):
            said.append(f"{variant}, batch {batch}: outputs hold values that are no numbers")
        reference = outputs.get((UNTUNED, batch))
        if variant == UNTUNED or reference is None:
            continue
        verdict = compare(list(arrays), list(reference))
        if not verdict.matches:
            raise PermanentError(
                f"the {variant} model computes something else than the untuned one: {verdict.reason}",
                "`farm model verify` names the functions at fault; `farm tune --fresh` makes new records.",
            )
        said.append(f"{variant} and untuned outputs agree to {verdict.max_rel_error:.1e} of their peak (batch {batch})")
    return said
