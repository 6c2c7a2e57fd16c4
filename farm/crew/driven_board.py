"""The board of a site for coroutines: connected, reconnected or replaced when it is lost.

To cancel a coroutine that waits ends its call on the board. `held_board` has the session; here are leases and blame.
`visits` plans calls and reads answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio

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
from farm.crew import held_board, visits
from farm.crew.held_board import Address, Ended, HeldBoard, Job, Request
from farm.crew.site import COMMON, Blame, Site, pin_error, pin_outcome
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
from farm.points.values import Estimate

# At first another client of the board is waited for as long as by `farm tune`.
_CONNECT_TIMEOUT_S = 60.0
# In pieces, between which other boards are served.
_REQUEST_TIMEOUT_S = 3.0
_LOOK_S = 0.25
# A board that hangs up this often has a fault that no retry repairs.
_TRIES = 3
# For the thermal zones; the power is not used.
_GLANCE = PowerSpec(seconds=0.05, rate_hz=20.0)


class DrivenBoard:
    """The board of a site, which its owner closes. All boards must be like the first one. Not thread-safe."""

    def __init__(self, site: Site, note: Callable[[str], None]) -> None:
        """`note` gets what is waited for."""
        self.description: Description | None = None
        # How long the latest job occupied the board.
        self.board_s = 0.0
        self._like: Mapping[str, Any] = {}
        self._site, self._blame = site, Blame(site)
        self._note = note
        self._held: HeldBoard | None = None

    @property
    def name(self) -> str:
        return self._site.key.partition("/")[2]

    def require_like(self, like: Mapping[str, Any]) -> None:
        """From the next session on, every board must match this description."""
        self._like = like

    async def take(self) -> None:
        """Wait until the site has a board. Raises UnavailableError after the site's own deadline, TransientError."""
        while not self.look():
            await anyio.sleep(_LOOK_S)
        self._held = self._held or HeldBoard()

    async def open(self, timeout_s: float = _CONNECT_TIMEOUT_S) -> Description:
        """Connect, waiting for the board, or for another one of its type where it is gone; return its description.

        Raises UnavailableError, DeadlineError, BoardUnsafeError.
        """
        deadline = time.monotonic() + timeout_s
        tries = 0
        while True:
            await self.take()
            try:
                found = await self._open()
                break
            except BoardUnsafeError as error:
                self._blame.judge_error(error)
                raise
            except (TransientError, LeaseOverError) as error:
                if isinstance(error, DeadlineError) and time.monotonic() < deadline:
                    continue  # another client has it: no fault
                self._blame.judge_error(error)
                tries += 1
                if tries == _TRIES:
                    raise
                self._note(f"{self.name}: {error.message}; trying again")
                deadline = time.monotonic() + timeout_s
        self._like = self._like or {field: getattr(found, field) for field in COMMON}
        self.description = found
        return found

    async def read_temperature_c(self) -> float | None:
        """Return the hottest zone; None where the board has none. Raises what `run` raises."""
        ended = await self._ask(lambda session: session.ask(lambda board: board.power(_GLANCE)))
        before = ended.result.before
        return visits.read_temperature_c(before.temperature_c if before else None)

    async def read_power(self, seconds: float) -> tuple[Estimate | None, str]:
        """Return the total power as the board is, and what is wrong with it. Raises what `run` raises."""
        ended = await self._ask(lambda session: session.ask(lambda board: board.power(PowerSpec(seconds))))
        window = ended.result.window
        return visits.read_total(window), window.note if window else ""

    async def pin(self, point: OperatingPoint) -> PinReport:
        """Pin the clocks to a point; an empty one releases them.

        Raises UsageError for what the board lacks, UnavailableError where nothing can be pinned, BoardUnsafeError,
        TransientError where it failed this time, and what `run` raises.
        """
        report: PinReport = (await self._ask(lambda session: session.pin(point))).result
        if report.status is not PinStatus.OK:
            self._blame.judge(pin_outcome(report, self.name), report.status)
            raise pin_error(report, self.name)
        return report

    async def run(self, spec: RunSpec, program: bytes, inputs: Mapping[str, Any]) -> tuple[Outcome, Arrays]:
        """Run a program. Raises BoardLostError where the board is gone (`open` reconnects).

        Raises PermanentError where the agent failed, BoardUnsafeError where there is no other board to take.
        """
        ended = await self._ask(held_board.running(spec, program, inputs))
        return self._judge(ended.result), ended.outputs

    async def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        """Time one kernel. Raises what `run` raises."""
        return self._judge((await self._ask(held_board.measuring(spec, library))).result)

    def hang_up(self) -> None:
        """End the session soon, without waiting. `close` must follow."""
        if self._held is not None:
            self._held.hang_up()

    def close(self) -> None:
        """Close the session; the board's agent ends what runs there and restores the clocks. Safe to call twice."""
        held, self._held = self._held, None
        if held is not None:
            held.stop()

    async def _open(self) -> Description:
        ended = await self._call(held_board.opening(_REQUEST_TIMEOUT_S))
        if isinstance(ended.result, FarmError):
            raise ended.result
        found: Description = ended.result
        return found

    def _judge(self, outcome: Outcome) -> Outcome:
        judged = self._blame.judge(outcome)
        if outcome.status is Status.BOARD_LOST or not self._site.has_board:
            self.close()
            raise BoardLostError(judged.message)
        return judged

    async def _ask(self, job: Job) -> Ended:
        """Return a job's answer; any error ends the session."""
        ended = await self._call(job)
        if isinstance(ended.result, FarmError):
            raise self._judge_error(ended.result, ended.had_session)
        return ended

    def _judge_error(self, error: FarmError, had_session: bool) -> FarmError:
        """Return the error to raise for one that ended a session."""
        if isinstance(error, BoardUnsafeError):
            self._blame.judge_error(error)
            return error
        if not had_session or (isinstance(error, PermanentError) and self._site.confirm()):
            return error
        # The connection is gone, or the board was released meanwhile. Raises where no other one may replace it.
        self._blame.judge_error(error)
        return BoardLostError(error.message, error.hint)

    async def _call(self, job: Job) -> Ended:
        """Carry out a job. Raises TransientError where the loop cannot start."""
        held = self._held = self._held or HeldBoard()
        where = Address(self._site.tracker, self._site.key, self._site.lease)
        ended = await held.call(Request(where, job, like=self._like))
        self.board_s = ended.board_s
        return ended

    def look(self) -> bool:
        """Check that the board may still be used, or replace it; return whether there is one.

        Raises UnavailableError after too long without one.
        """
        self._site.ensure_alive()
        return self._site.has_board
