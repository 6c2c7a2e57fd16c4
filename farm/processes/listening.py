"""Room for what comes in: descriptors, clients that are taken as soon as there is room, threads that cannot be had.

Running out of descriptors, memory or threads passes; it must not end a listener that a board or a command relies on.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

# A board's way takes about five descriptors, and Linux gives a process 1,024 unless it asks for more. Far below what
# the kernel allows, because some libraries walk through all that they might have.
DESCRIPTORS = 65536
# Long enough for a process at its limit to do something else, short enough for a client not to notice.
PAUSE_S = 0.2
# What says that the listener itself is over; everything else is about one client, or about room.
_CLOSED = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})

_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})

_log = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files as the system allows, up to `DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_lack(error: BaseException | None) -> bool:
    """Whether an error says that this process or machine has no room just now."""
    return isinstance(error, OSError) and error.errno in _LACKS


def accept_clients(listener: socket.socket) -> Iterator[socket.socket]:
    """Every client until the listener is closed; where there is no room for one, it waits in the backlog."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError as error:
            if error.errno in _CLOSED:
                return
            if error.errno != errno.ECONNABORTED:  # that client is gone; the next one may be there
                _log.warning("no client can be taken just now: %s", error)
                time.sleep(PAUSE_S)
            continue
        yield client


def start_thread(name: str, work: Callable[..., None], *arguments: Any) -> bool:
    """Do `work` on a thread that no end of the process waits for; False where none can be had now."""
    try:
        threading.Thread(target=work, name=name, args=arguments, daemon=True).start()
    except RuntimeError as error:  # what Python makes of EAGAIN and ENOMEM
        _log.warning("no thread %s can be had just now: %s", name, error)
        return False
    return True
