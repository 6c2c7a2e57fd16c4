"""A network between a store's server and who uses it, which can be cut: nothing answers then, not even a refusal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Iterator

from tests.integration.board_hosts import Cable, require_namespaces

# CLONE_NEWNET of sched.h: Python has `os.setns` from 3.12 on.
_NEWNET = 0x40000000


@contextlib.contextmanager
def cable_to_store(url: str) -> Iterator[tuple[Cable, str]]:
    """A cable on whose other end the store is, and the store's URL there: who uses that can be cut off from it."""
    require_namespaces()
    cable, port = Cable(), int(url.rpartition(":")[2].partition("/")[0])
    cable.lay()
    listener: list[socket.socket] = []
    maker = threading.Thread(target=lambda: listener.append(_listen_in(cable, port)))
    maker.start()
    maker.join()
    try:
        threading.Thread(target=_accept, args=(listener[0], port), daemon=True).start()
        yield cable, url.replace("127.0.0.1", cable.address)
    finally:
        with contextlib.suppress(OSError):
            listener[0].shutdown(socket.SHUT_RDWR)
        listener[0].close()
        cable.take_up()


def _listen_in(cable: Cable, port: int) -> socket.socket:
    """A socket in the cable's namespace. To be called by a thread of its own: it stays there."""
    namespace = os.open(f"/run/netns/{cable.namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        return socket.create_server((cable.address, port))
    finally:
        os.close(namespace)


def _accept(listener: socket.socket, port: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            outer, _ = listener.accept()
            inner = socket.create_connection(("127.0.0.1", port))
            for pair in ((outer, inner), (inner, outer)):
                threading.Thread(target=_carry, args=pair, daemon=True).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
