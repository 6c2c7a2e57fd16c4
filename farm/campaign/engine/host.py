"""The host as a board of campaigns, and the farm services that an engine keeps up.

The host is registered on first use and leased like any board. It is never probed. No other farm measures on the machine
meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection

from farm.closing import Closing
from farm.connectivity.services import SERVICES, Services, find_services, using_services
from farm.connectivity.tracker import Tracker
from farm.crew.local import LocalFarm, share_cores
from farm.errors import DeadlineError, FarmError, UnavailableError
from farm.processes.machine import machine_lock
from farm.settings import Settings
from farm.store import Store
from farm.values import Board

# How often to check which services run, and the pause after a failed start.
_LOOK_S, _RESTART_PAUSE_S = 1.0, 5.0
BOARD_TYPE = "local"
# How long to wait before trying again.
_AGAIN_S = 5.0


class KeptServices(Closing):
    """The running services. Use as a context manager, from one thread."""

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
            if found.info != self._services.info if found else SERVICES.was_killed(self._settings.home_path):
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
            self._again_at = time.monotonic() + _RESTART_PAUSE_S
            return
        gone, self._using, self._services = self._using, using, services
        gone.close()

    def _hold(self) -> tuple[Services, contextlib.ExitStack]:
        using = contextlib.ExitStack()
        return using.enter_context(using_services(self._settings, self._boards, self._note)), using


class HostBoard:
    """The host's own tracker and agent. Used by one thread, which lives as long as they do."""

    def __init__(self, settings: Settings, store: Store, note: Callable[[str], None]) -> None:
        """Start nothing before `open` or `want`. `note` gets messages for operators."""
        self._settings, self._store, self._note = settings, store, note
        self._stack = contextlib.ExitStack()
        self._farm: LocalFarm | None = None
        self._again_at = 0.0
        self._trouble = ""

    @property
    def name(self) -> str:
        """The board's name; "" while its agent does not run."""
        return "" if self._farm is None else self._farm.key.partition("/")[2]

    @property
    def tracker(self) -> Tracker:
        """The tracker. Raises UnavailableError where the agent does not run."""
        return self._require().tracker

    @property
    def rests(self) -> bool:
        """Whether search and build rest while it measures."""
        return self._settings.isolation == "exclusive"

    def open(self) -> None:
        """Start tracker and agent, and register the board. Raises UnavailableError, DeadlineError, UsageError."""
        if self._farm is not None:
            return
        settings = self._settings
        with contextlib.ExitStack() as stack:
            stack.enter_context(machine_lock())
            board_cores, host_cores = share_cores(settings.isolation)
            pinned = settings.isolation == "own-core"
            if pinned:
                stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
                os.sched_setaffinity(0, host_cores)
            logs = settings.home_path / "logs"
            farm = stack.enter_context(LocalFarm(settings.tracker_port, logs, board_cores if pinned else None))
            if farm.tracker.port != settings.tracker_port:
                self._note(f"port {settings.tracker_port} is in use; the tracker took {farm.tracker.port}")
            name = farm.key.partition("/")[2]
            known = {row.name: row.description for row in self._store.boards.fetch()}
            self._store.boards.save(Board(name, BOARD_TYPE, False, known.get(name) or {}))
            self._stack, self._farm = stack.pop_all(), farm

    def want(self) -> None:
        """Open it where campaigns want it; after a failure, report once and try again later."""
        if self._farm is not None or time.monotonic() < self._again_at:
            return
        try:
            self.open()
            self._trouble = ""
        except FarmError as error:
            self._again_at = time.monotonic() + _AGAIN_S
            if error.message != self._trouble:
                self._trouble = error.message
                self._note(f"this machine cannot be measured on: {error.message}")

    def ensure_alive(self) -> list[str]:
        """Restart processes that died, and say which. Raises UnavailableError where that fails."""
        try:
            return self._require().ensure_alive()
        except DeadlineError as error:
            raise UnavailableError(
                f"the farm on this machine cannot be kept up: {error.message}", error.hint
            ) from error

    def restart_agent(self) -> None:
        """End an agent that hangs; `ensure_alive` restarts it."""
        self._require().restart_agent()

    def close(self) -> None:
        """End tracker and agent, and release the machine."""
        self._farm = None
        self._stack.close()

    def _require(self) -> LocalFarm:
        if self._farm is None:
            raise UnavailableError("the agent of this machine does not run")
        return self._farm
