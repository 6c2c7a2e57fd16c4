"""Arrays on their way to a board and back: NumPy's own .npz, uncompressed. What comes back is not trusted."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from device_agent.protocol import ProtocolError

Arrays = dict[str, npt.NDArray[Any]]

_MAX_ARRAYS = 1024
_MAX_NAME = 1024
# Truth values, numbers, and the numbers that NumPy itself does not know: its files have no name for bfloat16.
_KINDS = frozenset("biufcV")


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """NumPy's own .npz, uncompressed; order is kept."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def unpack_arrays(data: bytes) -> Arrays:
    """Arrays in NumPy's .npz, uncompressed, as a board sends them. Raises ProtocolError on anything else.

    Nothing is believed that `data` is too short for: neither what an archive promises to become nor what a header says.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if len(members) > _MAX_ARRAYS:
                raise ProtocolError(f"{len(members)} arrays")
            return {_read_name(member): _read_array(archive, member, len(data)) for member in members}
    except ProtocolError:
        raise
    # What zipfile and NumPy's reader of headers (an `ast` of what stands there) raise over garbage.
    except (
        *(ValueError, OSError, EOFError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError),
        *(NotImplementedError, OverflowError, RuntimeError, struct.error, zipfile.BadZipFile),
    ) as error:
        raise ProtocolError(f"its arrays cannot be read: {error}") from error


def _read_name(member: zipfile.ZipInfo) -> str:
    name = member.filename.removesuffix(".npy")
    if len(name) > _MAX_NAME or name == member.filename:
        raise ProtocolError(f"an array called {name[:_MAX_NAME]!r}")
    return name


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> npt.NDArray[Any]:
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.file_size > most:
        raise ProtocolError(f"an array of {member.file_size} bytes, packed as {member.compress_type}")
    stream = io.BytesIO(archive.read(member))
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(
        np.lib.format.read_magic(stream)
    )
    if read_header is None:
        raise ProtocolError("an array in an unknown format")
    shape, is_fortran, dtype = read_header(stream)
    content = stream.read()
    if dtype.kind not in _KINDS or dtype.names or dtype.itemsize == 0 or min(shape, default=0) < 0:
        raise ProtocolError(f"an array of {dtype}")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ProtocolError(f"an array of shape {shape} in {len(content)} bytes")
    if dtype == np.dtype("V2"):
        dtype = np.dtype(ml_dtypes.bfloat16)
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C").copy()
