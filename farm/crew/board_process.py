"""The process that holds one board's session and runs jobs there, one after the other.

`board_calls` starts it. It has no store and judges nothing: it answers how each job ended.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from device_agent.protocol import MeasureSpec, OperatingPoint, PinStatus, PowerSpec, RunSpec
from farm.crew.blame import pin_outcome
from farm.crew.session_holder import Address, HeldBoard
from farm.errors import FarmError
from farm.measure.arrays import BufferName, SharedBuffer, pack_arrays, read, unpack_arrays
from farm.processes.worker_processes import Parent

# Answers whose outputs are kept: more than can be in flight.
_ANSWERS_KEPT = 4


@dataclasses.dataclass(frozen=True)
class Open:
    """Open a session, waiting this long for the board; answers its description. `doubted`: see `BoardSession`."""

    timeout_s: float
    doubted: bool = False


@dataclasses.dataclass(frozen=True)
class Leave:
    """Close the session; answers nothing."""


@dataclasses.dataclass(frozen=True)
class Pin:
    """Pin the clocks; answers the report."""

    point: OperatingPoint


@dataclasses.dataclass(frozen=True)
class Glance:
    """Sample power and temperature; answers the trace."""

    spec: PowerSpec


@dataclasses.dataclass(frozen=True)
class TimeKernel:
    """Time a kernel; answers the outcome."""

    spec: MeasureSpec
    library: bytes | BufferName


@dataclasses.dataclass(frozen=True)
class Run:
    """Run a program on packed inputs; answers the outcome, and has outputs."""

    spec: RunSpec
    program: bytes | BufferName
    inputs: bytes | BufferName


Job = Open | Leave | Pin | Glance | TimeKernel | Run


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
    outputs: bytes | BufferName = b""
    pin: PinStatus = PinStatus.OK
    had_session: bool = True


class _RevokedError(Exception):
    """The running job was revoked."""


class BoardHolder:
    """Holds a board's session and runs jobs in order of their numbers; a revoked one answers None.

    Not thread-safe, but for `revoke` and `cut`.
    """

    def __init__(self) -> None:
        self._board = HeldBoard()
        self._lock = threading.Lock()
        self._running: int | None = None
        self._revoked: set[int] = set()
        self._answers: collections.deque[SharedBuffer] = collections.deque(maxlen=_ANSWERS_KEPT)

    def cut(self) -> None:
        """End the running call."""
        self._board.cut()

    def close(self) -> None:
        self._board.close()

    def revoke(self, number: int) -> None:
        """Revoke a job, before those that wait. The session of a running one is cut; the next job opens another."""
        with self._lock:
            self._revoked.add(number)
            if self._running == number:
                self._board.cut()

    def carry_out(self, number: int, request: Request) -> Ended | None:
        """Run a job; None where it was revoked."""
        started = time.monotonic()
        had_session = self._board.has_session
        with self._as_running(number) as check:
            try:
                check()
                self._board.turn_to(request.where, request.like)
                if request.reopen_s is not None:
                    self._board.open(request.reopen_s)
                    check()
                    started = time.monotonic()
                if request.point is not None:
                    report = self._board.pin(request.point)
                    if report.status is not PinStatus.OK:
                        simulated = self._board.description is not None and self._board.description.simulated
                        outcome = pin_outcome(report, self._board.name, simulated)
                        return Ended(outcome, time.monotonic() - started, pin=report.status)
                result, outputs = self._work(request.job)
                return Ended(result, time.monotonic() - started, outputs, had_session=had_session)
            except _RevokedError:
                return None
            except FarmError as error:
                if self._is_revoked(number):  # our own cut
                    return None
                return Ended(error, time.monotonic() - started, had_session=had_session)

    def _work(self, job: Job) -> tuple[Any, bytes | BufferName]:
        match job:
            case Open():
                return self._board.open(job.timeout_s, job.doubted), b""
            case Leave():
                self._board.close()
                return None, b""
            case Pin():
                return self._board.pin(job.point), b""
            case Glance():
                return self._board.power(job.spec), b""
            case TimeKernel():
                return self._board.measure(job.spec, read(job.library)), b""
        outcome, arrays = self._board.run(job.spec, job.program, unpack_arrays(read(job.inputs)))
        if not arrays:
            return outcome, b""
        self._answers.append(SharedBuffer(pack_arrays(arrays)))
        return outcome, self._answers[-1].name

    @contextlib.contextmanager
    def _as_running(self, number: int) -> Iterator[Callable[[], None]]:
        """Mark `number` as running; yield a check that raises _RevokedError once it was revoked."""

        def check() -> None:
            if self._is_revoked(number):
                raise _RevokedError

        with self._lock:
            self._running = number
        try:
            yield check
        finally:
            with self._lock:
                self._running = None
                if number in self._revoked:  # a late cut has ended the session all the same
                    self._board.close()
                self._revoked = {each for each in self._revoked if each > number}

    def _is_revoked(self, number: int) -> bool:
        with self._lock:
            return number in self._revoked


def main(parent: Parent) -> None:
    """Run jobs until the parent process is gone or closes the connection."""
    holder = BoardHolder()
    parent.on_stop = holder.cut
    parent.on_urgent(lambda said: holder.revoke(int(said)))
    try:
        while True:
            message = parent.receive()
            assert message is not None  # without a deadline there is a message, or the end
            number, request = message
            parent.send(number, holder.carry_out(number, request))
    finally:
        parent.leave()
        holder.close()
