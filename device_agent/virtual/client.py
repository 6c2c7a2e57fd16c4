"""A virtual board's kernel files over its simulator's socket (`server.py`). Standard library only, for root's helper.

A message is its length (little-endian u32) and JSON: `[operation, argument...]` there, `[errno, answer...]` back.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time
from typing import Any

# The simulator answers within 100 us; a board that hangs must not take its agent along.
TIMEOUT_S = 2.0
SIZE = struct.Struct("<I")
MAX_BYTES = 1 << 20


class SimulatedTree:
    """A `device_agent.sysfs.Tree` over a socket: PATH for any user, PATH.root for root.

    Connects when it is first used, and anew in a forked process. Errors are the board's; besides, every method raises
    OSError (ENODEV) when no simulator answers, and TimeoutError when it does not answer in time.
    """

    simulated = True

    def __init__(self, socket_path: str, timeout_s: float = TIMEOUT_S) -> None:
        self.socket_path = socket_path
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def read(self, path: str) -> str:
        return str(self._ask("read", path))

    def past(self, path: str, at_s: float) -> list[list[Any]]:
        """What the file of a sensor showed then and from then on, each with until when it went on to."""
        return list(self._ask("past", path, at_s))

    def let_pass(self, seconds: float) -> list[Any]:
        """Let a simulated board's time pass; the time then, and what its clocks are."""
        return list(self._ask("let_pass", float(seconds)))

    def write(self, path: str, text: str) -> None:
        self._ask("write", path, text)

    def names(self, folder: str) -> list[str]:
        return list(self._ask("names", folder))

    def exists(self, path: str) -> bool:
        return bool(self._ask("exists", path))

    def run(self, command: list[str]) -> str:
        return str(self._ask("run", command))

    def close(self) -> None:
        """Hang up: what this user's load was ends. The next use connects anew."""
        self._leave_parent()
        with self._lock:
            self._hang_up()

    def _ask(self, *request: Any) -> Any:
        self._leave_parent()
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            try:
                answer = self._exchange(json.dumps(request).encode(), deadline)
            except TimeoutError:
                self._hang_up()  # a late answer would be taken for the next one's
                raise TimeoutError(errno.ETIMEDOUT, "the board does not answer", str(request[1])) from None
            except (OSError, ValueError) as error:
                self._hang_up()
                raise OSError(errno.ENODEV, f"no simulator answers ({error})", self.socket_path) from error
        if answer[0]:
            raise OSError(answer[0], *answer[1:])
        return answer[1]

    def _exchange(self, message: bytes, deadline: float) -> Any:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(self._left(deadline))
            self._socket.connect(self.socket_path)
        self._socket.settimeout(self._left(deadline))
        self._socket.sendall(SIZE.pack(len(message)) + message)
        received = b""
        wanted = SIZE.size
        while len(received) < wanted:
            self._socket.settimeout(self._left(deadline))
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it hung up")
            received += data
            if len(received) >= SIZE.size:
                wanted = SIZE.size + SIZE.unpack_from(received)[0]
        return json.loads(received[SIZE.size : wanted])

    @staticmethod
    def _left(deadline: float) -> float:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _leave_parent(self) -> None:
        """In a forked process: the connection is the parent's, and so may be whoever holds the lock."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._lock = threading.Lock()
            self._hang_up()

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
