"""A leased board of the fleet as the place where a run works: taken, kept, given up when it is unfit, replaced.

Which boards may be taken is decided in `choice`; what is seen of one goes to the store, where `health` decides what it
means.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from farm.boards.choice import Choice, find_unfit, plan_choice, plan_pool, require_hope
from farm.boards.health import Kind, Observation, decide_by
from farm.boards.lease_keeper import LeaseKeeper
from farm.boards.site import find_trouble
from farm.errors import BoardUnsafeError, LeaseOverError, TransientError, UnavailableError
from farm.processes.machine import name_user
from farm.reach.tracker import Tracker
from farm.store import Store
from farm.store.leases import LEASE_TTL_S
from farm.values import Lease

# How often the store is looked at: for a free board, and for whether ours is still fit.
_LOOK_S = 0.5


class Reach(Protocol):
    """What is needed of the farm's services."""

    @property
    def tracker(self) -> Tracker:
        """The tracker at which boards within reach are asked for."""


class FleetSite:
    """One leased board of a type, or the one that was named; another of its kind when that is lost. See `Site`.

    Use as a context manager; the lease is given back at the end. Not thread-safe, like the store it is given.
    """

    can_change = True

    def __init__(
        self,
        services: Reach,
        store: Store,
        board_type: str,
        name: str | None,
        purpose: str,
        wait_s: float,
        note: Callable[[str], None],
        ttl_s: float = LEASE_TTL_S,
    ) -> None:
        """Take a board, waiting up to `wait_s` for one. `note` is told what is waited for, and which board it is.

        Raises UsageError where there is none to wait for, UnavailableError after `wait_s` with the reason of each, or
        at once where an operator has to act first (BoardUnsafeError where all are unsafe).
        """
        self._services, self._store = services, store
        self._board_type, self._purpose, self._ttl_s = board_type, purpose, ttl_s
        self._wait_s, self._note = wait_s, note
        self._pool = plan_pool(store.fetch_boards(), board_type, name)
        self._keeper: LeaseKeeper | None = None
        self._name = self._pool[0]
        self._look_at = 0.0
        self._noted = ""
        self._begin_waiting()
        while self._keeper is None:
            self._look_for_board()
            if self._keeper is None:
                time.sleep(min(_LOOK_S, max(0.0, self._deadline - time.monotonic())))

    @property
    def tracker(self) -> Tracker:
        """See `Site`."""
        return self._services.tracker

    @property
    def name(self) -> str:
        """The board's name; of the last one while there is none."""
        return self._name

    @property
    def key(self) -> str:
        """See `Site`."""
        return f"{self._board_type}/{self._name}"

    @property
    def lease(self) -> Lease | None:
        """See `Site`."""
        return None if self._keeper is None else self._keeper.lease

    @property
    def has_board(self) -> bool:
        """See `Site`."""
        return self._keeper is not None

    def ensure_alive(self) -> list[str]:
        """See `Site`. What it does is in the store's events."""
        if self._keeper is not None and self._keeper.lost.is_set():
            self._leave(self._keeper.reason)
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + _LOOK_S
        if self._keeper is None:
            self._look_for_board()
        elif reason := self._find_unfit():
            self._leave(reason)
        return []

    def confirm(self) -> bool:
        """See `Site`."""
        if self._keeper is None:
            return False
        if trouble := self._keeper.find_end(self._store) or find_trouble(self.tracker):
            self._leave(trouble)
        return not trouble

    def note_refusal(self, error: LeaseOverError) -> None:
        """See `Site`."""
        self._store.raise_token(error.greatest)
        if self._keeper is not None:
            self._leave(error.message)

    def observe(self, kind: Kind, detail: str) -> None:
        """See `Site`. What makes the board unfit has it given up at the next look."""
        self._store.observe_board(self._name, kind, self._purpose, decide_by(Observation(kind, detail)))
        self._look_at = 0.0

    def close(self) -> None:
        """Give the board back. Safe to call twice."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def __enter__(self) -> FleetSite:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin_waiting(self) -> None:
        self._deadline = time.monotonic() + self._wait_s

    def _leave(self, reason: str) -> None:
        """Let go of the board and look for another one from now on."""
        self._store.add_event("board_left", self.key, reason)
        self._note(f"left {self._name}: {reason}")
        self.close()
        self._begin_waiting()
        self._look_at = 0.0

    def _find_unfit(self) -> str:
        row = next((row for row in self._store.fetch_boards() if row["name"] == self._name), None)
        if row is not None and (self.lease is None or (row["lease"] or {}).get("token") != self.lease.token):
            return "our lease was ended"  # by an operator, say; the keeper would only know at its next renewal
        return find_unfit(row)

    def _look_for_board(self) -> None:
        """Take a board if one is free. Raises UnavailableError once that was in vain for `wait_s`."""
        rows = self._store.fetch_boards()
        require_hope(rows, self._pool, self._board_type)
        choice = plan_choice(rows, self._pool)
        if choice.free and (trouble := find_trouble(self.tracker)):
            choice = Choice((), {**choice.reasons, **dict.fromkeys(choice.free, trouble)})
        for name in choice.free:
            try:
                lease = self._store.acquire_lease(name, _owner(), self._purpose, ttl_s=self._ttl_s)
            except (TransientError, UnavailableError, BoardUnsafeError) as error:  # somebody was faster
                choice = Choice((), {**choice.reasons, name: error.message})
                continue
            self._name, self._keeper = name, LeaseKeeper(functools.partial(Store, self._store.location), lease)
            self._store.add_event("board_taken", self.key, f"lease {lease.token}, {self._purpose}")
            self._note(f"working on {name}")
            self._noted = ""
            return
        if time.monotonic() >= self._deadline:
            raise UnavailableError(
                f"no {self._board_type} became free within {self._wait_s:g} s ({choice.text})",
                "`farm board list` shows who holds what; --wait 10m waits longer.",
            )
        if choice.text != self._noted:
            self._noted = choice.text
            self._note(f"waiting for a board: {choice.text}")


def _owner() -> str:
    """Who we are, so that a person can find us."""
    return f"{name_user(str(os.getuid()))} pid {os.getpid()}"
