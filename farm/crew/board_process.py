"""The process that holds one board's session and does there what it is told: one job after the other, each to its end.

Started and spoken to by `board_calls`. It has no store and judges nothing: what it answers is how a job ended.
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
from farm.crew.held_board import Address, HeldBoard
from farm.errors import FarmError
from farm.measure.arrays import Given, Handed, pack_arrays, read, unpack_arrays
from farm.processes.worker_processes import Parent

# Answers whose outputs are kept for whoever asked: more than can be on their way.
_ANSWERS_KEPT = 4


@dataclasses.dataclass(frozen=True)
class Open:
    """See that there is a session, waiting for the board so long; answers its description. `doubted`: see
    `BoardSession`.
    """

    timeout_s: float
    doubted: bool = False


@dataclasses.dataclass(frozen=True)
class Leave:
    """Give the session back; answers nothing."""


@dataclasses.dataclass(frozen=True)
class Pin:
    """Hold the clocks; answers the report."""

    point: OperatingPoint


@dataclasses.dataclass(frozen=True)
class Glance:
    """Look at power and temperature; answers the trace."""

    spec: PowerSpec


@dataclasses.dataclass(frozen=True)
class TimeKernel:
    """Time a kernel; answers the outcome."""

    spec: MeasureSpec
    library: bytes | Handed


@dataclasses.dataclass(frozen=True)
class Run:
    """Run a program on packed inputs; answers the outcome, and has outputs."""

    spec: RunSpec
    program: bytes | Handed
    inputs: bytes | Handed


Job = Open | Leave | Pin | Glance | TimeKernel | Run


@dataclasses.dataclass(frozen=True)
class Request:
    """A job on a board. With a `point` it is first brought there, and a session that was lost is opened anew.

    `reopen_s`: how long the board is waited for then; None: without a session nothing is done.
    """

    where: Address
    job: Job
    point: OperatingPoint | None = None
    reopen_s: float | None = None
    like: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended: with its answer, or an error that ended the session too, and the board's time.

    `pin` says what came of bringing the board to the operating point; unless that is `ok`, nothing was run.
    `had_session`: whether there was one when it began.
    """

    result: Any
    board_s: float
    outputs: bytes | Handed = b""
    pin: PinStatus = PinStatus.OK
    had_session: bool = True


class _RevokedError(Exception):
    """What is being done was taken back."""


class BoardHolder:
    """Holds a board's session and carries jobs out, numbered upwards; one that was revoked answers None.

    Not thread-safe, but for `revoke` and `cut`.
    """

    def __init__(self) -> None:
        self._board = HeldBoard()
        self._lock = threading.Lock()
        self._running: int | None = None
        self._revoked: set[int] = set()
        self._given: collections.deque[Given] = collections.deque(maxlen=_ANSWERS_KEPT)

    def cut(self) -> None:
        """End the call under way."""
        self._board.cut()

    def close(self) -> None:
        """Give the session back."""
        self._board.close()

    def revoke(self, number: int) -> None:
        """Take a job back, past those that wait. The session of one that runs is cut; the next job opens another."""
        with self._lock:
            self._revoked.add(number)
            if self._running == number:
                self._board.cut()

    def carry_out(self, number: int, request: Request) -> Ended | None:
        """Do it; None where it was taken back."""
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

    def _work(self, job: Job) -> tuple[Any, bytes | Handed]:
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
        self._given.append(Given(pack_arrays(arrays)))
        return outcome, self._given[-1].handed

    @contextlib.contextmanager
    def _as_running(self, number: int) -> Iterator[Callable[[], None]]:
        """`number` is what runs; gives what raises _RevokedError once it was taken back."""

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
                if number in self._revoked:  # a cut that came late has spoilt the session all the same
                    self._board.close()
                self._revoked = {each for each in self._revoked if each > number}

    def _is_revoked(self, number: int) -> bool:
        with self._lock:
            return number in self._revoked


def main(parent: Parent) -> None:
    """Carry out what comes, until whoever started us is gone or wants us gone."""
    holder = BoardHolder()
    parent.on_stop = holder.cut
    parent.on_urgent(lambda said: holder.revoke(int(said)))
    try:
        while True:
            message = parent.receive()
            assert message is not None  # without a deadline there is one, or an end
            number, request = message
            parent.send(number, holder.carry_out(number, request))
    finally:
        parent.leave()
        holder.close()
