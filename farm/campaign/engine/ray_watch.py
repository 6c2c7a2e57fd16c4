"""The end of an engine whose Ray has died under it: calls to Ray may then wait for ever, in code that no signal ends.

Only what Ray runs on this machine for all of its processes is watched; single actors are their users' business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

import psutil

# How often to look, and how long the engine has to end in order, with its campaigns noted as interrupted.
_LOOK_S = 1.0
_GRACE_S = 15.0
# As for other parts of the farm that are missing.
_EXIT_CODE = 3

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def ray_watched(raylet_socket: str, grace_s: float = _GRACE_S) -> Iterator[None]:
    """For the block, in which Ray runs: where its node manager dies and the block does not end, the process does.

    It ends as if killed then: at once, its children with it. What it was doing is found in the store. The node manager
    is known by the path of its socket; the block has `grace_s` to end.
    """
    watch = _Watch(_find_raylet(raylet_socket), grace_s)
    watch.start()
    try:
        yield
    finally:
        watch.let_go()


class _Watch(threading.Thread):
    def __init__(self, raylet: psutil.Process | None, grace_s: float) -> None:
        super().__init__(name="farm-ray-watch", daemon=True)
        self._raylet, self._grace_s = raylet, grace_s
        self._over = threading.Event()
        self._found = False

    def let_go(self) -> None:
        """Watch no more; where Ray has died, its shutting down may not end either, and is given its time."""
        if not self._found:
            self._over.set()

    def run(self) -> None:
        while not self._over.wait(_LOOK_S):
            if self._raylet is not None and not _is_alive(self._raylet):
                self._found = True
                _log.error("Ray's node manager (pid %d) died", self._raylet.pid)
                if not self._over.wait(self._grace_s):
                    _log.error("the engine cannot let go of Ray, and ends; `farm campaign resume` goes on")
                    logging.shutdown()
                    os._exit(_EXIT_CODE)


def _find_raylet(socket: str) -> psutil.Process | None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(argument == f"--raylet_socket_name={socket}" for argument in process.cmdline()):
                return process
    return None


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
