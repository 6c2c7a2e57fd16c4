"""The interface of a run's board: this machine, or a leased board.

This machine is `farm.crew.local`; a leased board is `farm.crew.leased_site`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from farm.connectivity.tracker import Tracker
from farm.crew.health import Kind
from farm.errors import LeaseOverError, TransientError, UnavailableError
from farm.measure.blocking import start_loop
from farm.values import Lease

# Fields of a description that must not change with the board: code and figures would not fit another one.
COMMON = ("board_type", "architecture", "simulated")


# Asked only after a failure on a board, or before one is taken.
_TRACKER_TIMEOUT_S = 2.0


def find_difference(found: Mapping[str, Any], like: Mapping[str, Any]) -> str:
    """Explain how the description `found` differs from the required one; "" where it does not."""
    differing = (
        f"its {field} is {found[field]}, not {value}" for field, value in like.items() if found[field] != value
    )
    return next(differing, "")


def find_outage(tracker: Tracker | None) -> str:
    """Explain why no board at all can be reached; "" where the tracker answers. No board is to blame for that."""
    if tracker is None:
        return "the farm's services are not up yet"
    try:
        start_loop().call(tracker.fetch_summary(_TRACKER_TIMEOUT_S))
    except (TransientError, UnavailableError) as error:
        return f"the farm's services do not answer ({error.message})"
    return ""


class Place(Protocol):
    """Receives observations of a board."""

    @property
    def key(self) -> str:
        pass

    @property
    def can_change(self) -> bool:
        """Whether another board may replace a lost one."""

    def confirm(self) -> bool:
        """Ask whether the board is still ours: failures on one that is not say nothing about it."""

    def note_refusal(self, error: LeaseOverError) -> None:
        """Leave a board that knows a later lease than ours, and make the next lease later than that."""

    def observe(self, kind: Kind, detail: str) -> None:
        """Report an observation of the board, where the farm keeps such things."""


class Site(Place, Protocol):
    """One board at a time, and how it is reached. Not thread-safe.

    `tracker` may change with `ensure_alive`; `key` is the board's name there, of the last one while there is none;
    `lease` is None where none is needed, or none is held.
    """

    @property
    def tracker(self) -> Tracker:
        pass

    @property
    def lease(self) -> Lease | None:
        pass

    @property
    def has_board(self) -> bool:
        """Whether there is a usable board now."""

    def ensure_alive(self) -> list[str]:
        """Restart what died, replace a lost board; return what was restarted. Does not wait for a board.

        Raises UnavailableError or DeadlineError after too long without success.
        """
