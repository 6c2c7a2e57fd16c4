"""A virtual board's kernel files over its simulator's socket (`server.py`), as `--root virtual:SOCKET`.

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
from collections.abc import Sequence
from typing import Any

from device_agent import sysfs

# The simulator answers within 100 us; a hung board must not hang its agent.
TIMEOUT_S = 2.0
SIZE = struct.Struct("<I")
MAX_BYTES = 1 << 20

SCHEME = "virtual"


class SimulatedTree:
    """A `device_agent.sysfs.Tree` over a socket: PATH for any user, PATH.root for root.

    Connects on first use, and again in a forked process. Beside the board's errors, every method raises OSError
    (ENODEV) without a simulator, and TimeoutError for a late answer.
    """

    simulated = True

    def __init__(self, socket_path: str, timeout_s: float = TIMEOUT_S) -> None:
        self.socket_path = socket_path
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        # Board time not yet sent to the simulator; and the last answer: when, the clocks then, valid until when.
        self._owed_s = 0.0
        self._steady: list[Any] | None = None

    def read(self, path: str) -> str:
        return str(self._ask("read", path))

    def past(self, path: str, at_s: float) -> list[list[Any]]:
        """The values of a sensor's file from `at_s` on, each with its end time."""
        return list(self._ask("past", path, at_s))

    def past_many(self, paths: Sequence[str], at_s: float) -> list[list[list[Any]] | None]:
        """As `past`, for several files; None for each that was unreadable then."""
        return list(self._ask("past_many", list(paths), at_s))

    def read_many(self, paths: Sequence[str]) -> list[str | None]:
        return list(self._ask("read_many", list(paths), reads=max(1, len(paths))))

    def let_pass(self, seconds: float) -> list[Any]:
        """Let a simulated board's time pass; return its time, its clocks, and how long they hold.

        While the clocks hold, the time is only accumulated, and sent with the next request.
        """
        self._leave_parent()
        if self._steady is not None:
            then_s, clocks, until_s = self._steady
            if then_s + self._owed_s + seconds < until_s:
                self._owed_s += seconds
                return [then_s + self._owed_s, clocks, until_s]
        owed_s, self._owed_s = self._owed_s, 0.0
        self._steady = list(self._ask("let_pass", float(owed_s + seconds)))
        return self._steady

    def write(self, path: str, text: str) -> None:
        self._ask("write", path, text)

    def names(self, folder: str) -> list[str]:
        return list(self._ask("names", folder))

    def exists(self, path: str) -> bool:
        return bool(self._ask("exists", path))

    def run(self, command: list[str]) -> str:
        return str(self._ask("run", command))

    def close(self) -> None:
        """Disconnect, which ends this user's load. The next use connects again."""
        self._leave_parent()
        with self._lock:
            self._hang_up()

    def _ask(self, *request: Any, reads: int = 1) -> Any:
        self._leave_parent()
        deadline = time.monotonic() + reads * self._timeout_s
        owed_s, self._owed_s = self._owed_s, 0.0
        requests = [["let_pass", owed_s], request] if owed_s else [request]
        with self._lock:
            try:
                answers = self._exchange([json.dumps(each).encode() for each in requests], deadline)
            except TimeoutError:
                self._steady = None
                self._hang_up()  # a late answer would pass for the next one's
                raise TimeoutError(errno.ETIMEDOUT, "the board does not answer", str(request[1])) from None
            except (OSError, ValueError) as error:
                self._steady = None
                self._hang_up()
                raise OSError(errno.ENODEV, f"no simulator answers ({error})", self.socket_path) from error
        for answer in answers:
            if answer[0]:
                self._steady = None
                raise OSError(answer[0], *answer[1:])
        if request[0] in ("write", "run"):
            self._steady = None
        elif owed_s:
            self._steady = list(answers[0][1])
        return answers[-1][1]

    def _exchange(self, messages: list[bytes], deadline: float) -> list[Any]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(self._left(deadline))
            self._socket.connect(self.socket_path)
        self._socket.settimeout(self._left(deadline))
        self._socket.sendall(b"".join(SIZE.pack(len(message)) + message for message in messages))
        received = b""
        answers: list[Any] = []
        while len(answers) < len(messages):
            wanted = SIZE.size + (SIZE.unpack_from(received)[0] if len(received) >= SIZE.size else 0)
            if wanted > SIZE.size and len(received) >= wanted:
                answers.append(json.loads(received[SIZE.size : wanted]))
                received = received[wanted:]
                continue
            self._socket.settimeout(self._left(deadline))
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "it hung up")
            received += data
        return answers

    @staticmethod
    def _left(deadline: float) -> float:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _leave_parent(self) -> None:
        """In a forked process: drop the parent's connection and lock."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._lock = threading.Lock()
            self._hang_up()
            self._owed_s, self._steady = 0.0, None

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


sysfs.SOURCES[SCHEME] = SimulatedTree
