"""Fit inputs of any length in a model's range to a compiled size: choose it, pad the inputs, crop the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .inputs import Array, InputError, check_inputs

_LIBRARY = "model.so"


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The `library` to run, its `inputs` in the model's order, and how to crop what it returns."""

    library: str
    inputs: dict[str, Array]
    length: int = 0
    axes: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)

    def crop(self, outputs: Sequence[Array]) -> list[Array]:
        """Return the outputs without the padded positions."""
        return [_crop(array, self.axes.get(number, ()), self.length) for number, array in enumerate(outputs)]


def check(manifest: Mapping[str, Any], given: Mapping[str, Any] | Any) -> dict[str, Array]:
    """Return the arrays in the model's order, of any length that it takes. Raises InputError."""
    lengths, expected = manifest.get("lengths"), manifest["inputs"]
    if not lengths:
        return check_inputs(expected, given)
    length, axes = _find_length(lengths, expected, given), lengths["inputs"]
    return check_inputs([each | {"shape": _resize(each["shape"], axes.get(each["name"], ()), length)}
                         for each in expected], given)  # fmt: skip


def fit(manifest: Mapping[str, Any], given: Mapping[str, Any] | Any) -> Fitted:
    """Check the inputs and pad them with zeros to the smallest compiled size that holds them. Raises InputError."""
    arrays = check(manifest, given)
    lengths = manifest.get("lengths")
    if not lengths:
        return Fitted(_LIBRARY, arrays)
    length, axes = _find_length(lengths, manifest["inputs"], arrays), lengths["inputs"]
    chosen = next(each for each in lengths["sizes"] if each["size"] >= length)
    padded = pad(arrays, axes, chosen["size"] - length)
    cropped = {number: lengths["outputs"].get(each["name"], ()) for number, each in enumerate(manifest["outputs"])}
    return Fitted(chosen["library"], padded, length, cropped)


def pad(arrays: Mapping[str, Array], axes: Mapping[str, Sequence[int]], missing: int) -> dict[str, Array]:
    """Append zeros to the inputs along their `axes`."""
    return {
        name: np.pad(array, [(0, missing if at in axes.get(name, ()) else 0) for at in range(array.ndim)])
        for name, array in arrays.items()
    }


def _find_length(lengths: Mapping[str, Any], expected: Sequence[Mapping[str, Any]], given: Any) -> int:
    """Return the length of the first input that has it; the greatest one where none of those is given."""
    least, most = lengths["least"], lengths["sizes"][-1]["size"]
    arrays = given if isinstance(given, Mapping) else {expected[0]["name"]: given}
    for name, axes in lengths["inputs"].items():
        shape = np.shape(arrays[name]) if name in arrays else ()
        if len(shape) > axes[0]:
            if not least <= shape[axes[0]] <= most:
                raise InputError(
                    f"{name} has {shape[axes[0]]} {lengths['name']}; the model takes from {least} to {most}"
                )
            return int(shape[axes[0]])
    return int(most)


def _resize(shape: Sequence[int], axes: Sequence[int], length: int) -> list[int]:
    return [length if at in axes else size for at, size in enumerate(shape)]


def _crop(array: Array, axes: Sequence[int], length: int) -> Array:
    if not axes:
        return array
    return np.ascontiguousarray(array[tuple(slice(length if at in axes else None) for at in range(array.ndim))])
