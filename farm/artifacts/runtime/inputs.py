"""The arrays that a model is given: read from files, and checked against what it takes."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class InputError(ValueError):
    """The input is not what the model takes; the message says what was expected and what was given."""


def describe(name: str, shape: Sequence[int], dtype: str) -> str:
    """One input or output in words."""
    return f"{name} ({', '.join(map(str, shape))}) {dtype}"


def check_inputs(expected: Sequence[Mapping[str, Any]], given: Mapping[str, Any] | Any) -> dict[str, Array]:
    """The arrays in the order in which the model takes them. Raises InputError.

    `expected` has a name, shape and dtype for each. An array alone stands for the only input.
    """
    if not isinstance(given, Mapping):
        if len(expected) != 1:
            raise InputError(f"the model takes {len(expected)} inputs: {_list(expected)}; one array without name given")
        given = {expected[0]["name"]: given}
    names = [each["name"] for each in expected]
    if set(names) != set(given):
        have = ", ".join(describe(n, np.shape(a), str(np.asarray(a).dtype)) for n, a in given.items()) or "none"
        raise InputError(f"the model takes the inputs {_list(expected)}; given: {have}")
    arrays = {}
    for each in expected:
        name, array = each["name"], np.asarray(given[each["name"]])
        shape, dtype = tuple(each["shape"]), each["dtype"]
        if array.shape != shape or str(array.dtype) != dtype:
            was = describe(name, array.shape, str(array.dtype))
            raise InputError(f"expected {describe(name, shape, dtype)}; given: {was}")
        # Not `ascontiguousarray`: it makes a vector of a scalar.
        arrays[name] = np.asarray(array, order="C")
    return arrays


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays in an .npz. Raises InputError; never unpickles."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, KeyError) as error:
        raise InputError(f"{path} is not an .npz of plain arrays: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _list(expected: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(describe(each["name"], each["shape"], each["dtype"]) for each in expected) or "none"
