"""Prove that a model's inputs may be padded along its open dimension, find the outputs to crop, join compiled sizes.

ONNX Runtime runs the model at some lengths, and again on inputs padded with zeros to a compiled size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farm.artifacts import checking
from farm.artifacts import manifest as manifests
from farm.artifacts.given_model import GivenModel
from farm.artifacts.manifest import CompiledSize, Manifest, SequenceLengths
from farm.artifacts.runtime.lengths import Fitted, pad
from farm.artifacts.verify import compare
from farm.errors import PermanentError, UsageError
from farm.models.lengths import Lengths

Axes = dict[str, tuple[int, ...]]


def find_output_axes(opened: GivenModel) -> Axes:
    """Return the dimensions of outputs to crop, by name. Raises UsageError where padding changes what they hold."""
    lengths = opened.lengths
    if lengths is None:
        return {}
    names = [output.name for output in opened.source.load().graph.output]
    axes: Axes = dict.fromkeys(names, ())
    for length in _choose_lengths(lengths):
        size = lengths.find_size(length)
        cases = checking.make_unmasked(opened.set_length(length).inputs)
        padded = [(name, pad(arrays, lengths.axes, size - length)) for name, arrays in cases]
        try:
            wanted, got = (checking.run_reference(opened.source, each) for each in (cases, padded))
        except PermanentError as error:
            raise UsageError(
                f"{opened.about.name} does not run with {length} {lengths.name}, or padded to {size}: {error.message}",
                "Give a range in which it runs.",
            ) from error
        for name, short, long in zip(names, wanted[0], got[0], strict=True):
            axes[name] = _find_changed(name, short.shape, long.shape, length, size, lengths)
        fitted = Fitted("", {}, length, dict(enumerate(axes.values())))
        for reference, outputs in zip(wanted, got, strict=True):
            compared = compare(fitted.crop(outputs), reference)
            if not compared.matches:
                raise _refuse(lengths, f"padded from {length} to {size}, {compared.reason}")
    return {name: found for name, found in axes.items() if found}


def join_sizes(
    lengths: Lengths, outputs: Axes, made: Sequence[tuple[Manifest, Mapping[str, bytes]]]
) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and files of one artifact from those of its sizes, ascending.

    Every library holds the weights, in the layout of its own schedules.
    """
    manifest, files = made[-1][0], dict(made[-1][1])
    compiled = []
    for size, (each, own) in zip(lengths.sizes, made, strict=True):
        library = manifests.LIBRARY if each is manifest else f"model-{size}.so"
        files[library] = own[manifests.LIBRARY]
        compiled.append(
            CompiledSize(
                size=size, library=library, workloads=each.workloads, predicted_latency_s=each.predicted_latency_s
            )
        )
    changes = {
        "files": {name: manifests.describe_file(data) for name, data in files.items()},
        # A process may load all of them.
        "memory_bytes": manifest.memory_bytes + sum(len(own[manifests.LIBRARY]) for _, own in made[:-1]),
        "lengths": SequenceLengths(
            name=lengths.name, least=lengths.least, sizes=tuple(compiled), inputs=dict(lengths.axes), outputs=outputs
        ),
    }
    return manifest.model_copy(update=changes), files


def _choose_lengths(lengths: Lengths) -> list[int]:
    """Return the shortest, the middle and the longest length between the compiled sizes."""
    between = [each for each in range(lengths.least, lengths.sizes[-1]) if each not in lengths.sizes]
    return sorted({between[0], between[len(between) // 2], between[-1]}) if between else []


def _find_changed(
    name: str, short: tuple[int, ...], long: tuple[int, ...], length: int, size: int, lengths: Lengths
) -> tuple[int, ...]:
    """Return the dimensions of an output that follow the input's length."""
    changed = [at for at, (a, b) in enumerate(zip(short, long, strict=False)) if a != b]
    if len(short) != len(long) or any((short[at], long[at]) != (length, size) for at in changed):
        raise _refuse(lengths, f"output {name!r} has the shape {short} for {length}, and {long} for {size}")
    return tuple(changed)


def _refuse(lengths: Lengths, what: str) -> UsageError:
    return UsageError(
        f"the model is not right with padded {lengths.name}: {what}",
        "Export it with an attention mask as input, or compile an artifact for each length: "
        f"--shape {lengths.name}={lengths.sizes[-1]}.",
    )
