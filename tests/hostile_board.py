"""A hostile board: speaks TVM's RPC by hand and sends the answers that a test chooses."""

from __future__ import annotations

import contextlib
import functools
import io
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from types import TracebackType

import numpy as np

from device_agent.protocol import (
    CLAIM,
    DESCRIBE,
    FENCE_PREFIX,
    PROTOCOL_VERSION,
    RPC_MAGIC,
    ClaimReport,
    ClaimStatus,
    Description,
)

SHUTDOWN, INIT_SERVER, CALL, RETURN, EXCEPTION, COPY_FROM, COPY_TO, COPY_ACK, GET_FUNCTION = range(1, 10)
NONE, INT, BOOL, FLOAT, POINTER, DATA_TYPE, DEVICE, TENSOR, TEXT, BYTES = range(10)
STR, FUNCTION, MODULE = 65, 68, 73
VERSION = b"0.8.0"
GREETING = struct.pack("<ii", RPC_MAGIC, 14) + b"server:nano/n1"
DESCRIPTION = Description(
    name="n1",
    board_type="jetson-nano",
    agent_version="0",
    protocol_version=PROTOCOL_VERSION,
    simulated=False,
    architecture="aarch64",
    cpu_model="",
    cores_online=(0,),
    cpu_freq_range_hz={},
    memory_bytes=1,
    engines=("kernel",),
    engine_versions={},
    rails=(),
    thermal_zones=(),
)


def frame(code: int, body: bytes = b"") -> bytes:
    return struct.pack("<Qi", 4 + len(body), code) + body


def sequence(*values: bytes) -> bytes:
    return struct.pack("<i", len(values)) + b"".join(values)


def none() -> bytes:
    return struct.pack("<i", NONE)


def number(value: int, kind: int = INT) -> bytes:
    """What takes eight bytes: numbers, pointers, and handles that must never come from a board."""
    return struct.pack("<iq", kind, value)


def text(value: str | bytes, kind: int = TEXT) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<iQ", kind, len(data)) + data


def tensor(*shape: int, device: int = 1, ndim: int | None = None) -> bytes:
    """The head of a tensor that stays on the board: float32, data at an address of the board's."""
    head = struct.pack("<iQiii", TENSOR, 0x1000, device, 0, len(shape) if ndim is None else ndim)
    return head + struct.pack("<BBH", 2, 32, 1) + struct.pack(f"<{len(shape)}qQ", *shape, 0)


def answer(value: str | bytes) -> bytes:
    """What a function of the agent's returns: text, or bytes."""
    kind, declared = (TEXT, STR) if isinstance(value, str) else (BYTES, STR + 1)
    return frame(RETURN, sequence(number(declared), text(value, kind)))


def void() -> bytes:
    return frame(RETURN, sequence(none()))


def nested_npz(count: int, size: int) -> bytes:
    """An archive of `count` arrays, each of which holds all that come after it: `size` bytes that become many more."""
    inner = bytes(size)
    index: list[tuple[bytes, int, int, int]] = []  # name, checksum, size, distance from the end
    for at in reversed(range(count)):
        array = io.BytesIO()
        np.save(array, np.frombuffer(inner, "uint8"))
        name, content = b"out_%03d.npy" % at, array.getvalue()
        inner = _member(name, zlib.crc32(content), len(content)) + content
        index.append((name, zlib.crc32(content), len(content), len(inner)))
    entries = [(name, checksum, size, len(inner) - back) for name, checksum, size, back in reversed(index)]
    return inner + _index(entries, len(inner))


def repeated_npz(count: int, size: int) -> bytes:
    array = io.BytesIO()
    np.save(array, np.zeros(size, "uint8"))
    name, content = b"out_000.npy", array.getvalue()
    entry = (name, zlib.crc32(content), len(content), 0)
    body = _member(*entry[:3]) + content
    return body + _index([entry] * count, len(body))


def _member(name: bytes, checksum: int, size: int) -> bytes:
    return struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 33, checksum, size, size, len(name), 0) + name


def _index(entries: list[tuple[bytes, int, int, int]], at: int) -> bytes:
    index = b"".join(
        struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 33, checksum, size, size, len(name), 0, 0, 0, 0, 0, offset
        )
        + name
        for name, checksum, size, offset in entries
    )
    return index + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(entries), len(entries), len(index), at, 0)


class Peer:
    """The board's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        magic, size = struct.unpack("<ii", self.read(8))
        assert magic == RPC_MAGIC
        self.key = self.read(size).decode()

    def greet(self, key: bytes = b"server:hostile", code: int = RPC_MAGIC) -> None:
        """The server's half of the handshake."""
        self.sock.sendall(struct.pack("<ii", code, len(key)) + key)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.sock.recv(size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def read_frame(self) -> tuple[int, bytes]:
        """The next frame of the client's."""
        (size,) = struct.unpack("<Q", self.read(8))
        body = self.read(size)
        return struct.unpack_from("<i", body)[0], body[4:]

    def serve(self, replies: dict[str, Callable[[Peer], None]]) -> None:
        """Answer as a server does; what a function called by name answers is up to `replies`."""
        names: list[str] = []
        while True:
            code, body = self.read_frame()
            if code == GET_FUNCTION:
                (size,) = struct.unpack_from("<Q", body, 8)
                names.append(body[16 : 16 + size].decode())
                known = names[-1] in replies
                self.send(frame(RETURN, sequence(number(len(names) if known else 0, POINTER))))
            elif code == CALL:
                (handle,) = struct.unpack_from("<Q", body)
                replies[names[handle - 1]](self)
            else:
                self.send(void())


class HostileBoard:
    """Listens on loopback; `behave` is given each connection, on a thread. `errors` keeps what it raised."""

    def __init__(self, behave: Callable[[Peer], None]) -> None:
        self._behave = behave
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> HostileBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._sockets.append(sock)
                threading.Thread(target=self._meet, args=(sock,), daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, struct.error):
            self._behave(Peer(sock))


def call_back(peer: Peer, name: str) -> None:
    """The attack that TVM's symmetric protocol allows: have the client serve, and call one of its functions."""
    peer.send(frame(INIT_SERVER, struct.pack("<Q", len(VERSION)) + VERSION + sequence()))
    peer.read_frame()
    peer.send(frame(GET_FUNCTION, sequence(text(name))))
    _, body = peer.read_frame()
    handle = body[8:16]
    peer.send(frame(CALL, handle + sequence(text("from the board"))))
    peer.read_frame()


def attacks(name: str) -> Iterator[tuple[str, Callable[[Peer], None]]]:
    """Ways to get at the client, each in answer to the client's first frame."""

    def plainly(peer: Peer) -> None:
        peer.greet()
        peer.read_frame()
        call_back(peer, name)

    def behind_a_header(peer: Peer) -> None:
        peer.greet(b"%toinit")  # TVM's word for a header that is still to come, which shifts all frames
        peer.send(struct.pack("<i", 0))
        peer.read_frame()
        call_back(peer, name)

    def within_an_answer(peer: Peer) -> None:
        # A return that is shorter than its frame says: TVM takes the rest for the next frame's code.
        hidden = struct.pack("<i", INIT_SERVER) + struct.pack("<Q", len(VERSION)) + VERSION + sequence()
        peer.greet()
        peer.read_frame()
        peer.send(frame(RETURN, sequence(none()) + hidden))
        peer.read_frame()
        call_back(peer, name)

    yield "plainly", plainly
    yield "behind a header", behind_a_header
    yield "within an answer", within_an_answer


def play_agent(answers: dict[str, bytes]) -> Callable[[Peer], None]:
    """An agent of our protocol that gives these frames as the answers of its functions; fences and claims are fine."""
    known = {DESCRIBE: answer(DESCRIPTION.to_json()), CLAIM: answer(ClaimReport(ClaimStatus.OK).to_json()), **answers}

    def behave(peer: Peer) -> None:
        if peer.key.startswith(FENCE_PREFIX):
            peer.greet(ClaimReport(ClaimStatus.OK).to_json().encode())
            return
        peer.greet()
        peer.serve({name: functools.partial(Peer.send, data=data) for name, data in known.items()})

    return behave
