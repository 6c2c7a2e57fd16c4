"""One board held for a sweep: connected, pinned, asked to run programs; found again, or replaced, when it is lost.

Which point comes next, and what an answer means, is decided elsewhere (`runner.py`, `visits.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from device_agent.protocol import (
    Description,
    MeasureSpec,
    OperatingPoint,
    Outcome,
    PinReport,
    PinStatus,
    PowerSpec,
    RunSpec,
    Status,
)
from farm.boards import visits
from farm.boards.health import Kind, find_kind
from farm.boards.site import COMMON, Site, find_difference
from farm.errors import (
    BoardLostError,
    BoardUnsafeError,
    DeadlineError,
    FarmError,
    LeaseOverError,
    PermanentError,
    TransientError,
    UnavailableError,
    UsageError,
)
from farm.measure.arrays import Arrays
from farm.measure.session import BoardSession

# Another client of the board is waited for at first as `farm tune` waits for it.
_CONNECT_TIMEOUT_S = 60.0
# In pieces, between which we look whether we are told to end.
_REQUEST_TIMEOUT_S = 3.0
_LOOK_S = 0.25
# A board that hangs up again and again has a fault that no further try mends.
_TRIES = 3
# A look at the thermal zones; the power beside it is not wanted.
_GLANCE = PowerSpec(seconds=0.05, rate_hz=20.0)


T = TypeVar("T")


class StoppedError(Exception):
    """The sweep was told to end: what a board answers no longer matters."""


class HeldBoard:
    """The board of a site, on one thread but for `cut`. `description` is None before `open`."""

    def __init__(self, site: Site, stopping: threading.Event, note: Callable[[str], None]) -> None:
        """`stopping` ends every wait with StoppedError; `note` is told what is waited for."""
        self.site = site
        self.description: Description | None = None
        self._stopping, self._note = stopping, note
        self._session: BoardSession | None = None
        self._like: dict[str, Any] = {}
        self._pinned: OperatingPoint | None = None

    @property
    def name(self) -> str:
        """The board's name."""
        return self.site.key.partition("/")[2]

    def open(self) -> Description:
        """Connect, waiting for the board, or for another one of its type where it is gone; returns its description.

        Raises UnavailableError, DeadlineError, BoardUnsafeError, StoppedError.
        """
        self.close()
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        tries = 0
        while True:
            self._wait_for_board()
            try:
                session = BoardSession(self.site.tracker, self.site.key, _REQUEST_TIMEOUT_S, self.site.lease)
                break
            except BoardUnsafeError as error:
                self.site.observe(find_kind(error), error.message)
                raise
            except (TransientError, LeaseOverError) as error:
                self.check_running()
                if isinstance(error, LeaseOverError):
                    self.site.note_refusal(error)
                if isinstance(error, DeadlineError) and time.monotonic() < deadline:
                    continue  # another client has it: that is nobody's fault
                self._lose(error)
                tries += 1
                if tries == _TRIES:
                    raise
                self._note(f"{self.name}: {error.message}; trying again")
                deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        self._session = session
        self.check_running()  # told to end while there was nothing to cut yet
        self._require_alike(session.description)
        self.description = session.description
        return session.description

    def read_temperature_c(self) -> float | None:
        """The hottest zone now; None where the board has none. Raises what `run` raises."""
        trace = self._ask(lambda session: session.power(_GLANCE))
        return visits.read_temperature_c(trace.before.temperature_c if trace.before else None)

    def pin(self, point: OperatingPoint) -> PinReport:
        """Hold the clocks at a point; an empty one lets go of what was held.

        Raises UsageError for what the board lacks, UnavailableError where nothing can be held, BoardUnsafeError,
        TransientError where it did not work this time, and what `run` raises.
        """
        if point == self._pinned:
            return PinReport(PinStatus.OK, reached=point)
        if point.is_empty and self._pinned is None:
            return PinReport(PinStatus.OK)
        report = self._ask(lambda session: session.unpin() if point.is_empty else session.pin(point))
        self._pinned = point if report.status is PinStatus.OK and not point.is_empty else None
        _require_held(self.site, report)
        return report

    def run(self, spec: RunSpec, program: bytes, inputs: Mapping[str, Any]) -> tuple[Outcome, Arrays]:
        """Run a program. Raises BoardLostError where the board is gone (`open` finds it again), StoppedError."""
        outcome, outputs = self._ask(lambda session: session.run_model(spec, program, inputs))
        if outcome.status is Status.BOARD_LOST:
            raise BoardLostError(outcome.message)
        return outcome, outputs

    def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        """Time one kernel. Raises what `run` raises."""
        outcome = self._ask(lambda session: session.measure(spec, library))
        if outcome.status is Status.BOARD_LOST:
            raise BoardLostError(outcome.message)
        return outcome

    def check_running(self) -> None:
        """Raise StoppedError where the sweep was told to end."""
        if self._stopping.is_set():
            raise StoppedError

    def pause(self, seconds: float) -> None:
        """Wait. Raises StoppedError."""
        self._stopping.wait(seconds)
        self.check_running()

    def cut(self) -> None:
        """End the call under way, from another thread; `stopping` is to be set before."""
        if (session := self._session) is not None:
            session.cut()

    def close(self) -> None:
        """Give the session back; the board's agent restores the clocks. The site is its owner's."""
        session, self._session, self._pinned = self._session, None, None
        if session is not None:
            session.close()

    def _ask(self, call: Callable[[BoardSession], T]) -> T:
        self.check_running()
        if self._session is None:
            raise BoardLostError(f"there is no session with {self.name}")
        try:
            return call(self._session)
        except FarmError as error:
            self.check_running()
            if isinstance(error, PermanentError) and self.site.confirm():
                raise
            if isinstance(error, BoardUnsafeError) and not self.site.can_change:
                self.close()
                raise
            # Either the connection is gone, or the board was given up meanwhile.
            self._lose(error)
            raise BoardLostError(error.message, error.hint) from error

    def _lose(self, error: FarmError) -> None:
        """Note what was seen of a board that is still ours."""
        self.close()
        if isinstance(error, TransientError | BoardUnsafeError) and self.site.confirm():
            self.site.observe(find_kind(error), error.message)

    def _wait_for_board(self) -> None:
        """Wait until the site has a board. Its own deadline ends this (UnavailableError)."""
        while True:
            self.check_running()
            self.site.ensure_alive()
            if self.site.has_board:
                return
            time.sleep(_LOOK_S)

    def _require_alike(self, description: Description) -> None:
        found = {field: getattr(description, field) for field in COMMON}
        self._like = self._like or found
        if different := find_difference(found, self._like):
            self.close()
            raise UnavailableError(f"{self.name} cannot go on with this sweep: {different}")


def _require_held(site: Site, report: PinReport) -> None:
    """Turn a report that is not ok into the error that it stands for."""
    name = site.key.partition("/")[2]
    match report.status:
        case PinStatus.OK:
            return
        case PinStatus.REFUSED:
            raise UsageError(f"{name} does not have this operating point: {report.message}")
        case PinStatus.UNAVAILABLE:
            raise UnavailableError(f"the clocks of {name} cannot be held: {report.message}")
        case PinStatus.UNSAFE:
            site.observe(Kind.UNSAFE, report.message)
            raise BoardUnsafeError(
                f"the clocks of {name} could not be restored: {report.message}",
                "Look at it; then, on the board: device-agent clocks restore",
            )
        case PinStatus.BUSY:
            raise TransientError(f"somebody else holds the clocks of {name}: {report.message}")
    raise TransientError(f"the clocks of {name} could not be held: {report.message}")
