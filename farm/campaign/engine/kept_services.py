"""Keep the farm's services up while an engine runs: replace those that were killed.

`farm.connectivity.services` finds, holds and starts services; `boards` handles boards that went down with them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection

from farm.closing import Closing
from farm.connectivity.services import Services, find_services, using_services
from farm.connectivity.services_state import was_killed
from farm.connectivity.tracker import Tracker
from farm.errors import FarmError
from farm.settings import Settings

# How often to check which services run, and the pause after a failed start.
_LOOK_S, _AGAIN_S = 1.0, 5.0


class KeptServices(Closing):
    """The running services; a `TrackerSource`. Use as a context manager, from one thread."""

    def __init__(self, settings: Settings, note: Callable[[str], None], boards: Collection[str] | None = None) -> None:
        """Find or start services for these boards (None: all; empty: when they are needed).

        `note` gets a message when they are started. Raises what `using_services` raises.
        """
        self._settings, self._note = settings, note
        self._boards = None if boards is None else frozenset(boards)
        self._services: Services | None = None
        self._using = contextlib.ExitStack()
        if self._boards is None or self._boards:
            self._services, self._using = self._hold()
        self._look_at = self._again_at = 0.0
        self._mending: threading.Thread | None = None

    def close(self) -> None:
        self._using.close()

    def need(self, boards: Collection[str]) -> None:
        """Connect these boards, if they are not connected; never waits."""
        if self._boards is not None and not self._boards.issuperset(boards):
            self._boards = None
            self._begin_mending()

    @property
    def tracker(self) -> Tracker | None:
        """The tracker, or None while there is none. Also checks the services; never waits.

        Killed services are replaced, and services started by another process are used. Those ended by an operator are
        not restarted.
        """
        if self._services is None:
            if self._boards is None:
                self._begin_mending()
            return None
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            found = find_services(self._settings)
            if found.info != self._services.info if found else was_killed(self._settings.home_path):
                self._begin_mending()
        return self._services.tracker

    def _begin_mending(self) -> None:
        if time.monotonic() >= self._again_at and (self._mending is None or not self._mending.is_alive()):
            self._mending = threading.Thread(target=self._mend, name="farm-mend-services", daemon=True)
            self._mending.start()

    def _mend(self) -> None:
        try:
            services, using = self._hold()
        except FarmError as error:
            self._note(f"the farm's services are gone, and others could not be had: {error.message}")
            self._again_at = time.monotonic() + _AGAIN_S
            return
        gone, self._using, self._services = self._using, using, services
        gone.close()

    def _hold(self) -> tuple[Services, contextlib.ExitStack]:
        using = contextlib.ExitStack()
        return using.enter_context(using_services(self._settings, self._boards, self._note)), using
