"""Shapes to offer for a model that leaves dimensions open: usual ones, the first with which its graph can compute.

They are examples in a hint only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import onnx

from farm.errors import FarmError
from farm.search.graph import folding

if TYPE_CHECKING:
    from farm.models.inputs import InputSpec

# Common image sizes of training; then what some graphs require: multiples of 32, of 8, any small size.
_USUAL = (224, 320, 640, 256, 384, 416, 512, 192, 160, 128, 112, 96, 64, 48, 32, 299, 28)
_SIZES = tuple(dict.fromkeys([*_USUAL, *range(32, 1025, 32), *range(8, 257, 8), *range(2, 65), 1]))
# Words, audio samples, frames, by the look of the input.
_WORDS = tuple(dict.fromkeys([128, 64, 32, 16, 256, 512, 384, 77, *range(2, 65), 1]))
_SAMPLES = tuple(dict.fromkeys([16_000, 512, 1024, 2048, 4096, 8000, 32_000, 48_000, *range(256, 4097, 256)]))
_FRAMES = tuple(dict.fromkeys([128, 100, 64, 32, 96, 16, 76, *range(2, 65), 1]))
_MOST_CHANNELS = 4
# Names of a first dimension that is no batch.
_LENGTHS = ("seq", "len", "time", "frame", "sample", "token", "node", "point")


def describe(inputs: Sequence[InputSpec], model: onnx.ModelProto | None) -> str:
    """Return the hint for inputs with open dimensions: example options, and that a batch of 1 is assumed."""
    shapes = suggest(inputs, model)
    still_open = [spec for spec in inputs if spec.is_dynamic]
    options = " ".join(f"--shape {spec.name}={','.join(map(str, shapes[spec.name]))}" for spec in still_open)
    assumed = any(isinstance(spec.shape[0], str) and shapes[spec.name][0] == 1 for spec in still_open)
    return f"Give the shape, for example: {options}" + (" (this assumes a batch of 1)" if assumed else "")


def suggest(inputs: Sequence[InputSpec], model: onnx.ModelProto | None) -> dict[str, tuple[int, ...]]:
    """Return a shape for each input: the first usual ones with which `model` can compute, as far as ONNX can tell."""
    choices = [dict(each) for each in dict.fromkeys(tuple(each.items()) for each in _list_candidates(inputs))]
    if model is None or len(choices) == 1:
        return choices[0]
    try:
        number = folding.find_fitting(model, choices)
    except FarmError:  # a hint must not raise another error
        number = None
    return choices[number or 0]


def is_batch(spec: InputSpec, at: int) -> bool:
    """Whether an open dimension is the batch, by its name and place."""
    name = str(spec.shape[at]).lower()
    return "batch" in name or (at == 0 and not any(word in name for word in _LENGTHS))


def _list_candidates(specs: Sequence[InputSpec]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield choices for all inputs together; equal names get equal numbers."""
    series = {
        (spec.name, at): (*_sizes_beside(spec, at, specs), *_sizes_of(spec, at))
        for spec in specs
        for at, size in enumerate(spec.shape)
        if isinstance(size, str)
    }
    for turn in range(max((len(sizes) for sizes in series.values()), default=1)):
        named: dict[str, int] = {}
        choice = {}
        for spec in specs:
            shape = []
            for at, size in enumerate(spec.shape):
                if isinstance(size, str):
                    sizes = series[spec.name, at]
                    wanted = sizes[min(turn, len(sizes) - 1)]
                    size = wanted if size == "?" else named.setdefault(size, wanted)
                shape.append(size)
            choice[spec.name] = tuple(shape)
        yield choice


def _sizes_of(spec: InputSpec, at: int) -> tuple[int, ...]:
    """Return the sizes to try for one open dimension, the most usual first."""
    rank = len(spec.shape)
    if is_batch(spec, at):
        return (1,)
    if rank >= 4:
        if at == _find_channels(spec):
            return (3,)
        return _FRAMES if rank == 5 and at == 2 else _SIZES
    if spec.dtype.startswith("float"):
        return _SAMPLES if rank < 3 or 1 in spec.shape[1:] else _FRAMES
    return _WORDS


def _sizes_beside(spec: InputSpec, at: int, specs: Sequence[InputSpec]) -> tuple[int, ...]:
    """Return the sizes of the same dimension in other inputs of equal rank."""
    beside = (each.shape[at] for each in specs if each is not spec and len(each.shape) == len(spec.shape))
    return tuple(size for size in beside if isinstance(size, int))


def _find_channels(spec: InputSpec) -> int:
    """Return the channel dimension of an image: second, unless only the last one is small."""
    last, second = spec.shape[-1], spec.shape[1]
    is_last = isinstance(last, int) and last <= _MOST_CHANNELS and not (isinstance(second, int) and second <= last)
    return len(spec.shape) - 1 if is_last else 1
