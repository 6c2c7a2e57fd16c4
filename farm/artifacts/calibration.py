"""Read calibration data for quantisation: seeded inputs or the user's files."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from farm.artifacts.runtime.inputs import InputError, read_array, read_arrays
from farm.errors import UsageError
from farm.models.inputs import InputSpec, make_inputs

Arrays = Mapping[str, Any]

RANDOM = "random"
_SUFFIXES = (".npz", ".npy")


def read_calibration(text: str, inputs: Sequence[InputSpec], count: int) -> list[Arrays]:
    """Return calibration inputs: `count` seeded ones for `random`, else the .npz and .npy files of a folder.

    A .npz holds an array per input name, a .npy the only input. Raises UsageError for a file that does not fit.
    """
    if text == RANDOM:
        return [make_inputs(inputs, seed) for seed in range(count)]
    folder = pathlib.Path(text).expanduser()
    if not folder.is_dir():
        raise UsageError(f"--calibration {text!r} is no folder", f"Give a folder of .npz or .npy files, or {RANDOM!r}.")
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    if not files:
        raise UsageError(
            f"{folder} holds no .npz and no .npy file",
            f"np.savez(FILE, {', '.join(f'{spec.name}=...' for spec in inputs)}) writes one; one for each example.",
        )
    return [_read_example(path, inputs) for path in files]


def _read_example(path: pathlib.Path, inputs: Sequence[InputSpec]) -> Arrays:
    try:
        arrays = read_arrays(path) if path.suffix == ".npz" else {inputs[0].name: read_array(path)}
    except InputError as error:
        raise UsageError(str(error)) from error
    fed = {}
    for spec in inputs:
        if spec.name not in arrays:
            raise UsageError(f"{path} has no array for the input {spec}", f"It holds {', '.join(arrays) or 'nothing'}.")
        array = arrays[spec.name]
        if array.shape != spec.static_shape or array.dtype != np.dtype(spec.dtype):
            raise UsageError(f"{path}: {spec.name} is {array.shape} {array.dtype}; the model's input is {spec}")
        fed[spec.name] = array
    return fed
