"""The end of an engine whose Ray has died under it: calls to Ray may then wait for ever, in code that no signal ends.

Only what Ray runs on this machine for all of its processes is watched; single actors are their users' business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator

import psutil

from farm.errors import FarmError, UnavailableError

# How often to look, and how long the engine has to end in order, with its campaigns noted as interrupted.
_LOOK_S = 1.0
_GRACE_S = 15.0
# As for other parts of the farm that are missing.
_EXIT_CODE = 3

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def ray_watched(raylet_socket: str, tell: Callable[[str], None], grace_s: float = _GRACE_S) -> Iterator[None]:
    """For the block, in which Ray runs: where its node manager dies and the block does not end, the process does.

    It ends as if killed then: at once, its children with it. What it was doing is found in the store, and why it ended
    where `tell` leaves it. The node manager is known by the path of its socket; the block has `grace_s` to end.
    Raises UnavailableError for whatever error of the farm's such a death ends the block with.
    """
    watch = _Watch(_find_raylet(raylet_socket), tell, grace_s)
    watch.start()
    try:
        yield
    except FarmError as error:
        if watch.has_died():
            raise UnavailableError(watch.words, "A campaign goes on with `farm campaign resume`.") from error
        raise
    finally:
        watch.let_go()


class _Watch(threading.Thread):
    def __init__(self, raylet: psutil.Process | None, tell: Callable[[str], None], grace_s: float) -> None:
        super().__init__(name="farm-ray-watch", daemon=True)
        self._raylet, self._tell, self._grace_s = raylet, tell, grace_s
        self._over = threading.Event()
        self._found = False

    def let_go(self) -> None:
        """Watch no more; where Ray has died, its shutting down may not end either, and is given its time."""
        if not self._found:
            self._over.set()

    @property
    def words(self) -> str:
        """What is said of the death. Nobody is told its cause, of which one is not rare."""
        pid = "unknown" if self._raylet is None else self._raylet.pid
        return f"Ray's node manager (pid {pid}) died; where memory runs out the kernel kills it"

    def has_died(self) -> bool:
        """Whether the node manager is gone."""
        return self._raylet is not None and not _is_alive(self._raylet)

    def run(self) -> None:
        while not self._over.wait(_LOOK_S):
            if self.has_died():
                self._found = True
                _log.error("%s", self.words)
                self._tell(self.words)
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
