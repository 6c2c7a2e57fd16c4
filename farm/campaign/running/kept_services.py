"""The farm's services for as long as an engine runs: others take the place of those that were killed.

How services are found, held and started is in `farm.services.client`; what becomes of boards meanwhile in `boards`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType

from farm.errors import FarmError
from farm.fleet.tracker import Tracker
from farm.services.client import Services, find_services, using_services
from farm.services.state import was_killed
from farm.settings import Settings

# How often it is looked at who the services are, and how long after others could not be had.
_LOOK_S, _AGAIN_S = 1.0, 5.0


class KeptServices:
    """The services that run, whichever those are; a `Reach`. Use as a context manager, from one thread."""

    def __init__(self, settings: Settings, note: Callable[[str], None]) -> None:
        """Find services, or start some. `note` is told when they are started. Raises what `using_services` raises."""
        self._settings, self._note = settings, note
        self._services, self._using = self._hold()
        self._look_at = 0.0
        self._mending: threading.Thread | None = None

    def __enter__(self) -> KeptServices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._using.close()

    @property
    def tracker(self) -> Tracker:
        """Where boards are asked for. Asking for it looks whether the services are still there; never waits.

        Those that were killed are replaced, and those that somebody else has started are used; those that an operator
        has ended are not started again.
        """
        now = time.monotonic()
        if now >= self._look_at and (self._mending is None or not self._mending.is_alive()):
            self._look_at = now + _LOOK_S
            found = find_services(self._settings)
            if found.info != self._services.info if found else was_killed(self._settings.home_path):
                self._mending = threading.Thread(target=self._mend, name="farm-mend-services", daemon=True)
                self._mending.start()
        return self._services.tracker

    def _mend(self) -> None:
        try:
            services, using = self._hold()
        except FarmError as error:
            self._note(f"the farm's services are gone, and others could not be had: {error.message}")
            self._look_at = time.monotonic() + _AGAIN_S
            return
        gone, self._using, self._services = self._using, using, services
        gone.close()

    def _hold(self) -> tuple[Services, contextlib.ExitStack]:
        using = contextlib.ExitStack()
        return using.enter_context(using_services(self._settings, None, self._note)), using
