"""Proofs by ONNX Runtime before a model is compiled: the import computes what it does, and padding changes nothing.

No schedule and no option changes what the import computes. For padding along an open dimension, ONNX Runtime runs the
model at some lengths, and again on inputs padded with zeros to a compiled size; `join_sizes` joins the compiled sizes.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax

from farm.artifacts import artifact_folder, checking
from farm.artifacts import manifest as manifests
from farm.artifacts.compile import UNTUNED_PIPELINE, compile_model
from farm.artifacts.given_model import GivenModel
from farm.artifacts.manifest import CompiledSize, Manifest, SequenceLengths
from farm.artifacts.runtime.inputs import Fitted, pad
from farm.artifacts.verify import OutputComparison, compare, find_worst
from farm.errors import DeadlineError, InternalError, PermanentError, UnavailableError, UsageError
from farm.models.inputs import InputSpec
from farm.models.lengths import Lengths
from farm.models.source import ModelSource
from farm.processes.jobs import compile_in_subprocess
from farm.search.tvm_env import host_target

# Unscheduled code is slow: some seconds per case of a ResNet.
_MOST_CASES = 2

IMPORT_HINT = (
    "TVM imports the model differently from ONNX Runtime, so neither --exact nor other records help. Export it with "
    "another opset or other operators (`farm model show` lists them), and report it. If it takes only some values, "
    "give such with `farm model verify --input`."
)

Case = tuple[str, Mapping[str, Any]]


def require_right_import(source: ModelSource, inputs: Sequence[InputSpec], say: Callable[[str], None]) -> None:
    """Raise PermanentError where the imported model's outputs differ; return where they cannot be compared."""
    say(f"{source.name}: comparing the model without schedules with ONNX Runtime")
    cases = checking.make_seeded(source, inputs)
    found = compare_import(source, inputs, [cases[0], *cases[-1:]], say)
    if found is not None and not found.matches:
        raise PermanentError(f"{source.name} as TVM imports it computes something else: {found.reason}", IMPORT_HINT)


def compare_import(
    source: ModelSource, inputs: Sequence[InputSpec], cases: Sequence[Case], say: Callable[[str], None] | None = None
) -> OutputComparison | None:
    """Compare the unscheduled model on this machine for some `cases` of equal shapes; None where it does not run."""
    shapes = {spec.name: np.shape(cases[0][1][spec.name]) for spec in inputs}
    cases = [each for each in cases if all(np.shape(each[1][name]) == shape for name, shape in shapes.items())]
    cases = cases[:_MOST_CASES]
    feeds = [[arrays[spec.name] for spec in inputs] for _, arrays in cases]
    job = functools.partial(_run, source.load().SerializeToString(), shapes, feeds)
    try:
        references = checking.run_reference(source, cases)
        outputs, factor = compile_in_subprocess(job, source.name, say=say)
    except (DeadlineError, InternalError, PermanentError, UnavailableError, UsageError):
        # The model's compilation reports such errors.
        return None
    triples = zip(cases, outputs, references, strict=True)
    return find_worst(checking.compare_case(source, *triple, factor) for triple in triples)


def _run(
    model: bytes, shapes: Mapping[str, tuple[int, ...]], feeds: Sequence[Sequence[Any]]
) -> tuple[list[list[Any]], float]:
    """Return the outputs for each feed, and the tolerance factor. Loads TVM's compiler."""
    compiled = compile_model(
        onnx.load_model_from_string(model), shapes, host_target(1), UNTUNED_PIPELINE, [], link_triple=None
    )
    factor = checking.find_tolerance_factor(each.algorithm for each in compiled.served)

    with tempfile.TemporaryDirectory(prefix="farm-import-") as folder:
        path = Path(folder) / "model.so"
        path.write_bytes(compiled.library)
        machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
        answers = [machine["main"](*(tvm.runtime.tensor(np.asarray(array)) for array in feed)) for feed in feeds]
        return [
            [answer.numpy()] if hasattr(answer, "numpy") else [a.numpy() for a in answer] for answer in answers
        ], factor


def find_output_axes(opened: GivenModel) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of outputs to crop, by name. Raises UsageError where padding changes what they hold."""
    lengths = opened.lengths
    if lengths is None:
        return {}
    axes = {output.name: tuple[int, ...]() for output in opened.source.load().graph.output}
    # Most padding of the smallest and of the greatest size, and least.
    begin = (lengths.least - 1, *lengths.sizes)[-2] + 1
    for length in sorted({lengths.least, begin, lengths.sizes[-1] - 1} - {lengths.least - 1, *lengths.sizes}):
        size = next(size for size in lengths.sizes if size >= length)
        cases = checking.make_unmasked(lengths.set_length(opened.inputs, length))
        padded = [(name, pad(arrays, lengths.axes, size - length)) for name, arrays in cases]
        try:
            outputs = checking.run_reference(opened.source, [*cases, *padded])
        except PermanentError as error:
            raise UsageError(
                f"{opened.about.name} does not run with {length} {lengths.name}, or padded to {size}: {error.message}",
                "Give a range in which it runs.",
            ) from error
        wanted, got = outputs[: len(cases)], outputs[len(cases) :]
        for name, short, long in zip(axes, wanted[0], got[0], strict=True):
            sizes = enumerate(zip(short.shape, long.shape, strict=False))
            axes[name] = tuple(at for at, pair in sizes if pair == (length, size))
        fitted = Fitted("", {}, {}, length, list(axes.values()))
        found = find_worst(compare(fitted.crop(each), own) for each, own in zip(got, wanted, strict=True))
        if not found.matches:
            raise UsageError(
                f"the model is not right with {lengths.name} padded from {length} to {size}: {found.reason}",
                "Export it with an attention mask as input, or compile an artifact for each length: "
                f"--shape {lengths.fix(lengths.sizes[-1])}.",
            )
    return {name: found for name, found in axes.items() if found}


def join_sizes(
    lengths: Lengths, outputs: dict[str, tuple[int, ...]], made: Sequence[tuple[Manifest, Mapping[str, bytes]]]
) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and files of one artifact from those of its sizes, ascending.

    Every library holds the weights, in the layout of its own schedules.
    """
    manifest, files = made[-1][0], dict(made[-1][1])
    compiled = []
    for size, (each, own) in zip(lengths.sizes, made, strict=True):
        library = manifests.LIBRARY if each is manifest else f"model-{size}.so"
        files[library] = own[manifests.LIBRARY]
        latency_s = each.predicted_latency_s
        compiled.append(
            CompiledSize(size=size, library=library, workloads=each.workloads, predicted_latency_s=latency_s)
        )
    changes = {
        "files": {name: artifact_folder.describe_file(data) for name, data in files.items()},
        # A process may load all of them.
        "memory_bytes": manifest.memory_bytes + sum(len(own[manifests.LIBRARY]) for _, own in made[:-1]),
        "lengths": SequenceLengths(
            name=lengths.name, least=lengths.least, sizes=tuple(compiled), inputs=dict(lengths.axes), outputs=outputs
        ),
    }
    return manifest.model_copy(update=changes), files
