"""What a board may say to a TVM client: the server's greeting, then answers, and nothing else.

TVM's RPC is symmetric. A client that waits for an answer serves whatever comes instead: a peer may have it call any
function, and so run code. And it believes what an answer is made of: pointers in it are followed, lengths are taken as
they are. So every frame is read here as TVM would read it (rpc_endpoint.cc and rpc_reference.h of 0.27), and what TVM's
own servers do not send ends the connection. What an answer says is checked in `farm.measure.answers`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeVar

from device_agent.protocol import RPC_MAGIC, RPC_SUCCESS

# The outputs of a model are the biggest answers; TVM's client holds a frame in memory before it looks at it.
MAX_FRAME_BYTES = 256 << 20
# A server's key is its board's key; an agent answers a fence with a report in its place (`fences.py`).
_MAX_KEY_BYTES = 1 << 16
_SERVER = b"server:"
# TVM takes the number of axes for the size of a table before it has seen them.
_MAX_AXES = 64
# From here on a device type says which session it belongs to (`kRPCSessMask` of TVM's device_api.h).
_MAX_DEVICE_TYPE = 128

_SHUTDOWN, _RETURN, _EXCEPTION, _COPY_ACK = 1, 4, 5, 8
# TVM's type indices. Those with a fixed size, then those with a length before the content.
_INT, _POINTER, _TENSOR, _TEXT, _BYTES = 1, 4, 7, 8, 9
_NONE = 0
_SIZES = {_NONE: 0, _INT: 8, 2: 8, 3: 8, _POINTER: 8, 5: 8, 6: 8}
# Strings and bytes as objects: small ones have an index of their own. The index is said twice.
_OBJECTS = {11, 12, 65, 66}
_SPOKEN_AGAIN = {65, 66}

# What the reading below asks for: so many bytes (positive), or to let so many pass unread (negative).
_Steps = Iterator[int]
Data = TypeVar("Data", bytes, memoryview)


class RefusedError(ValueError):
    """A board sent what no server of TVM's sends a client."""


class FrameFilter:
    """Reads along what one connection brings from a board. Not thread-safe.

    Every frame is understood before its last byte is passed on, and TVM's client looks at none before it is whole.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._field = b""
        self._held = bytearray()
        self._left = 0
        self._steps = self._read_all()
        self._wanted = next(self._steps)

    def __call__(self, data: Data) -> Data:
        """The same bytes, to be passed on. Raises RefusedError, and EOFError where the board says goodbye."""
        at, size = 0, len(data)
        while at < size:
            if self._wanted < 0:  # let pass
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
        # What was turned away or answered a fence has said all; with another key TVM would read on in its own way.
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
        """One value answers a call of TVM's own; a function's has its type before it, a tensor its handle behind."""
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
            # A function or a module would be a pointer of the board's choice, which the client follows.
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
