"""One board under one lease: take, keep on a thread that renews it, check, observe, return.

`choice` selects boards; `held_board` has the session. What follows a loss is the holder's to decide; the board's agent
refuses it from then on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from farm.closing import Closing
from farm.connectivity.tracker import Tracker
from farm.crew.choice import find_unusable
from farm.crew.health import Kind, Observation, decide_by
from farm.crew.site import find_outage
from farm.errors import FarmError, LeaseOverError, TransientError, UsageError
from farm.processes.machine import name_coordinator, name_user
from farm.store import Store
from farm.store.leases import LEASE_TTL_S
from farm.types.documents import BoardInfo
from farm.values import Lease, WorkKind

# A lease is renewed every third of its time: two renewals may fail before it lapses.
_RENEWALS_PER_TTL = 3
# How soon a busy or full store is asked again, at most as often as the lease has time for.
_RETRY_S, _RETRIES_PER_TTL = 1.0, 10
# A renewal waits for another command's transaction (`BUSY_TIMEOUT_S` of the store) at most.
_CLOSE_TIMEOUT_S = 35.0
# The format of `name_owner`.
_OWNER = re.compile(r"@(\S+) pid (\d+)$")

_log = logging.getLogger(__name__)


def name_owner() -> str:
    """Name this process, so that a person can find it."""
    return f"{name_user(str(os.getuid()))} pid {os.getpid()}"


def free_orphans(
    store: Store, rows: Mapping[str, BoardInfo], names: Collection[str], purpose: str | None = None
) -> list[str]:
    """End the leases on boards among `names` whose owner was killed, instead of waiting for them to expire.

    `purpose`: only leases for it. The owner's session ended with it; any remains are fenced off. Returns the boards
    that are free.
    """
    freed = []
    for name in names:
        lease = rows[name].lease if name in rows else None
        if lease is None or purpose not in (None, lease.purpose):
            continue
        found = _OWNER.search(lease.owner)
        # Another host's or container's processes cannot be seen from here: their leases expire.
        if found is None or found.group(1) != socket.gethostname() or Path(f"/proc/{found.group(2)}").exists():
            continue
        try:
            if store.leases.release_orphan(name, lease.token, name_owner(), f"its process {found.group(2)} is gone"):
                freed.append(name)
        except TransientError:  # the store is busy: at the next look
            continue
    return freed


class LeaseKeeper(Closing):
    """Holds one lease until `close`. Use as a context manager.

    `lost` is set, with the `reason`, when the lease ends early: by force, not renewed in time, or without a reachable
    store until it lapsed. The thread has its own store and starts no processes.
    """

    def __init__(self, open_store: Callable[[], Store], lease: Lease, *, ours: bool = True) -> None:
        """`ours`: it is renewed and returned; a person's reservation is only watched."""
        self._open_store, self._ours = open_store, ours
        self._every_s = (lease.ttl_s if ours else min(lease.ttl_s, LEASE_TTL_S)) / _RENEWALS_PER_TTL
        self._lease = lease
        self._renewed_at = time.monotonic()
        self._wanted = threading.Event()
        self.lost = threading.Event()
        self.reason = ""
        self._thread = threading.Thread(target=self._keep, name=f"farm-lease-{lease.board}", daemon=True)
        self._thread.start()

    @property
    def lease(self) -> Lease:
        """The lease, as last renewed."""
        return self._lease

    def close(self) -> None:
        """Return the lease, if it is still ours. Safe to call twice."""
        self._wanted.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def find_end(self, store: Store) -> str:
        """Ask `store` why the lease is over; "" where it is not. Not for the keeper's own thread."""
        if self.lost.is_set():
            return self.reason
        try:
            self._renew(store)
        except LeaseOverError as error:
            return error.message
        except TransientError:  # the store is busy; the keeper will know
            pass
        return ""

    def _renew(self, store: Store) -> None:
        if self._ours:
            self._lease = store.leases.renew(self._lease)
        else:
            store.leases.require(self._lease)

    def _keep(self) -> None:
        with contextlib.ExitStack() as stack:
            store: Store | None = None
            pause_s = self._every_s
            while not self._wanted.wait(pause_s):
                pause_s = self._every_s
                began = time.monotonic()
                try:
                    store = store or stack.enter_context(self._open_store())
                    self._renew(store)
                    self._renewed_at = began
                except FarmError as error:
                    if self._is_over(error):
                        self._lose(error.message)
                        return
                    self._warn("lease %d of %s: %s; trying again", self._lease.token, self._lease.board, error)
                    pause_s = min(_RETRY_S, self._lease.ttl_s / _RETRIES_PER_TTL)
            if not self._ours:
                return
            try:
                store = store or stack.enter_context(self._open_store())
                store.leases.release(self._lease)
            except FarmError as error:  # then it expires
                self._warn("lease %d of %s is not given back: %s", self._lease.token, self._lease.board, error)

    def _is_over(self, error: FarmError) -> bool:
        """Whether the store said so, or the lease has lapsed while the store could not be asked.

        Both clocks run alike but on a machine that sleeps; then the store knows.
        """
        return isinstance(error, LeaseOverError) or time.monotonic() - self._renewed_at >= self._lease.ttl_s

    def _lose(self, reason: str) -> None:
        self.reason = reason
        self.lost.set()
        self._warn("board %s is no longer ours: %s", self._lease.board, reason)

    def _warn(self, text: str, *values: object) -> None:
        _log.warning(text, *values, extra={"board": self._lease.board})


class LeasedBoard:
    """A board of the fleet while it is ours. Not thread-safe, but for `give_back`."""

    def __init__(
        self,
        store: Store,
        key: str,
        purpose: str,
        find_tracker: Callable[[], Tracker | None] | None,
        ttl_s: float = LEASE_TTL_S,
        kind: WorkKind | None = None,
        request: int | None = None,
    ) -> None:
        """Take its lease and keep it, or work under this user's reservation.

        `find_tracker`: where it is requested; None for our own tracker. `kind` and `request` go to
        `store.leases.acquire`. Raises TransientError, UnavailableError or BoardUnsafeError where it cannot be taken,
        UsageError where it was removed.
        """
        self.key, self.name = key, key.partition("/")[2]
        self._store, self._purpose, self._find_tracker = store, purpose, find_tracker
        self._over = ""
        # The user's work on a reserved board runs under the reservation, which outlasts it.
        reserved = (
            store.leases.find_reservation(self.name, name_user()) if kind not in (None, WorkKind.TRIALS) else None
        )
        taken = functools.partial(store.leases.acquire, self.name, name_owner(), purpose)
        lease = reserved or taken(ttl_s=ttl_s, kind=kind, request=request, through=name_coordinator())
        self._keeper = LeaseKeeper(functools.partial(Store, store.location), lease, ours=reserved is None)
        with contextlib.ExitStack() as undo:
            undo.callback(self._keeper.close)
            store.events.add("board_taken", key, f"lease {lease.token}, {purpose}")
            undo.pop_all()

    @property
    def lease(self) -> Lease:
        return self._keeper.lease

    @property
    def over(self) -> str:
        """Why it has to be left, as far as is known; "" while it is ours."""
        return self._keeper.reason if self._keeper.lost.is_set() else self._over

    def find_end(self, rows: Mapping[str, BoardInfo]) -> str:
        """Return why it has to be left, given the store's rows of boards by name; "" where it may be used."""
        row = rows.get(self.name)
        if self.over:
            return self.over
        if row is not None and (row.lease is None or row.lease.token != self.lease.token):
            return "our lease was ended"  # such as by an operator; the keeper learns it at its next renewal
        return find_unusable(row)

    def confirm(self) -> bool:
        """Check anew whether it is still ours and connected; if not, `over` says why."""
        trouble = self._keeper.find_end(self._store)
        if not trouble and self._find_tracker is not None:
            trouble = find_outage(self._find_tracker())
        self._over = self._over or trouble
        return not trouble

    def note_refusal(self, error: LeaseOverError) -> None:
        """Note that the board knows a later lease, so that the next one is later than that."""
        self._store.leases.raise_token(error.greatest)
        self._over = self._over or error.message

    def observe(self, kind: Kind, detail: str) -> None:
        """Report an observation to the store, which decides the board's health."""
        with contextlib.suppress(UsageError):  # it was removed, which the next look finds out
            self._store.boards.observe(self.name, kind, self._purpose, decide_by(Observation(kind, detail)))

    def note_leaving(self, reason: str) -> None:
        """Write to the store why it is left early."""
        self._store.events.add("board_left", self.key, reason)

    def give_back(self) -> None:
        """Return the lease. Waits for the store. Safe to call twice."""
        self._keeper.close()
