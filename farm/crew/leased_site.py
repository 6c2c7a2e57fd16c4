"""A leased board of the fleet as the place where a run works: waited for, taken, kept, given up when unfit, replaced.

Which boards may be taken is decided in `choice`, whose turn it is in `queue_rules`; what is seen of one goes to the
store, where `health` decides what it means.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from farm.closing import Closing
from farm.connectivity.tracker import Tracker
from farm.crew.choice import BoardChoice, find_left_out, find_unfit, plan_choice, plan_pool, require_hope
from farm.crew.health import Kind
from farm.crew.leased_board import LeasedBoard
from farm.crew.queue_place import QueuePlace, explain, read_queue
from farm.crew.site import find_trouble
from farm.errors import BoardUnsafeError, LeaseOverError, TransientError, UnavailableError
from farm.processes.machine import name_user
from farm.store import Store
from farm.store.leases import LEASE_TTL_S
from farm.store.standing import is_reserved_by
from farm.values import Lease, WorkKind

# How often the store is looked at: for a free board, and for whether ours is still fit.
_LOOK_S = 0.5
# How often a user hears that a board is still waited for, where the reasons stay the same.
_REMIND_S = 30.0


class Reach(Protocol):
    """What is needed of the farm's services."""

    @property
    def tracker(self) -> Tracker:
        """The tracker at which boards within reach are asked for."""


class FleetSite(Closing):
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
        """A board is looked for by `ensure_alive`, for up to `wait_s`; `note` is told what is waited for, and which
        board it is. It waits in the store's queue, until `close`.

        Raises UsageError where there is none to wait for; `ensure_alive` UnavailableError after `wait_s` with the
        reason of each, or at once where an operator has to act first (BoardUnsafeError where all are unsafe).
        """
        self._services, self._store = services, store
        self._board_type, self._purpose, self._ttl_s = board_type, purpose, ttl_s
        self._wait_s, self._note = wait_s, note
        rows = store.fetch_boards()
        self._pool = plan_pool(rows, board_type, name)
        self._left_out = "" if name else find_left_out(rows, board_type, self._pool)
        # The last one stays known, for what is still to be told of it.
        self._board: LeasedBoard | None = None
        self.has_board = False
        self._look_at = 0.0
        self._noted, self._remind_at = "", 0.0
        self._kind = WorkKind.of(purpose)
        self._place = QueuePlace(store, self._kind, purpose, board_type, self._pool)
        self._begin_waiting()

    @property
    def tracker(self) -> Tracker:
        """See `Site`."""
        return self._services.tracker

    @property
    def name(self) -> str:
        """The board's name; of the last one while there is none."""
        return self.key.partition("/")[2]

    @property
    def key(self) -> str:
        """See `Site`."""
        return f"{self._board_type}/{self._pool[0]}" if self._board is None else self._board.key

    @property
    def lease(self) -> Lease | None:
        """See `Site`."""
        return self._board.lease if self._board is not None and self.has_board else None

    def ensure_alive(self) -> list[str]:
        """See `Site`. What it does is in the store's events."""
        if self._board is not None and self._board.over:
            self._leave(self._board.over)
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + _LOOK_S
        if self._board is None or not self.has_board:
            self._look_for_board()
        elif reason := self._board.find_end({row["name"]: row for row in self._store.fetch_boards()}):
            self._leave(reason)
        return []

    def confirm(self) -> bool:
        """See `Site`."""
        if self._board is None or not self.has_board:
            return False
        if not self._board.confirm():
            self._leave(self._board.over)
        return self.has_board

    def note_refusal(self, error: LeaseOverError) -> None:
        """See `Site`."""
        if self._board is not None:
            self._board.note_refusal(error)
            self._leave(error.message)

    def observe(self, kind: Kind, detail: str) -> None:
        """See `Site`. What makes the board unfit has it given up at the next look."""
        if self._board is not None:
            self._board.observe(kind, detail)
        self._look_at = 0.0

    def close(self) -> None:
        """Give the board back, or the place in the queue. Safe to call twice."""
        self._place.leave()
        if self._board is not None:
            self._board.give_back()
        self.has_board = False

    def _begin_waiting(self) -> None:
        self._deadline = time.monotonic() + self._wait_s
        self._place.begin_anew()

    def _leave(self, reason: str) -> None:
        """Let go of the board and look for another one from now on."""
        if self._board is not None and self.has_board:
            self._board.note_leaving(reason)
            self._note(f"left {self.name}: {reason}")
            self.close()
            self._begin_waiting()
            self._look_at = 0.0

    def _look_for_board(self) -> None:
        """Take a board if one is free. Raises UnavailableError once that was in vain for `wait_s`."""
        rows = self._store.fetch_boards()
        require_hope(rows, self._pool, self._board_type)
        choice = plan_choice(rows, self._pool)
        if trouble := find_trouble(self.tracker):
            self._place.leave()  # others may have what we could not use
            choice = choice.without(dict.fromkeys(choice.free, trouble))
        elif reserved := self._find_reserved(rows):
            choice = BoardChoice(reserved, {})
        else:
            choice = self._choose(rows, choice)
        for name in choice.free:
            try:
                key = f"{self._board_type}/{name}"
                self._board = LeasedBoard(
                    self._store,
                    key,
                    self._purpose,
                    lambda: self.tracker,
                    self._ttl_s,
                    self._kind,
                    self._place.number,
                )
            except (TransientError, UnavailableError, BoardUnsafeError) as error:  # somebody was faster
                choice = choice.without({name: error.message})
                continue
            self._place.end()
            self.has_board = True
            self._note(f"working on {name}")
            self._noted = ""
            return
        if time.monotonic() >= self._deadline:
            raise UnavailableError(
                f"no {self._board_type} became free within {self._wait_s:g} s ({choice.text})"
                + (f"; {self._left_out}" if self._left_out else ""),
                "`farm board list` shows who holds what; --wait 10m waits longer.",
            )
        if choice.text != self._noted or time.monotonic() >= self._remind_at:
            self._noted, self._remind_at = choice.text, time.monotonic() + _REMIND_S
            left = f", for {self._deadline - time.monotonic():.0f} s more at most"
            self._note(f"waiting for a board{left}: {choice.text}" + (f"; {self._left_out}" if self._left_out else ""))

    def _find_reserved(self, rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Boards that are reserved for who we are: they are ours already, whoever waits."""
        mine = [row for row in rows if row["name"] in self._pool and is_reserved_by(row, name_user())]
        return tuple(row["name"] for row in mine if not find_unfit(row))

    def _choose(self, rows: Sequence[Mapping[str, Any]], choice: BoardChoice) -> BoardChoice:
        """Of the boards that can be taken, those whose turn it is for us."""
        self._place.stay()
        queue, plan = read_queue(self._store, rows)
        mine = next((each for each in queue.requests if each.id == self._place.number), None)
        if mine is None:  # our sign came too late: at the next look
            return choice.without(dict.fromkeys(choice.free, "the request for it is being renewed"))
        return choice.without(explain(mine, queue, plan, choice.free))
