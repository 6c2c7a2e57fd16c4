"""Fit inputs of any length in a model's range to a compiled size: choose it, pad the inputs, crop the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .inputs import Array, InputError, check_inputs


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The `given` inputs in the model's order, the `library` to run, its padded `inputs`, and how to crop its outputs.

    `axes` are the dimensions to crop to `length`, for each output.
    """

    library: str
    given: dict[str, Array]
    inputs: dict[str, Array]
    length: int = 0
    axes: Sequence[Sequence[int]] = ()

    def crop(self, outputs: Sequence[Array]) -> list[Array]:
        """Return the outputs without the padded positions."""
        axes = (*self.axes, *[()] * len(outputs))
        return [
            array[tuple(slice(self.length if at in own else None) for at in range(array.ndim))] if own else array
            for array, own in zip(outputs, axes, strict=False)
        ]


def fit(manifest: Mapping[str, Any], given: Mapping[str, Any] | Any) -> Fitted:
    """Check the inputs and pad them with zeros to the smallest compiled size that holds them. Raises InputError."""
    expected, lengths = manifest["inputs"], manifest.get("lengths")
    if not lengths:
        arrays = check_inputs(expected, given)
        return Fitted("model.so", arrays, arrays)
    length, axes = _find_length(lengths, expected, given), lengths["inputs"]
    arrays = check_inputs([each | {"shape": [length if at in axes.get(each["name"], ()) else size
                                             for at, size in enumerate(each["shape"])]}
                           for each in expected], given)  # fmt: skip
    chosen = next(each for each in lengths["sizes"] if each["size"] >= length)
    cropped = [lengths["outputs"].get(each["name"], ()) for each in manifest["outputs"]]
    return Fitted(chosen["library"], arrays, pad(arrays, axes, chosen["size"] - length), length, cropped)


def pad(arrays: Mapping[str, Array], axes: Mapping[str, Sequence[int]], missing: int) -> dict[str, Array]:
    """Append zeros to the inputs along their `axes`."""
    return {
        name: np.pad(array, [(0, missing if at in axes.get(name, ()) else 0) for at in range(array.ndim)])
        for name, array in arrays.items()
    }


def _find_length(lengths: Mapping[str, Any], expected: Sequence[Mapping[str, Any]], given: Any) -> int:
    """Return the length of the first input that should have it; the greatest one where it has too few dimensions."""
    least, most = lengths["least"], lengths["sizes"][-1]["size"]
    name, (axis, *_) = next(iter(lengths["inputs"].items()))
    arrays = given if isinstance(given, Mapping) else {expected[0]["name"]: given}
    shape = np.shape(arrays.get(name, ()))
    length = shape[axis] if len(shape) > axis else most
    if not least <= length <= most:
        raise InputError(f"{name} has {length} {lengths['name']}; the model takes from {least} to {most}")
    return int(length)
