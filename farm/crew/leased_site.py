"""A leased board of the fleet as a run's site: waited for, taken, kept, left when unfit, replaced.

`choice` selects boards, `queue_rules` whose turn it is; observations go to the store, where `health` judges them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from farm.closing import Closing
from farm.connectivity.services import Services
from farm.connectivity.tracker import Tracker
from farm.crew.choice import BoardChoice, find_left_out, find_unusable, plan_choice, plan_pool, require_usable
from farm.crew.health import Kind
from farm.crew.leased_board import LeasedBoard
from farm.crew.queue_entry import QueueEntry
from farm.crew.site import find_outage
from farm.errors import BoardUnsafeError, LeaseOverError, TransientError, UnavailableError
from farm.processes.machine import name_user
from farm.store import Store
from farm.values import Lease, WorkKind

# How often to look for a free board, or at the health of ours.
_LOOK_S = 0.5
# How often to repeat that a board is still waited for.
_REMIND_S = 30.0


class FleetSite(Closing):
    """One leased board of a type, or the named one; another of its kind when that is lost. See `Site`.

    Use as a context manager; the lease is returned at the end. Not thread-safe, as its store.
    """

    can_change = True

    def __init__(
        self,
        services: Services,
        store: Store,
        board_type: str,
        name: str | None,
        purpose: str,
        wait_s: float,
        note: Callable[[str], None],
    ) -> None:
        """`ensure_alive` looks for a board for up to `wait_s`; `note` gets what is waited for and which board was
        taken. The queue entry lasts until `close`.

        Raises UsageError where there is no board to wait for. `ensure_alive` raises UnavailableError after `wait_s`
        with the reason of each, or at once where an operator has to act first (BoardUnsafeError where all are unsafe).
        """
        self._services, self._store = services, store
        self._board_type, self._purpose = board_type, purpose
        self._wait_s, self._note = wait_s, note
        rows = store.boards.fetch()
        self._pool = plan_pool(rows, board_type, name)
        self._left_out = "" if name else find_left_out(rows, board_type, self._pool)
        # The last one stays known, for late reports on it.
        self._board: LeasedBoard | None = None
        self.has_board = False
        self._look_at = 0.0
        self._noted, self._remind_at = "", 0.0
        self._kind = WorkKind.of(purpose)
        self._place = QueueEntry(store, self._kind, purpose, board_type, self._pool)
        self._begin_waiting()

    @property
    def tracker(self) -> Tracker:
        return self._services.tracker

    @property
    def name(self) -> str:
        """The board's name; of the last one while there is none."""
        return self.key.partition("/")[2]

    @property
    def key(self) -> str:
        return f"{self._board_type}/{self._pool[0]}" if self._board is None else self._board.key

    @property
    def lease(self) -> Lease | None:
        return self._board.lease if self._board is not None and self.has_board else None

    def ensure_alive(self) -> list[str]:
        """See `Site`. Its steps are in the store's events."""
        if self._board is not None and self._board.over:
            self._leave(self._board.over)
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + _LOOK_S
        if self._board is None or not self.has_board:
            self._look_for_board()
        elif reason := self._board.find_end({row.name: row for row in self._store.boards.fetch()}):
            self._leave(reason)
        return []

    def confirm(self) -> bool:
        if self._board is None or not self.has_board:
            return False
        if not self._board.confirm():
            self._leave(self._board.over)
        return self.has_board

    def note_refusal(self, error: LeaseOverError) -> None:
        if self._board is not None:
            self._board.note_refusal(error)
            self._leave(error.message)

    def observe(self, kind: Kind, detail: str) -> None:
        """See `Site`. A board made unfit is left at the next look."""
        if self._board is not None:
            self._board.observe(kind, detail)
        self._look_at = 0.0

    def close(self) -> None:
        """Return the board, or the place in the queue. Safe to call twice."""
        self._place.leave()
        if self._board is not None:
            self._board.give_back()
        self.has_board = False

    def _begin_waiting(self) -> None:
        self._deadline = time.monotonic() + self._wait_s
        self._place.since = time.monotonic()

    def _leave(self, reason: str) -> None:
        """Leave the board and look for another one."""
        if self._board is not None and self.has_board:
            self._board.note_leaving(reason)
            self._note(f"left {self.name}: {reason}")
            self.close()
            self._begin_waiting()
            self._look_at = 0.0

    def _look_for_board(self) -> None:
        """Take a free board. Raises UnavailableError after `wait_s` without one."""
        rows = self._store.boards.fetch()
        require_usable(rows, self._pool, self._board_type)
        choice = plan_choice(rows, self._pool)
        mine = [row for row in rows if row.name in self._pool and row.is_reserved_by(name_user())]
        if trouble := find_outage(self.tracker):
            self._place.leave()  # others may be able to use it
            choice = choice.without(dict.fromkeys(choice.free, trouble))
        elif reserved := [row for row in mine if not find_unusable(row)]:  # they need no queue
            choice = BoardChoice(tuple(row.name for row in reserved), {})
        else:
            choice = choice.without(self._place.explain(rows, choice.free))
        for name in choice.free:
            try:
                key = f"{self._board_type}/{name}"
                self._board = LeasedBoard(
                    self._store, key, self._purpose, lambda: self.tracker, self._kind, self._place.number
                )
            except (TransientError, UnavailableError, BoardUnsafeError) as error:  # another was faster
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
