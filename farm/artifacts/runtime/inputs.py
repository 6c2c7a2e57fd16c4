"""Read the arrays of a model's inputs, check them against what it takes, and fit any length to a compiled size."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Limit of a file and its unpacked content: the limit of one message.
_MOST_BYTES = 1 << 31
# NumPy accepts headers of 10,000 characters.
_MOST_HEADER = 1 << 14


class InputError(ValueError):
    """The input does not fit the model; the message says what was expected and what was given."""


def describe(name: str, shape: Sequence[int], dtype: str) -> str:
    """Describe an input or output."""
    return f"{name} ({', '.join(map(str, shape))}) {dtype}"


def check_inputs(expected: Sequence[Mapping[str, Any]], given: Mapping[str, Any] | Any) -> dict[str, Array]:
    """Return the arrays in the model's order. Raises InputError.

    `expected` has a name, shape and dtype for each. A bare array stands for the only input.
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
        # Not `ascontiguousarray`, which turns a scalar into a vector.
        arrays[name] = np.asarray(array, order="C")
    return arrays


@contextlib.contextmanager
def reading(path: Path, what: str, most_bytes: int = _MOST_BYTES) -> Iterator[BinaryIO]:
    """Open a user's file for the block that decodes it; turn every error into an InputError.

    `what` names what it should be. Only a regular file of at most `most_bytes` is opened.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a regular file")
        with path.open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most_bytes:
                raise InputError(f"{path} has {size:,} bytes; {what} may have {most_bytes:,}")
            yield file
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except PermissionError as error:
        raise InputError(f"{path} cannot be read: permission denied") from error
    except MemoryError as error:
        raise InputError(f"{path} is not {what}: it claims more than fits into the memory") from error
    # Decoders (zipfile, zlib, NumPy, Pillow) raise errors of any type for damaged files.
    except Exception as error:
        raise InputError(f"{path} is not {what}: {error or type(error).__name__}") from error


def read_arrays(path: Path) -> dict[str, Array]:
    """Read the arrays of an .npz. Raises InputError; never unpickles."""
    with reading(path, "an .npz of plain arrays") as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if (size := sum(each.file_size for each in members)) > _MOST_BYTES:
            raise ValueError(f"it unpacks to {size:,} bytes, more than {_MOST_BYTES:,}")
        arrays = {}
        for each in members:
            name = each.filename.removesuffix(".npy")
            if name == each.filename or name in arrays:
                raise ValueError(f"{name!r} is no array, or there twice")
            with archive.open(each) as member:
                arrays[name] = _read_array(member, each.file_size)
        return arrays


def read_array(path: Path) -> Array:
    """Read the array of an .npy. Raises InputError; never unpickles."""
    with reading(path, "an .npy of a plain array") as file:
        return _read_array(file, os.fstat(file.fileno()).st_size)


def _read_array(file: IO[bytes], size: int) -> Array:
    """Read an array from a file of `size` bytes, checking its header first, since NumPy allocates accordingly."""
    start = file.read(min(size, _MOST_HEADER))
    stream = io.BytesIO(start)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    wanted = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or wanted != size - stream.tell():
        raise ValueError(f"an array of shape {shape} has {wanted} bytes, not {size - stream.tell()}")
    data = bytearray(start[stream.tell() :])
    data += file.read()
    return np.ndarray(shape, dtype, buffer=data, order="F" if is_fortran else "C")


def write_arrays(file: IO[bytes], arrays: Mapping[str, Array]) -> None:
    """Write an .npz; `numpy.savez` reserves names such as `file`."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _list(expected: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(describe(each["name"], each["shape"], each["dtype"]) for each in expected) or "none"


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
