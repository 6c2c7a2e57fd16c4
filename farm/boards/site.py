"""Where a sweep's or a script's board is: what they need of it, whether it is this machine or a leased board.

The host's own is `farm.boards.local`; a leased one is found and kept in `farm.boards.leased_site`.
"""

from __future__ import annotations

from typing import Protocol

from farm.boards.health import Kind
from farm.errors import LeaseOverError
from farm.reach.tracker import Tracker
from farm.values import Lease


class Site(Protocol):
    """One board at a time, and the way to it. Not thread-safe."""

    @property
    def tracker(self) -> Tracker:
        """Where the board is asked for; may change with `ensure_alive`."""

    @property
    def key(self) -> str:
        """The board's name at the tracker; of the last one while there is none."""

    @property
    def lease(self) -> Lease | None:
        """The lease that the board is used under; None where none is needed, or none is held."""

    @property
    def has_board(self) -> bool:
        """Whether there is a board to work on now."""

    @property
    def can_change(self) -> bool:
        """Whether another board may take the place of one that is lost."""

    def ensure_alive(self) -> list[str]:
        """Start again what died, take another board where ours is lost; says what was started. Waits for no board.

        Raises UnavailableError or DeadlineError where that has been in vain for too long.
        """

    def confirm(self) -> bool:
        """Whether the board is still ours, asked anew: what went wrong on one that is not says nothing about it."""

    def note_refusal(self, error: LeaseOverError) -> None:
        """A board knows a later lease than ours: leave it, and see that the next lease is later than that."""

    def observe(self, kind: Kind, detail: str) -> None:
        """Keep what a run saw of its board, where the farm keeps such things."""
