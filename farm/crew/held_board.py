"""One board's session on this process's loop, and jobs that are carried out there one after the other.

It has no store and judges nothing: it answers how each job ended. A session needs no thread or process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import RunVar

from device_agent.protocol import Description, MeasureSpec, OperatingPoint, PinReport, PinStatus, RunSpec
from farm.connectivity.tracker import Tracker
from farm.crew.site import find_difference, pin_outcome
from farm.errors import BoardLostError, BoardUnsafeError, FarmError, UnavailableError
from farm.measure.answers import AgentAddress
from farm.measure.arrays import Arrays
from farm.measure.blocking import start_loop
from farm.measure.session import BoardSession
from farm.values import Lease

T = TypeVar("T")
# For the loop to end what runs there.
_STOP_TIMEOUT_S = 3.0
# A tracker, and this loop, are late where a thousand boards are opened together. The wait for room has no deadline of
# its own: those before it have.
_MOST_OPENED_AT_ONCE = 64
_room: RunVar[anyio.Semaphore] = RunVar("room for opening sessions")


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a board is requested, its name there, and its lease."""

    tracker: Tracker | AgentAddress
    key: str
    lease: Lease | None


class Session:
    """A board at an address, opened when it is needed. `description` is None before `open`.

    `where` is used from the next `open` on; `like` are required fields of the description there.
    """

    def __init__(self) -> None:
        self.description: Description | None = None
        self.where: Address | None = None
        self.like: Mapping[str, Any] = {}
        self._session: BoardSession | None = None
        self._of: tuple[str, int | None] | None = None
        self._pinned: OperatingPoint | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a session, as far as is known."""
        return self._session is not None

    @property
    def name(self) -> str:
        return self.where.key.partition("/")[2] if self.where else ""

    async def open(self, timeout_s: float, doubted: bool = False) -> Description:
        """Open a session, waiting for the board; return its description. Raises what `BoardSession.open` raises."""
        where = self.where
        if where is None:
            raise BoardLostError("there is no board yet")
        now = (where.key, where.lease.token if where.lease else None)
        if self._session is None or self.description is None or now != self._of:
            await self.aclose()
            room = _room.get(None) or anyio.Semaphore(_MOST_OPENED_AT_ONCE)
            _room.set(room)
            async with room:
                session = await BoardSession.open(where.tracker, where.key, timeout_s, where.lease, doubted=doubted)
            if different := find_difference(session.description.to_dict(), self.like):
                await session.aclose()
                raise UnavailableError(f"{self.name} cannot go on with this run: {different}")
            self._session, self._of, self.description = session, now, session.description
            self._pinned = OperatingPoint()
        return self.description

    async def pin(self, point: OperatingPoint) -> PinReport:
        """Pin the clocks to a point, unless they are there; an empty one releases them.

        A point that is not reached is a report. Raises BoardUnsafeError, and what `ask` raises.
        """
        if point == self._pinned:
            return PinReport(PinStatus.OK, reached=None if point.is_empty else point)
        self._pinned = None  # in any case the last point is pinned no more
        report = await self.ask(lambda session: session.unpin() if point.is_empty else session.pin(point))
        if report.status is PinStatus.OK:
            self._pinned = point
        if report.status is PinStatus.UNSAFE:
            await self.aclose()
            raise BoardUnsafeError(
                f"the clocks of {self.name} could not be restored: {report.message}",
                "Look at it; then, on the board: device-agent clocks restore",
            )
        return report

    async def ask(self, call: Callable[[BoardSession], Awaitable[T]]) -> T:
        """Call the board. Raises what the session raises, which is over then."""
        if self._session is None:
            raise BoardLostError(f"there is no session with {self.name}")
        try:
            return await call(self._session)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the session; the board's agent ends what runs there and restores the clocks. Safe to call twice."""
        session, self._session, self._pinned = self._session, None, None
        if session is not None:
            await session.aclose()


Job = Callable[[Session], Awaitable[Any]]


def opening(timeout_s: float, doubted: bool = False) -> Job:
    """Open a session; answers its description."""
    return lambda session: session.open(timeout_s, doubted)


def measuring(spec: MeasureSpec, library: bytes) -> Job:
    """Time a kernel; answers the outcome."""
    return lambda session: session.ask(lambda board: board.measure(spec, library))


def running(spec: RunSpec, program: bytes, inputs: Mapping[str, Any]) -> Job:
    """Run a program on inputs, in the order of its arguments; answers the outcome and the outputs."""
    return lambda session: session.ask(lambda board: board.run_model(spec, program, inputs))


@dataclasses.dataclass(frozen=True)
class Request:
    """A job on a board. `point` is set first, and a lost session is reopened.

    `reopen_s`: how long to wait for the board then; None: fail without a session.
    """

    where: Address
    job: Job
    point: OperatingPoint | None = None
    reopen_s: float | None = None
    like: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a job: its answer, or an error that ended the session too, and the board's time.

    `pin` is the report of setting the operating point; unless it is `ok`, nothing was run. `had_session`: whether there
    was one at the start.
    """

    result: Any
    board_s: float
    outputs: Arrays = dataclasses.field(default_factory=dict)
    pin: PinStatus = PinStatus.OK
    had_session: bool = True


class HeldBoard:
    """A board's session and its jobs, which are carried out on the loop of sessions. Used by one thread."""

    def __init__(self) -> None:
        """Hold nothing yet. Raises TransientError where the loop's thread cannot start."""
        self._loop = start_loop()
        self._session = Session()
        self._turn = anyio.Lock()
        self._jobs: set[Future[Ended]] = set()

    def ask(self, request: Request) -> Future[Ended]:
        """Queue a job. To cancel it, begun or not, revokes it: the session of a running one ends."""
        job: Future[Ended] = self._loop.start(self._work(request))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    async def call(self, request: Request) -> Ended:
        """Carry out a job for a coroutine of any loop; to cancel that revokes the job."""
        return await asyncio.wrap_future(self.ask(request))

    def hang_up(self) -> Future[None]:
        """End the session and all jobs soon. The board's agent restores its clocks."""
        for job in list(self._jobs):
            job.cancel()
        return self._loop.start(self._end())

    def stop(self) -> None:
        """End the session and all jobs. Safe to call twice."""
        with contextlib.suppress(FutureTimeoutError):
            self.hang_up().result(_STOP_TIMEOUT_S)

    async def _end(self) -> None:
        with anyio.move_on_after(_STOP_TIMEOUT_S):
            await self._session.aclose()

    async def _work(self, request: Request) -> Ended:
        async with self._turn:
            return await self._carry_out(request)

    async def _carry_out(self, request: Request) -> Ended:
        session = self._session
        started = time.monotonic()
        had_session = session.is_open
        try:
            session.where, session.like = request.where, request.like
            if request.reopen_s is not None:
                await session.open(request.reopen_s)
                started = time.monotonic()
            if request.point is not None:
                report = await session.pin(request.point)
                if report.status is not PinStatus.OK:
                    simulated = session.description is not None and session.description.simulated
                    outcome = pin_outcome(report, session.name, simulated)
                    return Ended(outcome, time.monotonic() - started, pin=report.status)
            result = await request.job(session)
        except FarmError as error:
            return Ended(error, time.monotonic() - started, had_session=had_session)
        outputs: Arrays = {}
        if isinstance(result, tuple):
            result, outputs = result
        return Ended(result, time.monotonic() - started, outputs, had_session=had_session)
