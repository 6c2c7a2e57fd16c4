"""Arrays to and from a board: NumPy's own .npz, uncompressed. Those from a board are not trusted."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from device_agent.protocol import ProtocolError, TensorSpec
from farm.errors import InternalError

Arrays = dict[str, npt.NDArray[Any]]

_MAX_ARRAYS = 1024
_MAX_NAME = 1024
# NumPy's reader of headers takes 10,000 characters; its own are some hundred, depending on names and axes.
_MAX_HEADER = 1 << 14
# Booleans, numbers, and types unknown to NumPy: its files have no name for bfloat16.
_KINDS = frozenset("biufcV")
# APPNOTE.TXT of PKWARE, 4.3.7 and 4.3.16: the header of a member, and the end of an archive.
_MEMBER, _MEMBER_SIGNATURE = struct.Struct("<4s5H3I2H"), b"PK\x03\x04"
_END, _END_SIGNATURE = struct.Struct("<4s4H2IH"), b"PK\x05\x06"
# 4.5.3: sizes that do not fit are in an extra field, where NumPy always puts them.
_LONG, _IS_LONG, _LONG_ID = struct.Struct("<HHQQ"), 0xFFFFFFFF, 1
_IS_UTF8 = 0x800

Arguments = Sequence[tuple[Sequence[int], str]]


class HarmfulArraysError(ProtocolError):
    """An archive that expands beyond its size: no agent makes one by mistake."""


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Pack arrays as NumPy's .npz, uncompressed and in order."""
    buffer = io.BytesIO()
    # Not `numpy.savez`, which takes names such as `file` for its own arguments.
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    return buffer.getvalue()


def unpack_arrays(data: bytes) -> Arrays:
    """Read arrays in NumPy's .npz, uncompressed, from a board. Raises ProtocolError on anything else.

    Members are read in sequence. An archive's index could name the same bytes any number of times, so it is only
    counted: together the arrays are never longer than `data`.
    """
    view = memoryview(data)
    arrays: Arrays = {}
    at = 0
    try:
        while view[at : at + 4] == _MEMBER_SIGNATURE:
            if len(arrays) == _MAX_ARRAYS:
                raise HarmfulArraysError(f"more than {_MAX_ARRAYS} arrays")
            name, content, at = _read_member(view, at)
            if name in arrays:
                raise HarmfulArraysError(f"two arrays called {name!r}")
            arrays[name] = _read_array(content)
        _check_end(view[at:], len(arrays))
    except ProtocolError:
        raise
    # What NumPy's reader of headers (an `ast` of the text) raises over garbage.
    except (
        *(ValueError, OSError, EOFError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError),
        *(OverflowError, struct.error),
    ) as error:
        raise ProtocolError(f"its arrays cannot be read: {error}") from error
    return arrays


def _read_member(view: memoryview, at: int) -> tuple[str, memoryview, int]:
    """Return name and content of the member at `at`, and the next offset."""
    _, _, flags, method, _, _, checksum, packed, size, name_size, extra_size = _MEMBER.unpack_from(view, at)
    if method != zipfile.ZIP_STORED or flags & ~_IS_UTF8:
        raise HarmfulArraysError(f"an array with compression {method} and flags {flags:#x}")
    at += _MEMBER.size
    name = bytes(view[at : at + name_size]).decode()
    at += name_size
    if size == packed == _IS_LONG:
        kind, length, size, packed = _LONG.unpack_from(view[at : at + extra_size])
        if (kind, length) != (_LONG_ID, _LONG.size - 4):
            raise ProtocolError(f"an array called {name[:_MAX_NAME]!r} of unknown size")
    at += extra_size
    if size != packed or size > len(view) - at:
        raise ProtocolError(f"an array of {size} bytes where {max(0, len(view) - at)} are left")
    if len(name) > _MAX_NAME or not name.endswith(".npy"):
        raise ProtocolError(f"an array called {name[:_MAX_NAME]!r}")
    content = view[at : at + size]
    if zlib.crc32(content) != checksum:
        raise ProtocolError(f"an array called {name!r} with a wrong checksum")
    return name.removesuffix(".npy"), content, at + size


def _check_end(rest: memoryview, count: int) -> None:
    """Check that an index of exactly the members follows."""
    if len(rest) < _END.size:
        raise ProtocolError("its arrays cannot be read: they are cut short")
    signature, _, _, _, named, _, _, comment_size = _END.unpack(rest[-_END.size :])
    if signature != _END_SIGNATURE or comment_size:
        raise ProtocolError("its arrays cannot be read: they have no end")
    if named != count:
        raise HarmfulArraysError(f"an archive that names {named} arrays and holds {count}")


def _read_array(content: memoryview) -> npt.NDArray[Any]:
    stream = io.BytesIO(content[:_MAX_HEADER])
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(
        np.lib.format.read_magic(stream)
    )
    if read_header is None:
        raise ProtocolError("an array in an unknown format")
    shape, is_fortran, dtype = read_header(stream)
    values = content[stream.tell() :]
    if dtype.kind not in _KINDS or dtype.names or dtype.itemsize == 0 or min(shape, default=0) < 0:
        raise ProtocolError(f"an array of {dtype}")
    if math.prod(shape) * dtype.itemsize != len(values):
        raise ProtocolError(f"an array of shape {shape} in {len(values)} bytes")
    if dtype == np.dtype("V2"):
        dtype = np.dtype(ml_dtypes.bfloat16)
    return np.frombuffer(values, dtype).reshape(shape, order="F" if is_fortran else "C").copy()


def make_inputs(arguments: Arguments, seed: int) -> Arrays:
    """Make values for all arguments of a function, the output's included; deterministic in the seed.

    Integers may be indices: they stay below the sizes that they may index.
    """
    random = np.random.default_rng(seed)
    arrays: Arrays = {}
    kinds = [np.dtype(dtype) for _, dtype in arguments]
    # bfloat16 is of kind V.
    floats = [shape for (shape, _), dtype in zip(arguments, kinds, strict=True) if dtype.kind in "fV"]
    sizes = [size for shape in floats for size in shape if size > 1]
    bound = min([10, *sizes])
    for index, ((shape, _), dtype) in enumerate(zip(arguments, kinds, strict=True)):
        values = random.integers(0, bound, shape) if dtype.kind in "iub" else random.standard_normal(shape)
        arrays[f"arg_{index:03d}"] = values.astype(dtype)
    return arrays


def read_arguments(trace_json: str) -> tuple[TensorSpec, ...]:
    """Read the arguments of a timed candidate from its trace: packed weights have their packed shape.

    The form is MetaSchedule's (`TensorInfo.as_json`: kind, dtype, shape). Raises InternalError.
    """
    try:
        _, _, _, arguments = json.loads(trace_json)
        return tuple(TensorSpec(tuple(map(int, shape)), str(dtype)) for _, dtype, shape in arguments)
    except (ValueError, TypeError) as error:
        raise InternalError(f"a trace's arguments cannot be read: {error}") from error
