"""A model as the user gave it, with all input shapes resolved: open it, find it again, read its calibration data.

Its task follows from inputs and outputs: how an image becomes its input, and how its outputs become words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from farm import settings as farm_settings
from farm.artifacts.manifest import Manifest, ModelFacts, Tensor
from farm.artifacts.runtime import tasks
from farm.artifacts.runtime.inputs import InputError, read_array, read_arrays
from farm.errors import UsageError
from farm.models import trained
from farm.models.inputs import InputSpec, make_inputs, parse_shapes, read_inputs, resolve_inputs
from farm.models.lengths import Lengths, set_batch, split_shapes
from farm.models.source import ModelSource, find_model, resolve_model, summarise

Arrays = Mapping[str, Any]

RANDOM = "random"
_SUFFIXES = (".npz", ".npy")
# Images for calibration; more change the ranges little.
_MOST_IMAGES = 128
_HINT = (
    "Give its file with --model, or compile the model again. On several hosts: set FARM_SHARED to a folder that all of "
    "them see, and models of campaigns submitted from then on are found there."
)
_GREY = (0.5,)
# Published classifiers are tested on the central 7/8 of an image: 224 of 256.
_CROP = 0.875
# Smaller images, such as digits, are not cropped.
_LEAST_CROPPED = 64
# What ONNX's metadata says of an image's values (docs/MetadataProps.md), as mean and deviation.
RANGE = "Image.NominalPixelRange"
_RANGES = {"Normalized_1_1": (0.5, 0.5), "Normalized_0_1": (0.0, 1.0), "NominalRange_0_255": (0.0, 1 / 255)}
# Pixels per cell by output, and a cell's or anchor's channels besides its classes.
_STRIDES = (8, 16, 32)
# YOLOv4-tiny's anchors by stride, and the growth of its centres (yolov4-tiny.cfg of AlexeyAB/darknet: mask, anchors,
# scale_x_y).
_ANCHORS = {32: ((81, 82), (135, 169), (344, 319)), 16: ((23, 27), (37, 58), (81, 82))}
_GROWTH = 1.05


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
    found = sorted(each for each in folder.rglob("[!.]*") if each.suffix.lower() in tasks.SUFFIXES)
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


# ImageNet's mean and deviation by channel, for values from 0 to 1, as in nearly all published classifiers (torchvision,
# timm). For one channel there is no convention.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_BOX_CHANNELS, _BOX_CHANNELS_V8 = 5, 4


def find_task(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the task of an image classifier (one image in, one row of scores out) or a detector of the YOLO family.

    `metadata` is the ONNX file's. Any other model gets {"kind": "arrays"}.
    """
    if len(inputs) == 1 and len(outputs) == 1 and len(inputs[0].shape) == 4:
        (image,), (scores,) = inputs, outputs
        batch, *rest = image.shape
        layout = "NCHW" if rest[0] in (1, 3) else "NHWC" if rest[2] in (1, 3) else ""
        is_row = scores.shape[0] == 1 and len([d for d in scores.shape if d > 1]) == 1
        if batch == 1 and layout and is_row and image.dtype.startswith("float"):
            channels, rows, columns = rest if layout == "NCHW" else (rest[2], rest[0], rest[1])
            mean, std = list(_MEAN if channels == 3 else _GREY), list(_STD if channels == 3 else _GREY)
            if (said := (metadata or {}).get(RANGE, "")) in _RANGES:
                mean, std = ([each] * channels for each in _RANGES[said])
            return {
                "kind": "classifier",
                "input": image.name,
                "output": scores.name,
                "layout": layout,
                "dtype": image.dtype,
                "size": [rows, columns],
                "resize": round(min(rows, columns) / _CROP)
                if min(rows, columns) >= _LEAST_CROPPED
                else min(rows, columns),
                "mean": mean,
                "std": std,
            }
    return _find_detector(inputs, outputs) or {"kind": "arrays"}


def require_labels(labels: bytes, task: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
    """Raise UsageError where a classifier or detector has another number of classes than there are names."""
    names, wanted = len(labels.decode().splitlines()), count_classes(task, outputs)
    if wanted is not None and names != wanted:
        raise UsageError(
            f"--classes has {names} name{'s' * (names != 1)}, and the model has {wanted} classes",
            "One name a line, in the order of the model's scores.",
        )


def count_classes(task: Mapping[str, Any], outputs: Sequence[Tensor]) -> int | None:
    """Return the number of a classifier's or detector's classes; None for other models."""
    shape = outputs[0].shape
    if task["kind"] == "classifier":
        return math.prod(shape)
    if task["kind"] != "detector":
        return None
    if task.get("decoder") == "yolov8":
        return shape[1] - _BOX_CHANNELS_V8
    return shape[1] // (len(_ANCHORS[32]) if task.get("decoder") == "yolov4" else 1) - _BOX_CHANNELS


def _find_detector(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any] | None:
    """One picture in; YOLOX's three heads, YOLOv4-tiny's two, or YOLOv8's decoded boxes out."""
    if len(inputs) != 1 or inputs[0].shape[:2] != (1, 3) or len(inputs[0].shape) != 4 or not outputs:
        return None
    rows, columns = inputs[0].shape[2:]
    shapes = [each.shape for each in outputs]
    channels = shapes[0][1] if len(shapes[0]) > 1 else 0
    task = {
        "kind": "detector",
        "input": inputs[0].name,
        "outputs": [each.name for each in outputs],
        "dtype": inputs[0].dtype,
        "size": [rows, columns],
    }

    def cells(strides: Sequence[int]) -> list[tuple[int, ...]]:
        return [(1, channels, rows // stride, columns // stride) for stride in strides]

    if channels > _BOX_CHANNELS and shapes == cells(_STRIDES):
        return task | {"strides": list(_STRIDES)}
    anchors = len(_ANCHORS[32])
    if (
        channels % anchors == 0
        and channels > anchors * _BOX_CHANNELS
        and sorted(shapes) == sorted(cells(list(_ANCHORS)))
    ):
        strides = [rows // shape[2] for shape in shapes]
        sizes = [[list(size) for size in _ANCHORS[stride]] for stride in strides]
        return task | {"decoder": "yolov4", "strides": strides, "anchors": sizes, "growth": _GROWTH}
    if channels > _BOX_CHANNELS_V8 and shapes == [(1, channels, sum(a * b for _, _, a, b in cells(_STRIDES)))]:
        return task | {"decoder": "yolov8", "strides": []}
    return None
