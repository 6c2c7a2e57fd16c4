"""TVM's RPC spoken by asyncio: call a server's functions with text and bytes; answers are text, bytes or a number.

Nothing in this process can be called by a board: `frames` says what may come, and only answers are read. Formats are
those of rpc_endpoint.cc and rpc_reference.h of 0.27, little-endian. `farm.measure.session` has the deadlines.
"""

from __future__ import annotations

import math
import struct

import anyio
from anyio.abc import SocketStream

from device_agent.protocol import RPC_MAGIC, RPC_SUCCESS
from farm.connectivity.frames import FrameFilter, RefusedError

_INIT_SERVER, _CALL, _EXCEPTION, _COPY_ACK, _GET_FUNCTION = 2, 3, 5, 8, 9
# TVM's type indices.
_NONE, _INT, _BOOL, _FLOAT, _POINTER, _TEXT, _BYTES = 0, 1, 2, 3, 4, 8, 9
# `kRPCProtocolVersion` of rpc_reference.h.
_VERSION = b"0.8.0"
_FRAME = struct.Struct("<Qi")
# Read and sent at once. An upload's deadline is checked between pieces.
_CHUNK = 1 << 18

# What anyio raises where a connection is over.
ENDED = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError)


class Unread:
    """An answer of another kind: a stock server's tensor, an object, or copied bytes."""


Value = str | bytes | int | float | Unread | None


def explain_end(error: Exception) -> str:
    """Say why a connection is over, also for errors without a text."""
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else "it closed the connection")


class RemoteError(Exception):
    """A function of the server's raised, or there is none of that name; with the server's text."""


class HungUpError(EOFError):
    """The server cannot be reached, or the connection is over."""


class UploadStalledError(Exception):
    """The server did not take a call's arguments within their time."""


class Wire:
    """One session with one server, one call at a time. All errors but RemoteError, and cancelling, end it: close it.

    `sent_bytes` counts what the kernel has taken.
    """

    def __init__(self, stream: SocketStream) -> None:
        self.sent_bytes = 0
        self._stream = stream
        self._check = FrameFilter()
        self._received = bytearray()
        self._handles: dict[str, bytes] = {}

    @classmethod
    async def connect(cls, host: str, port: int, match_key: str) -> Wire:
        """Connect with a tracker's match key, or with the server's own. Raises HungUpError, RefusedError."""
        try:
            wire = cls(await anyio.connect_tcp(host, port))
        except OSError as error:
            raise HungUpError(f"{host}:{port} cannot be reached: {error}") from error
        try:
            await wire._greet(f"client:{match_key}".encode())
        except BaseException:
            await wire.aclose()
            raise
        return wire

    async def call(self, function: str, *arguments: str | bytes, upload_s: float = math.inf) -> Value:
        """Call a global function of the server's. The server must take the arguments within `upload_s`.

        Raises RemoteError, HungUpError, RefusedError, UploadStalledError.
        """
        if self._received:
            raise RefusedError("an answer without a call")
        with anyio.move_on_after(upload_s) as upload:
            if function not in self._handles:
                await self._send(_GET_FUNCTION, _pack(function))
                handle = await self._receive()
                if not isinstance(handle, int) or not handle:
                    raise RemoteError(f"it has no function {function}")
                self._handles[function] = struct.pack("<q", handle)
            await self._send(_CALL, self._handles[function], _pack(*arguments))
        if upload.cancelled_caught:
            size = sum(len(each) for each in arguments if isinstance(each, bytes))
            raise UploadStalledError(f"did not take the upload of {size} bytes within {upload_s:.1f} s")
        return await self._receive()

    async def aclose(self) -> None:
        """Close at once, without a farewell: a board may not read. The server ends the session. Safe to call twice."""
        await self._stream.aclose()

    async def _greet(self, key: bytes) -> None:
        await self._write(struct.pack("<ii", RPC_MAGIC, len(key)) + key)
        (code,) = struct.unpack("<i", await self._read(4))
        if code != RPC_SUCCESS:
            raise HungUpError("the server refused our key")
        await self._read(*struct.unpack("<i", await self._read(4)))  # the server's key
        await self._send(_INIT_SERVER, struct.pack("<Q", len(_VERSION)), _VERSION, _pack())
        await self._receive()

    async def _send(self, code: int, *body: bytes) -> None:
        await self._write(_FRAME.pack(4 + sum(map(len, body)), code), *body)

    async def _write(self, *parts: bytes) -> None:
        """Send parts, large ones in pieces and uncopied."""
        try:
            for part in [b"".join(parts)] if sum(map(len, parts)) <= _CHUNK else parts:
                view = memoryview(part)
                for at in range(0, len(view), _CHUNK):
                    await self._stream.send(view[at : at + _CHUNK])  # type: ignore[arg-type]  # any buffer will do
                    self.sent_bytes += len(view[at : at + _CHUNK])
        except ENDED as error:
            raise HungUpError(explain_end(error)) from error

    async def _read(self, size: int) -> bytes:
        """Read `size` bytes, all of which `frames` has accepted."""
        while len(self._received) < size:
            try:
                self._received += self._check(await self._stream.receive(_CHUNK))
            except (*ENDED, EOFError) as error:
                raise HungUpError(explain_end(error)) from error
        with memoryview(self._received) as view:
            data = bytes(view[:size])
        del self._received[:size]
        return data

    async def _receive(self) -> Value:
        """Read one answer, which `frames` has checked: `int32 count`, then each value behind its type."""
        size, code = _FRAME.unpack(await self._read(_FRAME.size))
        body = await self._read(size - 4)
        if code == _COPY_ACK:
            return Unread()
        if code == _EXCEPTION:
            raise RemoteError(str(_unpack(body, 4)))
        (count,) = struct.unpack_from("<i", body)
        return _unpack(body, 4 if count == 1 else 16)  # a function's answer follows its type, a number


def _pack(*values: str | bytes) -> bytes:
    parts = [struct.pack("<i", len(values))]
    for value in values:
        kind, data = (_TEXT, value.encode()) if isinstance(value, str) else (_BYTES, value)
        parts += struct.pack("<iQ", kind, len(data)), data
    return b"".join(parts)


def _unpack(body: bytes, at: int) -> Value:
    (kind,) = struct.unpack_from("<i", body, at)
    at += 4
    if kind == _NONE:
        return None
    if kind in (_INT, _BOOL, _POINTER):
        return int(struct.unpack_from("<q", body, at)[0])
    if kind == _FLOAT:
        return float(struct.unpack_from("<d", body, at)[0])
    if kind not in (_TEXT, _BYTES):
        return Unread()
    data = body[at + 8 :]  # the last value
    return data if kind == _BYTES else data.decode(errors="replace")
