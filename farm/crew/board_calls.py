"""Speaking to a board's process: started, asked, awaited or looked at, taken back, ended.

What it does there is in `board_process`. Nothing here blocks on a process that is stuck: what is sent is short, big
data lies in memory of ours (`farm.measure.arrays`).
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from device_agent.protocol import MeasureSpec, PowerSpec, RunSpec
from farm.crew.board_process import Ended, Glance, Job, Leave, Open, Pin, Request, Run, TimeKernel
from farm.crew.coroutines import until
from farm.errors import TransientError
from farm.measure import session
from farm.measure.arrays import Arrays, Given, pack_arrays, read, unpack_arrays
from farm.processes.worker_processes import Child

_MODULE = "farm.crew.board_process"
# A process on a busy machine answers late.
_SLACK_S = 15.0
# What was handed over lately and may be asked for again: the programs of a sweep, of a model's final, and their inputs.
# Up to so many, and beyond `_KEPT_ALWAYS` as long as they are not big together.
_KEPT, _KEPT_ALWAYS, _KEPT_BYTES = 16, 6, 256 << 20
# Between being told to end and ending: its call is cut, so that it only has to let go.
_STOP_TIMEOUT_S = 3.0


class ProcessLostError(TransientError):
    """The process that held the session ended, or did not answer: no fault of the board's that is known of."""


class _Gifts:
    """What boards' processes are given, each content once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: collections.OrderedDict[int, tuple[Any, Given]] = collections.OrderedDict()

    def give(self, what: bytes | Mapping[str, Any]) -> Given:
        """Bytes, or arrays packed, for processes to read while the answer is kept. Known by identity."""
        with self._lock:
            if (found := self._latest.get(id(what))) is not None:
                self._latest.move_to_end(id(what))
                return found[1]
        given = Given(what if isinstance(what, bytes) else pack_arrays(what))
        with self._lock:
            # With what it is of, so that nothing else is taken for it.
            self._latest[id(what)] = (what, given)
            while len(self._latest) > (_KEPT if self._total_bytes < _KEPT_BYTES else _KEPT_ALWAYS):
                self._latest.popitem(last=False)
        return given

    @property
    def _total_bytes(self) -> int:
        return sum(len(given.handed) for _, given in self._latest.values())


_gifts = _Gifts()


class JobOrder:
    """A job as it is sent, and what its data lies in; kept by who sends it until it has ended."""

    def __init__(self, job: Job, *givens: Given) -> None:
        self.job, self._givens = job, givens


def measure(spec: MeasureSpec, library: bytes) -> JobOrder:
    """Time a kernel."""
    given = _gifts.give(library)
    return JobOrder(TimeKernel(spec, given.handed), given)


def run(spec: RunSpec, program: bytes, inputs: Mapping[str, Any]) -> JobOrder:
    """Run a program on inputs, in the order of its arguments."""
    given, packed = _gifts.give(program), _gifts.give(inputs)
    return JobOrder(Run(spec, given.handed, packed.handed), given, packed)


def read_outputs(ended: Ended) -> Arrays:
    """A program's outputs; at once, since they are kept for some answers only. Raises TransientError."""
    data = read(ended.outputs)
    return unpack_arrays(data) if data else {}


def plan_limit_s(job: Job, request_timeout_s: float) -> float:
    """When a job that has begun counts as stuck at its process.

    The session has a deadline for each step, all of which end before: finding the board, connecting, asking who it is,
    holding the point, the call itself.
    """
    steps_s = request_timeout_s + session.CONNECT_TIMEOUT_S + session.CLAIM_TIMEOUT_S + session.DESCRIBE_TIMEOUT_S
    limit_s = steps_s + session.PIN_TIMEOUT_S + _SLACK_S
    match job:
        case Open() | Leave() | Pin():
            return limit_s
        case Glance(PowerSpec() as spec):
            return limit_s + spec.seconds + session.PIN_TIMEOUT_S
        case TimeKernel():
            return limit_s + session.plan_deadline_s(job.spec, len(job.library))
    return limit_s + session.plan_deadline_s(job.spec, 2 * (len(job.program) + len(job.inputs)))


class BoardProcess:
    """One board's process. Used by one thread, but for `revoke`."""

    def __init__(self, log: Path | None) -> None:
        """Start it; `log` takes what it prints. Raises TransientError where there is no room for it."""
        self._child = Child.start(_MODULE, log, os.environ)
        self._number = 0
        # Whether somebody waits for `call`: only then is what it says, or its end, heard at once.
        self.is_awaited = False
        self._orders: dict[int, JobOrder] = {}

    @property
    def connection(self) -> Connection:
        """Can be read as soon as `receive` has something."""
        return self._child.connection

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.process.pid

    def ask(self, order: JobOrder, request: Request) -> int:
        """Have it carry `request` out, whose job is the order's; its number. One that is gone: `receive` says so."""
        self._number += 1
        self._orders[self._number] = order
        self._child.send(self._number, request)
        return self._number

    def revoke(self, number: int) -> None:
        """Take a job back, begun or not: it then ends with None. From any thread; waits for nothing."""
        self._child.send_urgent(str(number))

    @property
    def has_answer(self) -> bool:
        """Whether `receive` returns or raises at once."""
        return self.connection.closed or self.connection.poll()

    def receive(self) -> tuple[int, Ended | None]:
        """The number of a job that has ended, and how. Raises ProcessLostError where the process has ended."""
        try:
            number, ended = self.connection.recv()
        except (EOFError, OSError):
            raise ProcessLostError(
                f"the process that held the session ended by itself ({self._child.describe_end()})"
            ) from None
        self._orders.pop(number, None)
        return number, ended

    async def call(self, order: JobOrder, request: Request, limit_s: float) -> Ended:
        """Have it do a job, and wait; whoever closes the coroutine takes the job back.

        Raises ProcessLostError where the process ended or did not answer within `limit_s`, and so was ended.
        """
        number = self.ask(order, request)
        deadline = time.monotonic() + limit_s

        def find() -> Ended | None:
            while self.has_answer:
                answered, ended = self.receive()
                if answered == number:
                    assert ended is not None  # only who closes this takes it back
                    return ended
            if time.monotonic() > deadline:
                self.kill()
                raise ProcessLostError(f"the call did not end within {limit_s:.0f} s: its process is stuck")
            return None

        try:
            self.is_awaited = True
            return await until(find)
        except BaseException:
            self.revoke(number)
            raise
        finally:
            self.is_awaited = False

    def hang_up(self) -> None:
        """Tell it to end; waits for nothing. The board's agent puts its clocks back."""
        self._child.hang_up()

    def stop(self) -> None:
        """End it, and wait until it has; what does not end by itself is killed. Safe to call twice."""
        self._child.stop(_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End it now. Safe to call twice."""
        self._child.kill()
