"""Waiting for boards' processes, and for whoever rings: another thread, or what Ray has done."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import socket
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import Any


class Waiter:
    """A bell that lies among the connections. Used by one thread, but for `ring`."""

    def __init__(self) -> None:
        self._ears, self._bell = socket.socketpair()
        self._ears.setblocking(False)
        self._bell.setblocking(False)
        self._waited_for: frozenset[Any] = frozenset()

    def wait(self, connections: Collection[Connection], timeout_s: float, references: Collection[Any] = ()) -> None:
        """Until a connection can be read, somebody rings, one of Ray's references is done or the time is over.

        A bell that was rung for what somebody has taken already ends it, too.
        """
        now = frozenset(references)
        for reference in now - self._waited_for:
            reference.future().add_done_callback(self.ring)
        self._waited_for = now
        if self._ears in multiprocessing.connection.wait([self._ears, *connections], timeout_s):
            self._ears.recv(4096)

    def close(self) -> None:
        """Nothing rings any more. Safe to call twice."""
        self._ears.close()
        self._bell.close()

    def ring(self, _: object = None) -> None:
        """End the wait, or the next one. A full bell is being rung already, a closed one heard by nobody."""
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
