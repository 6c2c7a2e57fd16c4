"""A model as the user gave it, with all input shapes resolved: open it, find it again, read its calibration data."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from farm import settings as farm_settings
from farm.artifacts.manifest import Manifest, ModelFacts, Tensor
from farm.artifacts.runtime import images, tasks
from farm.artifacts.runtime.inputs import InputError, read_array, read_arrays
from farm.artifacts.task import count_classes, find_task
from farm.errors import UsageError
from farm.models import trained
from farm.models.inputs import InputSpec, make_inputs, parse_shapes, read_inputs, resolve_inputs, summarise
from farm.models.lengths import Lengths, set_batch, split_shapes
from farm.models.source import ModelSource, find_model, resolve_model

Arrays = Mapping[str, Any]

RANDOM = "random"
_SUFFIXES = (".npz", ".npy")
# Images for calibration; more change the ranges little.
_MOST_IMAGES = 128


@contextlib.contextmanager
def refusing(hint: str = "") -> Iterator[None]:
    """Raise UsageError for input that cannot be read or does not fit (InputError); also a decorator."""
    try:
        yield
    except InputError as error:
        raise UsageError(str(error), hint) from error


def find_given_task(source: ModelSource, inputs: Sequence[InputSpec]) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Return a model's task and its outputs before it is compiled; "arrays" where outputs have open dimensions."""
    outputs = summarise(source.load(), inputs).outputs
    if any(each.is_dynamic for each in outputs):
        return {"kind": "arrays"}, ()
    given, made = (
        tuple(Tensor(name=each.name, shape=each.static_shape, dtype=each.dtype) for each in specs)
        for specs in (inputs, outputs)
    )
    return find_task(given, made, source.read_metadata()), made


def find_labels(opened: GivenModel) -> bytes | None:
    """Return the names of the classes in a model's metadata, one a line; None where they do not fit."""
    if not (names := trained.find_names(opened.source.read_metadata())):
        return None
    task, outputs = find_given_task(opened.source, opened.inputs)
    if not outputs or len(names) != count_classes(task, outputs):
        return None
    return "".join(f"{' '.join(each.split())}\n" for each in names).encode()


@refusing()
def read_images(folder: pathlib.Path, task: Mapping[str, Any], most: int = _MOST_IMAGES) -> list[Arrays]:
    """Return inputs of up to `most` images of a folder and its subfolders, spread over them. Raises UsageError."""
    found = sorted(each for each in folder.rglob("[!.]*") if each.suffix.lower() in images.SUFFIXES)
    chosen = [found[index * len(found) // most] for index in range(most)] if len(found) > most else found
    return [tasks.read_input(path, {"task": task})[0] for path in chosen]


def read_calibration(
    text: str, inputs: Sequence[InputSpec], count: int, task: Mapping[str, Any] | None = None
) -> list[Arrays]:
    """Return calibration inputs: `count` seeded ones for `random`, else a folder's .npz and .npy files, or images.

    A .npz holds an array per input name, a .npy the only input. Images need a `task` that takes one. Raises UsageError
    for a file that does not fit.
    """
    if text == RANDOM:
        return [make_inputs(inputs, seed) for seed in range(count)]
    folder = pathlib.Path(text).expanduser()
    if not folder.is_dir():
        raise UsageError(
            f"--calibration {text!r} is no folder", f"Give a folder of images, .npz or .npy files, or {RANDOM!r}."
        )
    files = sorted(path for path in folder.glob("[!.]*") if path.suffix in _SUFFIXES)
    if not files and task is not None and task["kind"] != "arrays" and (found := read_images(folder, task)):
        return found
    if not files:
        raise UsageError(
            f"{folder} holds no .npz, no .npy and no image that the model takes",
            f"np.savez(FILE, {', '.join(f'{spec.name}=...' for spec in inputs)}) writes one; one for each example.",
        )
    return [_read_example(path, inputs) for path in files]


@refusing()
def _read_example(path: pathlib.Path, inputs: Sequence[InputSpec]) -> Arrays:
    arrays = read_arrays(path) if path.suffix == ".npz" else {inputs[0].name: read_array(path)}
    fed = {}
    for spec in inputs:
        if spec.name not in arrays:
            raise UsageError(f"{path} has no array for the input {spec}", f"It holds {', '.join(arrays) or 'nothing'}.")
        array = arrays[spec.name]
        if array.shape != spec.static_shape or array.dtype != np.dtype(spec.dtype):
            raise UsageError(f"{path}: {spec.name} is {array.shape} {array.dtype}; the model's input is {spec}")
        fed[spec.name] = array
    return fed


_HINT = (
    "Give its file with --model, or compile the model again. On several hosts: set FARM_SHARED to a folder that all of "
    "them see, and models of campaigns submitted from then on are found there."
)


@dataclasses.dataclass(frozen=True)
class GivenModel:
    """`source` is what is compiled: the model of `about`, with another batch size than the `original` if requested.

    With `lengths`, `inputs` have the greatest one, and `source` takes any.
    """

    source: ModelSource
    inputs: tuple[InputSpec, ...]
    about: ModelFacts
    lengths: Lengths | None = None
    original: ModelSource | None = None

    def list_sizes(self) -> list[GivenModel]:
        """List it with each compiled length; itself where it has none."""
        if self.lengths is None:
            return [self]
        inputs = [self.lengths.set_length(self.inputs, size) for size in self.lengths.sizes]
        return [dataclasses.replace(self, inputs=each) for each in inputs]


def open_model(text: str, shapes: Sequence[str] = (), batch: int | None = None, trusted: bool = False) -> GivenModel:
    """Find the model that `text` names and resolve its shapes by `--shape` and `--batch`. Raises UsageError."""
    return open_source(resolve_model(text, trusted), shapes, batch)


def open_source(source: ModelSource, shapes: Sequence[str], batch: int | None) -> GivenModel:
    """Resolve a model's shapes by `--shape` and `--batch`. Raises UsageError."""
    plain, lengths = split_shapes(shapes)
    about = ModelFacts(name=source.name, sha256=source.sha256, origin=source.origin, shapes=tuple(shapes), batch=batch)
    if lengths is not None:
        lengths = lengths.bind(read_inputs(source.load()), parse_shapes(plain), batch)
        plain = [*plain, lengths.fix(lengths.sizes[-1])]
    if batch is None:
        model = source.load()
        inputs = resolve_inputs(read_inputs(model), parse_shapes(plain), model)
        return GivenModel(source, inputs, about, lengths, source)
    batched, inputs = set_batch(source, plain, batch)
    if lengths is not None:
        lengths.reopen(batched)
    return GivenModel(source.changed(batched), inputs, about, lengths, source)


def reopen_model(manifest: Manifest, given: str | None) -> GivenModel:
    """Find the model of an artifact: at its origin, or `given`. Raises UsageError."""
    return find_same_model(manifest.model, given, f"{manifest.name} was compiled from")


def find_same_model(about: ModelFacts, given: str | None, what: str) -> GivenModel:
    """Find the model that `about` describes; `what` names its user. Raises UsageError where it has changed.

    The description may be malicious, so nothing is read that could run code.
    """
    if given is None and (kept := _find_kept(about)) is not None:
        return kept
    try:
        found = open_model(given or about.typed, about.shapes, about.batch)
    except UsageError as error:
        raise UsageError(f"the model that {what} is needed: {error.message}", _HINT) from error
    if found.about.sha256 != about.sha256:
        raise UsageError(
            f"{found.about.origin} is not the model that {what} (SHA-256 {about.sha256[:12]}…): it has changed", _HINT
        )
    return found


def _find_kept(about: ModelFacts) -> GivenModel | None:
    """Find the model in the shared folder by its content, or None."""
    folder = farm_settings.load().models_path
    path = None if folder is None else find_model(folder, about.sha256)
    if path is None:
        return None
    found = open_model(str(path), about.shapes, about.batch)
    source = dataclasses.replace(found.source, name=about.name, origin=about.origin)
    return dataclasses.replace(found, source=source, about=about)
