"""A held board on a thread of its own: waited for, found again or replaced when it is lost, told to stop at any time.

Which point comes next, and what an answer means, is decided elsewhere (`crew.py`, `visits.py`).
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
from farm.crew import visits
from farm.crew.blame import Blame, pin_error, pin_outcome
from farm.crew.held_board import HeldBoard
from farm.crew.site import COMMON, Site
from farm.errors import (
    BoardLostError,
    BoardUnsafeError,
    DeadlineError,
    FarmError,
    LeaseOverError,
    PermanentError,
    TransientError,
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


class WorkStoppedError(Exception):
    """The work was told to end: what a board answers no longer matters."""


class ThreadBoard(HeldBoard):
    """The board of a site, which is its owner's to close. All boards must be like the first one."""

    def __init__(self, site: Site, stopping: threading.Event, note: Callable[[str], None]) -> None:
        """`stopping` ends every wait with StoppedError; `note` is told what is waited for."""
        super().__init__(site)
        self._site, self._blame = site, Blame(site)
        self._stopping, self._note = stopping, note

    def open(self, timeout_s: float = _CONNECT_TIMEOUT_S) -> Description:
        """Connect, waiting for the board, or for another one of its type where it is gone; returns its description.

        Raises UnavailableError, DeadlineError, BoardUnsafeError, StoppedError.
        """
        deadline = time.monotonic() + timeout_s
        tries = 0
        while True:
            self._wait_for_board()
            try:
                found = super().open(_REQUEST_TIMEOUT_S)
                break
            except BoardUnsafeError as error:
                self._blame.judge_error(error)
                raise
            except (TransientError, LeaseOverError) as error:
                self.check_running()
                if isinstance(error, DeadlineError) and time.monotonic() < deadline:
                    continue  # another client has it: that is nobody's fault
                self._blame.judge_error(error)
                tries += 1
                if tries == _TRIES:
                    raise
                self._note(f"{self.name}: {error.message}; trying again")
                deadline = time.monotonic() + timeout_s
        self.check_running()  # told to end while there was nothing to cut yet
        self._like = self._like or {field: getattr(found, field) for field in COMMON}
        return found

    def read_temperature_c(self) -> float | None:
        """The hottest zone now; None where the board has none. Raises what `run` raises."""
        before = self.power(_GLANCE).before
        return visits.read_temperature_c(before.temperature_c if before else None)

    def pin(self, point: OperatingPoint) -> PinReport:
        """Hold the clocks at a point; an empty one lets go of what was held.

        Raises UsageError for what the board lacks, UnavailableError where nothing can be held, BoardUnsafeError,
        TransientError where it did not work this time, and what `run` raises.
        """
        try:
            report = super().pin(point)
        except BoardUnsafeError as error:
            self._blame.judge_error(error)
            raise
        if report.status is not PinStatus.OK:
            self._blame.judge(pin_outcome(report, self.name), report.status)
            raise pin_error(report, self.name)
        return report

    def run(self, spec: RunSpec, program: bytes, inputs: Mapping[str, Any]) -> tuple[Outcome, Arrays]:
        """Run a program. Raises BoardLostError where the board is gone (`open` finds it again), StoppedError."""
        outcome, outputs = super().run(spec, program, inputs)
        return self._judge(outcome), outputs

    def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        """Time one kernel. Raises what `run` raises."""
        return self._judge(super().measure(spec, library))

    def check_running(self) -> None:
        """Raise StoppedError where the work was told to end."""
        if self._stopping.is_set():
            raise WorkStoppedError

    def pause(self, seconds: float) -> None:
        """Wait. Raises StoppedError."""
        self._stopping.wait(seconds)
        self.check_running()

    def _judge(self, outcome: Outcome) -> Outcome:
        judged = self._blame.judge(outcome)
        if outcome.status is Status.BOARD_LOST or not self._site.has_board:
            self.close()
            raise BoardLostError(judged.message)
        return judged

    def _ask(self, call: Callable[[BoardSession], T]) -> T:
        self.check_running()
        had_session = self._session is not None
        try:
            return super()._ask(call)
        except FarmError as error:
            self.check_running()
            if not had_session or (isinstance(error, PermanentError) and self._site.confirm()):
                raise
            # Either the connection is gone, or the board was given up meanwhile. Raises where no other one may do.
            self._blame.judge_error(error)
            raise BoardLostError(error.message, error.hint) from error

    def _wait_for_board(self) -> None:
        """Wait until the site has a board. Its own deadline ends this (UnavailableError)."""
        while True:
            self.check_running()
            self._site.ensure_alive()
            if self._site.has_board:
                return
            time.sleep(_LOOK_S)
