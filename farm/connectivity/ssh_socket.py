"""The TCP socket below an SSH connection: it records when the board was last heard, and fails after silence.

paramiko sends keepalives but waits for no answer. Its reading thread polls the socket ten times a second, so the socket
can notice silence without a thread.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from typing import Any

from farm.errors import DeadlineError, TransientError

# For a TCP connection to sshd; a board that is off does not answer.
TCP_TIMEOUT_S = 5.0

_REFUSED = os.strerror(errno.ECONNREFUSED)


class WatchedSocket(socket.socket):
    """A connected socket. After `expect_answer`, reads and writes fail after `silence_s` without a byte."""

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        """Take over `sock`, which must not be used afterwards."""
        timeout = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.settimeout(timeout)
        self._silence_s = silence_s
        self._asked_at: float | None = None
        self.heard_at = time.monotonic()

    def expect_answer(self) -> None:
        """Note a request to the board: from now on silence counts, until a byte arrives."""
        # Silence without a request, or while this process was stopped, proves nothing.
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def recv(self, size: int, flags: int = 0) -> bytes:
        try:
            data = super().recv(size, flags)
        except TimeoutError:
            self._require_life()
            raise
        self._asked_at = None
        self.heard_at = time.monotonic()
        return data

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except TimeoutError:  # the peer no longer reads; its kernel's buffer is full
            self._require_life()
            raise

    def _require_life(self) -> None:
        asked_at = self._asked_at
        if asked_at is not None and time.monotonic() - asked_at > self._silence_s:
            # Not ETIMEDOUT: Python turns it into TimeoutError, which paramiko treats as "try again".
            raise ConnectionAbortedError(errno.ECONNABORTED, f"nothing heard for {self._silence_s:g} s")


def open_socket(host: str, port: int, timeout_s: float, silence_s: float) -> WatchedSocket:
    """Connect within `timeout_s`, including name resolution. Raises DeadlineError, TransientError."""
    deadline = time.monotonic() + timeout_s
    last = "no address"
    for family, kind, protocol, _, target in _resolve(host, port, timeout_s):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.01, min(TCP_TIMEOUT_S, deadline - time.monotonic())))
            sock.connect(target)
            # Small RPC frames must not wait for the peer's delayed acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except TimeoutError:
            sock.close()
            if time.monotonic() >= deadline:
                break
            last = "it does not answer"
        except OSError as error:
            sock.close()
            last = error.strerror or str(error)
        else:
            return WatchedSocket(sock, silence_s)
    if last == "it does not answer" or time.monotonic() >= deadline:
        raise DeadlineError(
            f"nothing answered at {host}:{port} within {min(TCP_TIMEOUT_S, timeout_s):g} s",
            "Is the board powered and on the network, and its address right?",
        )
    hint = "The board is there, its sshd is not: start it, or correct the port." if last == _REFUSED else ""
    raise TransientError(f"no connection to {host}:{port}: {last}", hint)


def _resolve(host: str, port: int, timeout_s: float) -> list[Any]:
    """`getaddrinfo` with a deadline, which the resolver lacks. An overrunning thread ends with the resolver."""
    answers: list[Any] = []
    failures: list[str] = []

    def ask() -> None:
        try:
            answers.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            failures.append(getattr(error, "strerror", None) or str(error))

    thread = threading.Thread(target=ask, name="farm-ssh-resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failures:
        raise TransientError(f"the name {host!r} has no address: {failures[0]}", "Check it in the inventory.")
    if thread.is_alive():
        raise DeadlineError(f"the name {host!r} was not resolved within {timeout_s:g} s")
    return answers
