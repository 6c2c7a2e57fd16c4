"""Carries bytes between a socket here and a channel of an SSH connection: how a host on the way leads to a board.

Forwards to ports of boards are `tunnels.py`'s business.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import paramiko

from farm.processes.listening import start_thread

_CHUNK = 1 << 16


def carry(sock: socket.socket, channel: paramiko.Channel, on_end: Callable[[], None]) -> None:
    """Own both from now on; `on_end` is called once, after they are closed. Two threads carry, one each way."""
    ended = threading.Lock()

    def end() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
            channel.close()
        if not ended.acquire(blocking=False):  # the other direction ended before: both are done
            sock.close()
            on_end()

    def outward() -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while data := sock.recv(_CHUNK):
                channel.sendall(data)
        end()

    def inward() -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while data := channel.recv(_CHUNK):
                sock.sendall(data)
        end()

    for work, name in ((outward, "farm-ssh-jump-out"), (inward, "farm-ssh-jump-in")):
        if not start_thread(name, work):
            end()
