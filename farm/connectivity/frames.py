"""A filter on what a board sends to a TVM client: the server's greeting, then answers, and nothing else.

TVM's RPC is symmetric: a waiting client serves requests, so a peer could call any function and run code. It also
trusts an answer's pointers and lengths. So every frame is parsed here as TVM would (rpc_endpoint.cc and
rpc_reference.h of 0.27), and what TVM's own servers do not send ends the connection. `farm.measure.answers` checks the
content of answers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeVar

from device_agent.protocol import RPC_MAGIC, RPC_SUCCESS

# A model's outputs are the largest answers; TVM's client holds a frame in memory before it parses it.
MAX_FRAME_BYTES = 256 << 20
# A server's key is its board's key; an agent answers a fence with a report instead.
_MAX_KEY_BYTES = 1 << 16
_SERVER = b"server:"
# TVM allocates by the number of axes before it has seen them.
_MAX_AXES = 64
# Larger device types encode a session (`kRPCSessMask` of TVM's device_api.h).
_MAX_DEVICE_TYPE = 128

_SHUTDOWN, _RETURN, _EXCEPTION, _COPY_ACK = 1, 4, 5, 8
# TVM's type indices: those of fixed size, then those with a length prefix.
_INT, _POINTER, _TENSOR, _TEXT, _BYTES = 1, 4, 7, 8, 9
_NONE = 0
_SIZES = {_NONE: 0, _INT: 8, 2: 8, 3: 8, _POINTER: 8, 5: 8, 6: 8}
# Strings and bytes as objects; small ones have their own index. The index appears twice.
_OBJECTS = {11, 12, 65, 66}
_SPOKEN_AGAIN = {65, 66}

# The parser's requests: a number of bytes to read (positive) or to skip (negative).
_Steps = Iterator[int]
Data = TypeVar("Data", bytes, memoryview)


class RefusedError(ValueError):
    """A board sent what no TVM server sends a client."""


class FrameFilter:
    """Parses one connection's bytes from a board. Not thread-safe.

    A frame is parsed before its last byte is forwarded, and TVM's client parses only whole frames.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._field = b""
        self._held = bytearray()
        self._left = 0
        self._steps = self._read_all()
        self._wanted = next(self._steps)

    def __call__(self, data: Data) -> Data:
        """Return the same bytes, to be forwarded. Raises RefusedError, and EOFError at the board's goodbye."""
        at, size = 0, len(data)
        while at < size:
            if self._wanted < 0:  # skip
                count = min(size - at, -self._wanted)
                at += count
                self._wanted += count
                if self._wanted == 0:
                    self._wanted = next(self._steps)
                continue
            count = min(size - at, self._wanted - len(self._held))
            self._held += data[at : at + count]
            at += count
            if len(self._held) == self._wanted:
                self._field = bytes(self._held)
                self._held.clear()
                self._wanted = next(self._steps)
        return data

    def _read_all(self) -> _Steps:
        yield 4
        code = self._int32()
        if code not in (RPC_SUCCESS, RPC_MAGIC + 1, RPC_MAGIC + 2):
            raise RefusedError(f"a greeting of {code:#x} is not TVM's")
        if code == RPC_SUCCESS:
            yield 4
            size = self._int32()
            if not 0 <= size <= _MAX_KEY_BYTES:
                raise RefusedError(f"a key of {size} bytes")
            if size:
                yield size
            if size and self._field.startswith(_SERVER):
                while True:
                    yield from self._read_frame()
        # A refused client or a fence ends here; with another key TVM would misread what follows.
        yield 1
        raise RefusedError("words after the end of a greeting")

    def _read_frame(self) -> _Steps:
        yield 12
        size, code = struct.unpack("<Qi", self._field)
        if code == _SHUTDOWN:
            raise EOFError("the board says goodbye")
        if code not in (_RETURN, _EXCEPTION, _COPY_ACK):
            raise RefusedError(f"a frame with the code {code}, which is no answer")
        if not 4 <= size <= self._max_frame_bytes:
            raise RefusedError(f"a frame of {size} bytes")
        self._left = size - 4
        if code == _COPY_ACK:
            yield from self._skip(self._left)
            return
        yield from self._take(4)
        count = self._int32()
        if code == _EXCEPTION:
            if count != 1:
                raise RefusedError(f"an exception of {count} values")
            yield from self._read_kind(_TEXT)
            yield from self._read_content()
        else:
            yield from self._read_return(count)
        if self._left:
            raise RefusedError(f"an answer with {self._left} bytes to spare")

    def _read_return(self, count: int) -> _Steps:
        """One value answers TVM's own calls; a function's follows its type, a tensor precedes its handle."""
        if count == 1:
            yield from self._read_value(objects=True)
        elif count == 2:
            yield from self._read_kind(_INT)
            yield from self._take(8)
            yield from self._read_value(objects=False)
        elif count == 3:
            yield from self._read_kind(_INT)
            yield from self._take(8)
            yield from self._read_tensor()
            yield from self._read_kind(_POINTER)
            yield from self._take(8)
        else:
            raise RefusedError(f"a return of {count} values")

    def _read_value(self, objects: bool) -> _Steps:
        yield from self._take(4)
        kind = self._int32()
        if kind in _SIZES:
            yield from self._skip(_SIZES[kind])
        elif kind in (_TEXT, _BYTES):
            yield from self._read_content()
        elif objects and kind in _OBJECTS:
            yield from self._take(4)
            if self._int32() not in _SPOKEN_AGAIN:
                raise RefusedError("an object that is neither text nor bytes")
            yield from self._read_content()
        else:
            # A function or a module would be an arbitrary pointer, which the client follows.
            raise RefusedError(f"a value of TVM's type {kind}")

    def _read_kind(self, wanted: int) -> _Steps:
        yield from self._take(4)
        if self._int32() != wanted:
            raise RefusedError(f"a value of TVM's type {self._int32()} where {wanted} belongs")

    def _read_content(self) -> _Steps:
        yield from self._take(8)
        (size,) = struct.unpack("<Q", self._field)
        yield from self._skip(size)

    def _read_tensor(self) -> _Steps:
        yield from self._read_kind(_TENSOR)
        yield from self._take(24)  # address, device, axes, element
        _, device, _, axes, _, bits, lanes = struct.unpack("<QiiiBBH", self._field)
        if not (0 <= device < _MAX_DEVICE_TYPE and 0 <= axes <= _MAX_AXES and bits and lanes):
            raise RefusedError(f"a tensor of {axes} axes on a device of type {device}")
        yield from self._take(8 * axes + 8)  # shape, offset
        if min(struct.unpack_from(f"<{axes}q", self._field), default=0) < 0:
            raise RefusedError("a tensor of negative size")

    def _take(self, size: int) -> _Steps:
        self._count(size)
        yield size

    def _skip(self, size: int) -> _Steps:
        self._count(size)
        if size:
            yield -size

    def _count(self, size: int) -> None:
        if size > self._left:
            raise RefusedError(f"an answer that promises {size} bytes where {self._left} are left")
        self._left -= size

    def _int32(self) -> int:
        return int(struct.unpack("<i", self._field)[0])
