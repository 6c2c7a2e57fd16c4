"""Run variants of a model on data, on one held board: accuracy beside ONNX Runtime's, latency, energy and size."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.protocol import Engine, RunSpec
from farm.artifacts import make
from farm.artifacts.artifact_folder import Artifact
from farm.artifacts.checking import open_reference, read_energy, read_input, read_labels, take_inputs
from farm.artifacts.given_model import GivenModel, refusing
from farm.artifacts.on_board import HeldForModels, require_ok
from farm.artifacts.runtime import tasks
from farm.artifacts.runtime.inputs import Fitted, fit, read_arrays
from farm.artifacts.timing import Turns, Variant, describe_runs, ordered
from farm.crew.visits import plan_window
from farm.errors import FarmError, PermanentError, UsageError
from farm.evaluation import datasets, scores
from farm.evaluation.datasets import CLASSIFY, DETECT, Example
from farm.inventory.board_types import BoardType
from farm.models import quantise
from farm.models.source import ModelSource
from farm.search.graph import pipelines
from farm.settings import Settings
from farm.store import Store

REFERENCE = "reference"
TOP1, TOP5, MAP50, MAP, OFF = "top1", "top5", "map50", "map", "error"
METRICS = {CLASSIFY: (TOP1, TOP5), DETECT: (MAP50, MAP), datasets.ERROR: (OFF,)}
# Detectors are scored by all but their least sure boxes, as COCO's evaluation is.
_LEAST_SCORE = 0.001
_WINDOW_S = 2.0
# A message to the board has at most so many inputs, as many bytes, and takes this share of the time limit.
_MOST, _MOST_BYTES, _SHARE = 256, 32 << 20, 0.25
# Each message may have so many times as many inputs as the one before, whose time is known.
_GROWTH = 8

Say = Callable[[str], None]
# Outputs of inferences on inputs by the model's names.
Run = Callable[[Sequence[Mapping[str, Any]]], list[list[Any]]]
INT8 = "int8"


@dataclasses.dataclass
class VariantResults:
    """What one variant found, by example: ranks of the true class, boxes, or relative errors; and the best class."""

    task: str
    values: list[Any] = dataclasses.field(default_factory=list)
    best: list[tuple[int, float] | None] = dataclasses.field(default_factory=list)

    def list_hits(self, metric: str) -> list[bool]:
        """Return whether each true class is among the best one or five."""
        return [rank < (1 if metric == TOP1 else 5) for rank in self.values]


class Scorer:
    """Figures and changes of all variants on the same examples."""

    def __init__(self, task: str, examples: Sequence[Example], results: Mapping[str, VariantResults]) -> None:
        """Score. Raises UnavailableError where detectors are scored without pycocotools."""
        self.task, self.examples, self.results = task, examples, results
        self._figures: dict[str, tuple[tuple[float, float], Any]] = {}
        if task == DETECT:
            truths = [each.truth for each in examples]
            for name, found in results.items():
                precision = scores.Precision(truths, found.values)
                self._figures[name] = precision.find(), precision.draw()

    def find(self, name: str, metric: str) -> scores.Interval:
        """Return a figure with its interval; of errors the median, the least and the greatest."""
        found = self.results[name]
        if self.task == CLASSIFY:
            hits = found.list_hits(metric)
            return scores.find_wilson(sum(hits), len(hits))
        if self.task == DETECT:
            column = METRICS[DETECT].index(metric)
            values, drawn = self._figures[name]
            return scores.find_quantiles(values[column], drawn[:, column])
        return float(np.median(found.values)), min(found.values), max(found.values)

    def find_change(self, name: str, base: str, metric: str) -> scores.Interval:
        """Return the difference of two variants' figures, paired by example."""
        if self.task == CLASSIFY:
            return scores.find_paired_change(*(self.results[each].list_hits(metric) for each in (name, base)))
        column = METRICS[DETECT].index(metric)
        (ours, drawn), (theirs, others) = self._figures[name], self._figures[base]
        return scores.find_quantiles(ours[column] - theirs[column], drawn[:, column] - others[:, column])

    def describe(self, name: str) -> dict[str, Any]:
        """Return a variant's part of a row: scores, their intervals, and changes with theirs."""
        metrics, reference = METRICS[self.task], REFERENCE in self.results and name != REFERENCE
        found = {metric: self.find(name, metric) for metric in metrics}
        changed = {
            metric: self.find_change(name, REFERENCE, metric) for metric in metrics if reference and metric != OFF
        }
        return {
            "precision": name,
            "scores": {metric: each[0] for metric, each in found.items()},
            "intervals": {metric: list(each[1:]) for metric, each in found.items()},
            "change": {metric: list(each) for metric, each in changed.items()},
        }

    def list_examples(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Return each example's file, label, and what every variant is surest of."""

        def name(index: int) -> str:
            return labels[index] if index < len(labels) else f"class {index}"

        return [
            {
                "file": example.path.name,
                "label": name(example.truth) if self.task == CLASSIFY else None,
                "found": {
                    variant: {"label": name(best[0]), "share": best[1]}
                    for variant, each in self.results.items()
                    if (best := each.best[index]) is not None
                },
            }
            for index, example in enumerate(self.examples)
        ]


def evaluate(
    variants: Mapping[str, Artifact],
    source: ModelSource,
    board: HeldForModels,
    examples: Sequence[Example],
    task: str,
    model_runs: int,
    say: Say,
) -> dict[str, Any]:
    """Time the variants in turns on the first example, run all examples, and score; return the document's part.

    `variants` are by precision. The reference is the float32 `source` in ONNX Runtime on this machine.
    """
    about = next(iter(variants.values())).manifest
    first, _ = read_example(about, examples[0])
    limits = board.limits(max(each.manifest.threads for each in variants.values()))
    turns = []
    for name, artifact in variants.items():
        fitted = fit(artifact.manifest.to_runtime(), first)
        library, device = artifact.read_file(fitted.library), artifact.manifest.device
        turns.append(Variant(name, Engine.RELAX_VM, library, ordered(fitted.inputs), True, device))
    say(f"{about.name}: timing {', '.join(variants)} in turns")
    energy = plan_window(board.description, _WINDOW_S).to_energy()
    timed = Turns(turns, model_runs, limits, energy=energy).run_all(board.run)
    scorer = score(variants, source, board, examples, task, say)
    rows = [{**scorer.describe(REFERENCE), "label": "ONNX Runtime", "latency_s": None}]
    for name, artifact in variants.items():
        summary = timed.summary(name)
        assert summary is not None  # `run_all` raises otherwise
        energy_j, power_w = read_energy(timed.outcomes[name])
        figures = {"latency_s": dataclasses.asdict(summary), "energy_j": energy_j, "power_w": power_w}
        rows.append({**scorer.describe(name), **figures, "bytes": artifact.manifest.library.bytes})
    return {
        "threads": limits.threads,
        "clocks": board.read_clocks(timed.outcomes[turns[0].name], about.device),
        "runs": describe_runs(model_runs),
        "doubt": timed.find_doubt(),
        "rows": rows,
        "examples": scorer.list_examples(read_labels(next(iter(variants.values())))),
    }


def score(
    variants: Mapping[str, Artifact],
    source: ModelSource | None,
    board: HeldForModels,
    examples: Sequence[Example],
    task: str,
    say: Say,
) -> Scorer:
    """Run all examples through the variants, and through ONNX Runtime where there is a `source`."""
    about = next(iter(variants.values())).manifest
    runs: dict[str, Run] = {}
    if source is not None:
        reference = open_reference(source)
        runs[REFERENCE] = lambda inputs: [reference(each) for each in inputs]
    runs |= {name: open_artifact(each, board) for name, each in variants.items()}
    return Scorer(task, examples, run_examples(about, runs, examples, task, say))


def run_examples(
    about: Any, runs: Mapping[str, Run], examples: Sequence[Example], task: str, say: Say
) -> dict[str, VariantResults]:
    """Run every example through every program, in turns after as many examples as a message holds."""
    results = {name: VariantResults(task) for name in runs}
    names = [each.name for each in about.outputs]
    # As many inputs with their outputs as a message may hold.
    tensors = [*about.inputs, *about.outputs]
    size = sum(np.dtype(each.dtype).itemsize * math.prod(each.shape) for each in tensors)
    size = int(np.clip(_MOST_BYTES // max(1, size), 1, _MOST))
    for begin in range(0, len(examples), size):
        now = examples[begin : begin + size]
        read = [read_example(about, example) for example in now]
        expected = [_read_expected(about, example) if task == datasets.ERROR else None for example in now]
        for name, run in runs.items():
            for at, outputs in enumerate(run([inputs for inputs, _ in read])):
                # The reference comes first.
                wanted, scale = expected[at] or outputs, read[at][1]
                expected[at] = wanted
                results[name].values.append(_score(task, about.task, names, outputs, wanted, now[at], scale))
                best = tasks.find(dict(zip(names, outputs, strict=True)), about.task, (), 1, scale)[:1]
                results[name].best.append((best[0]["class"], best[0]["share"]) if best else None)
        say(f"{about.name}: {begin + len(now)} of {len(examples)} examples")
    return results


def _score(
    task: str, about: Mapping[str, Any], names: Sequence[str], outputs: Any, wanted: Any, example: Example, scale: float
) -> Any:
    if task == CLASSIFY:
        return scores.find_rank(outputs[0], example.truth)
    if task == DETECT:
        found = tasks.find_boxes(dict(zip(names, outputs, strict=True)), about, scale, _LEAST_SCORE)
        return [(each.index, each.left, each.top, each.right, each.bottom, each.score) for each in found]
    return scores.find_error(outputs, wanted)


@refusing()
def read_example(about: Any, example: Example) -> tuple[Mapping[str, Any], float]:
    """Return a model's inputs, and an image's scale in them. Raises UsageError."""
    if example.path.suffix.lower() != ".npz":
        return read_input(about, example.path)
    known = {each.name for each in about.inputs}
    arrays = {name: each for name, each in read_arrays(example.path).items() if name in known}
    return take_inputs(about, arrays), 1.0


def _read_expected(about: Any, example: Example) -> list[Any] | None:
    """Return the outputs that a .npz has beside its inputs; None without them."""
    if example.path.suffix.lower() != ".npz":
        return None
    arrays = read_arrays(example.path)
    found = [arrays[each.name] for each in about.outputs if each.name in arrays]
    return found if len(found) == len(about.outputs) else None


def open_artifact(artifact: Artifact, board: HeldForModels) -> Run:
    """Return a function that runs an artifact on the held board. It raises PermanentError."""
    manifest = artifact.manifest
    board.require_fit(manifest)
    called, libraries = manifest.to_runtime(), dict[str, bytes]()
    limits, most = board.limits(manifest.threads), 1

    def run_some(waiting: Sequence[Fitted]) -> Iterator[list[Any]]:
        spec = RunSpec(Engine.RELAX_VM, device=manifest.device, stacked=len(waiting), limits=limits)
        library, feeds = waiting[0].library, [ordered(each.inputs) for each in waiting]
        if library not in libraries:
            libraries[library] = artifact.read_file(library)
        stacked = {name: np.stack([each[name] for each in feeds]) for name in feeds[0]} if feeds[1:] else feeds[0]
        outcome, outputs = board.run(spec, libraries[library], stacked)
        require_ok(outcome, manifest.name, board.name)
        found = [np.asarray(each) for each in outputs.values()]
        for at, each in enumerate(waiting):
            yield each.crop([array[at] for array in found] if feeds[1:] else found)

    def run(inputs: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        nonlocal most
        found: list[list[Any]] = []
        for _, group in itertools.groupby((fit(called, each) for each in inputs), lambda each: each.library):
            waiting = list(group)
            while waiting:
                began_s, count = time.monotonic(), min(most, len(waiting))
                found += run_some(waiting[:count])
                allowed = _SHARE * limits.timeout_s * count / (time.monotonic() - began_s)
                waiting, most = waiting[count:], int(np.clip(allowed, 1, max(most, _GROWTH * count)))
        return found

    return run


def read_precisions(text: str) -> list[str]:
    """Parse names such as `float32,int8`. Raises UsageError."""
    known = (*pipelines.KNOWN, INT8)
    wanted = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not wanted or (unknown := [word for word in wanted if word not in known]):
        raise UsageError(f"--weights: there is no {unknown[0] if wanted else text!r}", f"Known: {', '.join(known)}.")
    return wanted


def make_variants(
    opened: GivenModel,
    kind: BoardType,
    simulated: bool,
    precisions: Sequence[str],
    labels: bytes | None,
    calibration: Callable[[], Sequence[Any]],
    folder: Path,
    settings: Settings,
    store: Store,
    say: Callable[[str], None],
) -> tuple[dict[str, Artifact], dict[str, str]]:
    """Compile each precision into a folder of its own; return the artifacts, and why others are missing.

    `calibration` returns the inputs for int8. Raises the error of the last where none can be made.
    """
    made, missing = dict[str, Artifact](), dict[str, str]()
    last: FarmError | None = None
    for name in precisions:
        say(f"{opened.about.name}: compiling {name}")
        try:
            if name == INT8:
                data = quantise.quantise(opened.source, calibration()).onnx_bytes
                source = dataclasses.replace(opened.source, onnx_bytes=data)
                order = make.CompileOrder(dataclasses.replace(opened, source=source), kind)
            else:
                order = make.CompileOrder(opened, pipelines.store_weights(kind, name))
            order = dataclasses.replace(order, simulated=simulated, labels=labels)
            made[name] = make.make_artifact(order, folder / name, settings, store, say)
        except (UsageError, PermanentError) as error:
            missing[name], last = error.message, error
    if not made and last is not None:
        raise last
    return made, missing
