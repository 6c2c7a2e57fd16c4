"""The interface of a run's board (this machine, or a leased board), and whether a failure there speaks against it.

This machine is `farm.crew.local`; a leased board is `farm.crew.leased_site`. The protocol assigns each status to a
side. Here the side changes only where the board was no longer ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from device_agent.protocol import Outcome, PinReport, PinStatus, Status
from farm.connectivity.tracker import Tracker
from farm.crew.health import Kind, find_kind
from farm.errors import (
    BoardBusyError,
    BoardUnsafeError,
    FarmError,
    InvalidReplyError,
    LeaseOverError,
    TransientError,
    UnavailableError,
    UsageError,
)
from farm.measure.blocking import start_loop
from farm.values import Lease

# Fields of a description that must not change with the board: code and figures would not fit another one.
COMMON = ("board_type", "architecture", "simulated")

# Asked only after a failure on a board, or before one is taken.
_TRACKER_TIMEOUT_S = 2.0
# Statuses of a point that was not reached: the board may not have it, or not now. Never the candidate's fault.
_PIN_TROUBLE = {
    PinStatus.REFUSED: ("the board does not have the operating point", UsageError),
    PinStatus.UNAVAILABLE: ("the board's clocks cannot be held", UnavailableError),
    PinStatus.BUSY: ("another client holds the board's clocks", TransientError),
    PinStatus.FAILED: ("the operating point was not reached", TransientError),
}


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


def pin_outcome(report: PinReport, board: str, simulated: bool = False) -> Outcome:
    """Return the outcome of a trial whose point was not reached."""
    return Outcome(
        Status.CLOCK_DRIFTED, f"{_PIN_TROUBLE[report.status][0]}: {report.message}", board=board, simulated=simulated
    )


def pin_error(report: PinReport, board: str) -> FarmError:
    """Return the error for a caller that cannot go on without the point."""
    words, kind = _PIN_TROUBLE[report.status]
    return kind(f"{board}: {words}: {report.message}")


@dataclasses.dataclass(frozen=True)
class _Trouble:
    """A failure that is chance once and not several times in a row; `kind` is how it is observed, None: not at all.

    `reason` is why the board should be left, "" where its health decides; with `lasts` it will not pass soon.
    """

    times: int
    kind: Kind | None
    reason: str
    text: str
    lasts: bool = False


# One throttled trial may be the room's warm afternoon; this many in a row are the board's cooling.
_HOT = _Trouble(3, Kind.THROTTLED, "", "{times} trials in a row: {message}")
_DRIFTING = _Trouble(3, Kind.DRIFTED, "its clocks do not hold", "its clocks moved in {times} trials in a row")
_UNPINNED = _Trouble(2, Kind.MISFIT, "its clocks could not be held", "{times} points in a row: {message}", True)
# A limit of the board, or another client's hold, is no fault of the board.
_REFUSING = dataclasses.replace(_UNPINNED, kind=None)
# No one's fault once; a probe decides.
_FAILING = _Trouble(3, Kind.FAULT, *("{times} calls in a row failed there: {message}",) * 2)
_BUSY = dataclasses.replace(_FAILING, kind=None)


@dataclasses.dataclass(frozen=True)
class BoardDoubt:
    """Why to leave a board if there are others; with `lasts` the cause will not pass soon."""

    reason: str
    lasts: bool


class Blame:
    """Judges the outcomes of one run. Not thread-safe. `doubt` is set once the board should be left."""

    def __init__(self, site: Place) -> None:
        self.doubt: BoardDoubt | None = None
        self._site = site
        self._trouble: _Trouble | None = None
        self._key, self._times = "", 0

    def judge(self, outcome: Outcome, pin: PinStatus = PinStatus.OK, *, blameless: bool = False) -> Outcome:
        """Return the outcome as it is to be kept. `pin`: the result of setting the operating point.

        `blameless`: a failure says nothing about the board.
        """
        if outcome.status in (Status.BOARD_LOST, Status.FARM_ERROR) and not self._site.confirm():
            # A later lease, or our own release, ended it: neither the board nor the candidate is to blame.
            return dataclasses.replace(
                outcome, status=Status.FARM_ERROR, message=f"the board was given up meanwhile: {outcome.message}"
            )
        if outcome.status is Status.BOARD_LOST:
            self._site.observe(Kind.FAULT, outcome.message)
        if outcome.status is not Status.NOISY or outcome.latency_s:  # else nothing was run
            self._count(_find_trouble(outcome, pin, blameless), outcome.message)
        return outcome

    def judge_error(self, error: FarmError) -> Outcome:
        """Return the outcome of a trial whose board's session ended with this error.

        Raises the error where this board is unusable and no other one is left.
        """
        if isinstance(error, BoardUnsafeError | InvalidReplyError):
            if isinstance(error, BoardUnsafeError) and not self._site.can_change:
                raise error
            self._site.observe(find_kind(error), error.message)
            self._count(_FAILING, error.message)
            return Outcome(Status.FARM_ERROR, error.message)
        if isinstance(error, LeaseOverError):
            self._site.note_refusal(error)
        # Transient errors count against the board, except a busy board. Permanent ones count against the farm.
        busy = isinstance(error, BoardBusyError)
        status = Status.BOARD_LOST if isinstance(error, TransientError) and not busy else Status.FARM_ERROR
        return self.judge(Outcome(status, str(error), board=self._site.key.partition("/")[2]), blameless=busy)

    def _count(self, trouble: _Trouble | None, message: str) -> None:
        """Count the latest outcome; report a series that is long enough."""
        again = trouble is self._trouble and self._key == self._site.key
        self._times = self._times + 1 if again else 1
        self._trouble, self._key = trouble, self._site.key
        if trouble is None or self._times < trouble.times:
            return
        self._trouble = None
        words = {"times": trouble.times, "message": message}
        if trouble.kind is not None:
            self._site.observe(trouble.kind, trouble.text.format(**words))
        if trouble.reason:
            self.doubt = BoardDoubt(trouble.reason.format(**words), trouble.lasts)


def _find_trouble(outcome: Outcome, pin: PinStatus, blameless: bool) -> _Trouble | None:
    if pin is not PinStatus.OK:
        return _UNPINNED if pin in (PinStatus.UNAVAILABLE, PinStatus.FAILED) else _REFUSING
    match outcome.status:
        case Status.THROTTLED:
            return _HOT
        case Status.CLOCK_DRIFTED:
            return _DRIFTING
        case Status.FARM_ERROR:
            return _BUSY if blameless else _FAILING
    return None
