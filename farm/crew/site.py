"""Where a sweep's or a script's board is: what they need of it, whether it is this machine or a leased board.

The host's own is `farm.crew.local`; a leased one is found and kept in `farm.crew.leased_site`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from farm.connectivity.tracker import Tracker
from farm.crew.health import Kind
from farm.errors import LeaseOverError, TransientError, UnavailableError
from farm.values import Lease

# Fields of a description that must not change with the board: code and figures would not fit another one.
COMMON = ("board_type", "architecture", "simulated")


# Asked only once something went wrong on a board, or before one is taken.
_TRACKER_TIMEOUT_S = 2.0


def find_difference(found: Mapping[str, Any], like: Mapping[str, Any]) -> str:
    """Why a board with the description `found` cannot stand in for one that is `like`; "" where it can."""
    differing = (
        f"its {field} is {found[field]}, not {value}" for field, value in like.items() if found[field] != value
    )
    return next(differing, "")


def find_trouble(tracker: Tracker | None) -> str:
    """Why no board at all can be reached; "" where the tracker answers. No board is to blame for that."""
    if tracker is None:
        return "the farm's services are not up yet"
    try:
        tracker.fetch_summary(_TRACKER_TIMEOUT_S)
    except (TransientError, UnavailableError) as error:
        return f"the farm's services do not answer ({error.message})"
    return ""


class Where(Protocol):
    """Which board it is, and the way to it."""

    @property
    def tracker(self) -> Tracker:
        """Where the board is asked for; may change with `ensure_alive`."""

    @property
    def key(self) -> str:
        """The board's name at the tracker; of the last one while there is none."""

    @property
    def lease(self) -> Lease | None:
        """The lease that the board is used under; None where none is needed, or none is held."""


class Place(Protocol):
    """Who is told what was seen of a board."""

    @property
    def key(self) -> str:
        """See `Where`."""

    @property
    def can_change(self) -> bool:
        """Whether another board may take the place of one that is lost."""

    def confirm(self) -> bool:
        """Whether the board is still ours, asked anew: what went wrong on one that is not says nothing about it."""

    def note_refusal(self, error: LeaseOverError) -> None:
        """A board knows a later lease than ours: leave it, and see that the next lease is later than that."""

    def observe(self, kind: Kind, detail: str) -> None:
        """Keep what a run saw of its board, where the farm keeps such things."""


class Site(Where, Place, Protocol):
    """One board at a time, and the way to it. Not thread-safe."""

    @property
    def has_board(self) -> bool:
        """Whether there is a board to work on now."""

    def ensure_alive(self) -> list[str]:
        """Start again what died, take another board where ours is lost; says what was started. Waits for no board.

        Raises UnavailableError or DeadlineError where that has been in vain for too long.
        """
