"""One board under one lease: take, keep while one thread renews all of this process, check, observe, return.

`choice` selects boards; `held_board` has the session. What follows a loss is the holder's to decide; the board's agent
refuses it from then on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import ClassVar

from farm.closing import Closing
from farm.connectivity.tracker import Tracker
from farm.crew.choice import find_unusable
from farm.crew.health import Kind, Observation, decide_by
from farm.crew.site import find_outage
from farm.errors import FarmError, LeaseOverError, TransientError, UsageError
from farm.processes.machine import name_coordinator, name_user
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.leases import LEASE_TTL_S, make_over
from farm.types.documents import BoardInfo
from farm.values import Lease, WorkKind

# A lease is renewed every third of its time: two renewals may fail before it lapses.
_RENEWALS_PER_TTL = 3
# How soon a busy or full store is asked again, at most as often as the lease has time for.
_RETRY_S, _RETRIES_PER_TTL = 1.0, 10
# A renewal waits for another command's transaction (`BUSY_TIMEOUT_S` of the store) at most.
_CLOSE_TIMEOUT_S = 35.0
# Between two looks at what has to be renewed; each takes a transaction.
_RETURNS_AT_ONCE = 16
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
    store until it lapsed.
    """

    def __init__(self, location: StoreLocation, lease: Lease, *, ours: bool = True) -> None:
        """`ours`: it is renewed and returned; a person's reservation is only watched."""
        self.lease, self.ours = lease, ours
        self.lost, self.closed = threading.Event(), threading.Event()
        self.reason, self.is_wanted = "", True
        self._every_s = (lease.ttl_s if ours else min(lease.ttl_s, LEASE_TTL_S)) / _RENEWALS_PER_TTL
        self.note_renewal(lease, time.monotonic())
        self._renewals = _Renewals.add(location, self)

    def leave(self) -> None:
        """Have the lease returned, if it is still ours, without waiting. From any thread. Safe to call twice."""
        self.is_wanted = False
        self._renewals.changed.set()

    def close(self) -> None:
        """Return the lease, if it is still ours. Safe to call twice."""
        self.leave()
        self.closed.wait(_CLOSE_TIMEOUT_S)

    def find_end(self, store: Store) -> str:
        """Ask `store` why the lease is over; "" where it is not."""
        if self.lost.is_set():
            return self.reason
        with contextlib.suppress(TransientError):  # the store is busy; the thread will know
            if not (renewed := _renew(store, [self])):
                return make_over(self.lease).message
            self.lease = renewed[self]
        return ""

    def note_renewal(self, lease: Lease, at_s: float) -> None:
        self.lease, self._renewed_at = lease, at_s
        self.due_at = at_s + self._every_s

    def give_back(self, store: Store) -> None:
        if self.ours:
            store.leases.release(self.lease)
        self.closed.set()

    def note_failure(self, error: FarmError, is_wanted: bool) -> None:
        """Give up the return of an unwanted lease; retry a due renewal soon, until the lease has lapsed.

        Both clocks run alike but on a machine that sleeps; then the store knows.
        """
        now = time.monotonic()
        if not is_wanted:  # then it expires
            self.closed.set()
            self.warn("lease %d of %s is not given back: %s", self.lease.token, self.lease.board, error)
        elif now - self._renewed_at >= self.lease.ttl_s:
            self.lose(error.message)
        elif now >= self.due_at:
            self.warn("lease %d of %s: %s; trying again", self.lease.token, self.lease.board, error)
            self.due_at = now + min(_RETRY_S, self.lease.ttl_s / _RETRIES_PER_TTL)

    def lose(self, reason: str) -> None:
        self.reason = reason
        self.lost.set()
        self.closed.set()
        self.warn("board %s is no longer ours: %s", self.lease.board, reason)

    def warn(self, text: str, *values: object) -> None:
        _log.warning(text, *values, extra={"board": self.lease.board})


class _Renewals:
    """Renews what this process holds in one store: all leases at once, on one thread with its own store.

    The thread starts no processes, and ends when nothing is held.
    """

    _all: ClassVar[dict[tuple[int, StoreLocation], _Renewals]] = {}
    _lock = threading.Lock()  # for `_all` and `_kept`; never held while waiting

    def __init__(self, location: StoreLocation) -> None:
        self._key = os.getpid(), location  # a fork has no threads of its parent
        self._kept: list[LeaseKeeper] = []
        self.changed = threading.Event()

    @classmethod
    def add(cls, location: StoreLocation, keeper: LeaseKeeper) -> _Renewals:
        new = cls(location)
        with cls._lock:
            found = cls._all.get(new._key, new)
            if found is new:
                threading.Thread(target=new._run, name="farm-leases", daemon=True).start()
                cls._all[new._key] = new
            found._kept.append(keeper)
        found.changed.set()
        return found

    def _run(self) -> None:
        store: Store | None = None
        with contextlib.ExitStack() as stack:
            while kept := self._list_kept():
                wanted = dict.fromkeys(each for each in kept if each.is_wanted)  # in order
                pause_s = min((each.due_at for each in wanted), default=math.inf) - time.monotonic()
                left = [each for each in kept if each not in wanted][:_RETURNS_AT_ONCE]
                if pause_s > 0 and not left:
                    self.changed.wait(pause_s)
                    self.changed.clear()
                    continue
                try:
                    store = store or stack.enter_context(Store(self._key[1]))
                    now = time.monotonic()
                    renewed = _renew(store, wanted) if pause_s <= 0 else {}
                    for each in wanted if pause_s <= 0 else ():
                        if each in renewed:
                            each.note_renewal(renewed[each], now)
                        else:
                            each.lose(make_over(each.lease).message)
                    for each in left:
                        each.give_back(store)
                except FarmError as error:
                    for each in (*wanted, *left):
                        if not each.closed.is_set():
                            each.note_failure(error, each in wanted)
                except Exception as error:  # noqa: BLE001 - edge: a holder must learn that its lease will lapse
                    _log.exception("leases are no longer renewed")
                    for each in kept:
                        each.lose(f"{type(error).__name__}: {error}")

    def _list_kept(self) -> list[LeaseKeeper]:
        """What is held; where it is nothing, the thread must end."""
        with self._lock:
            self._kept = [each for each in self._kept if not each.closed.is_set()]
            if not self._kept:
                del self._all[self._key]
            return list(self._kept)


def _renew(store: Store, kept: Collection[LeaseKeeper]) -> dict[LeaseKeeper, Lease]:
    """Renew leases that are ours, and look up the others; return those that are not over."""
    leases = {each: each.lease for each in kept}
    watched = {lease for each, lease in leases.items() if not each.ours}
    renewed = store.leases.renew_all(list(leases.values()), watched)
    return {each: renewed[lease] for each, lease in leases.items() if lease in renewed}


class LeasedBoard:
    """A board of the fleet while it is ours. Not thread-safe, but for `give_back`."""

    def __init__(
        self,
        store: Store,
        key: str,
        purpose: str,
        find_tracker: Callable[[], Tracker | None] | None,
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
        lease = reserved or taken(ttl_s=LEASE_TTL_S, kind=kind, request=request, through=name_coordinator())
        self.keeper = LeaseKeeper(store.location, lease, ours=reserved is None)
        with contextlib.ExitStack() as undo:
            undo.callback(self.keeper.leave)
            store.events.add("board_taken", key, f"lease {lease.token}, {purpose}")
            undo.pop_all()

    @property
    def lease(self) -> Lease:
        return self.keeper.lease

    @property
    def over(self) -> str:
        """Why it has to be left, as far as is known; "" while it is ours."""
        return self.keeper.reason if self.keeper.lost.is_set() else self._over

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
        trouble = self.keeper.find_end(self._store)
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
        self.keeper.close()
