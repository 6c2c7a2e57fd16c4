"""Prove that a model's inputs may be padded along its open dimension, find the outputs to crop, join compiled sizes.

ONNX Runtime runs the model at some lengths, and again on inputs padded with zeros to a compiled size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farm.artifacts import artifact_folder, checking
from farm.artifacts import manifest as manifests
from farm.artifacts.given_model import GivenModel
from farm.artifacts.manifest import CompiledSize, Manifest, SequenceLengths
from farm.artifacts.runtime.lengths import Fitted, pad
from farm.artifacts.verify import compare, find_worst
from farm.errors import PermanentError, UsageError
from farm.models.lengths import Lengths


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
