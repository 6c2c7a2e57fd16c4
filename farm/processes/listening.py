"""Resources of listeners: descriptors, clients accepted as soon as possible, and threads that may fail to start.

A lack of descriptors, memory or threads is temporary, and must not end a listener that boards or commands rely on.
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

# A board's connection takes about five descriptors, and Linux allows a process 1,024 by default. Far below the kernel's
# maximum, because some libraries iterate over all possible descriptors.
DESCRIPTORS = 65536
# Long enough for a process at its limit to recover, short enough for clients not to notice.
PAUSE_S = 0.2
# Errors that mean the end of the listener; all others concern one client, or resources.
_CLOSED = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})

_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})

_log = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Allow this process and its children as many open files as the system permits, up to `DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_lack(error: BaseException | None) -> bool:
    """Whether an error means that the process or machine lacks resources for now."""
    return isinstance(error, OSError) and error.errno in _LACKS


def accept_clients(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield every client until the listener is closed; without resources, clients wait in the backlog."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError as error:
            if error.errno in _CLOSED:
                return
            if error.errno != errno.ECONNABORTED:  # that client is gone; another may wait
                _log.warning("no client can be taken just now: %s", error)
                time.sleep(PAUSE_S)
            continue
        yield client


def start_thread(name: str, work: Callable[..., None], *arguments: Any) -> bool:
    """Run `work` in a daemon thread; False if none can start now."""
    try:
        threading.Thread(target=work, name=name, args=arguments, daemon=True).start()
    except RuntimeError as error:  # Python's translation of EAGAIN and ENOMEM
        _log.warning("no thread %s can be had just now: %s", name, error)
        return False
    return True
