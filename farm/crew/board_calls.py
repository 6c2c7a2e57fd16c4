"""Talk to a board's process: start, ask, wait or poll, revoke, end.

`board_process` is the process. Nothing here blocks on a stuck process: messages are short, and large data is in shared
memory (`farm.measure.arrays`).
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
from farm.measure.arrays import Arrays, SharedBuffer, pack_arrays, read, unpack_arrays
from farm.processes.worker_processes import Child

_MODULE = "farm.crew.board_process"
# A process on a busy machine answers late.
_SLACK_S = 15.0
# Cached buffers: programs of a sweep or of a model's final, and their inputs, which are asked for again. At most
# `_KEPT`; beyond `_KEPT_ALWAYS` only as long as they total `_KEPT_BYTES`.
_KEPT, _KEPT_ALWAYS, _KEPT_BYTES = 16, 6, 256 << 20
# For a process to end by itself: its call is cut, so it only releases the board.
_STOP_TIMEOUT_S = 3.0


class ProcessLostError(TransientError):
    """The process that held the session ended or hung: no known fault of the board."""


class _SharedBuffers:
    """The shared buffers that boards' processes read, each content once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: collections.OrderedDict[int, tuple[Any, SharedBuffer]] = collections.OrderedDict()

    def share(self, what: bytes | Mapping[str, Any]) -> SharedBuffer:
        """Share bytes, or packed arrays, while the result is kept. Contents are known by identity."""
        with self._lock:
            if (found := self._latest.get(id(what))) is not None:
                self._latest.move_to_end(id(what))
                return found[1]
        buffer = SharedBuffer(what if isinstance(what, bytes) else pack_arrays(what))
        with self._lock:
            # Together with its content, so that no other object gets its identity.
            self._latest[id(what)] = (what, buffer)
            while len(self._latest) > (_KEPT if self._total_bytes < _KEPT_BYTES else _KEPT_ALWAYS):
                self._latest.popitem(last=False)
        return buffer

    @property
    def _total_bytes(self) -> int:
        return sum(len(buffer.name) for _, buffer in self._latest.values())


_buffers = _SharedBuffers()


class JobOrder:
    """A job as it is sent, and its buffers; the sender keeps it until the job has ended."""

    def __init__(self, job: Job, *buffers: SharedBuffer) -> None:
        self.job, self._shared = job, buffers


def measure(spec: MeasureSpec, library: bytes) -> JobOrder:
    """Time a kernel."""
    buffer = _buffers.share(library)
    return JobOrder(TimeKernel(spec, buffer.name), buffer)


def run(spec: RunSpec, program: bytes, inputs: Mapping[str, Any]) -> JobOrder:
    """Run a program on inputs, in the order of its arguments."""
    buffer, packed = _buffers.share(program), _buffers.share(inputs)
    return JobOrder(Run(spec, buffer.name, packed.name), buffer, packed)


def read_outputs(ended: Ended) -> Arrays:
    """Return a program's outputs; call it at once, since only some answers are kept. Raises TransientError."""
    data = read(ended.outputs)
    return unpack_arrays(data) if data else {}


def plan_limit_s(job: Job, request_timeout_s: float) -> float:
    """Return the seconds after which a running job counts as stuck at its process.

    The session's own deadlines all end before: finding the board, connecting, reading its description, setting the
    point, the call.
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
        """Start it; `log` takes its output. Raises TransientError where there is no memory for it."""
        self._child = Child.start(_MODULE, log, os.environ)
        self._number = 0
        # Whether a coroutine awaits `call`: only then its messages or its end are read at once.
        self.is_awaited = False
        self._orders: dict[int, JobOrder] = {}

    @property
    def connection(self) -> Connection:
        """Readable as soon as `receive` has something."""
        return self._child.connection

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def ask(self, order: JobOrder, request: Request) -> int:
        """Send `request`, whose job is the order's; return its number. If the process is gone, `receive` raises."""
        self._number += 1
        self._orders[self._number] = order
        self._child.send(self._number, request)
        return self._number

    def revoke(self, number: int) -> None:
        """Revoke a job, begun or not: it then ends with None. From any thread; never waits."""
        self._child.send_urgent(str(number))

    @property
    def has_answer(self) -> bool:
        """Whether `receive` returns or raises at once."""
        return self.connection.closed or self.connection.poll()

    def receive(self) -> tuple[int, Ended | None]:
        """Return the number of an ended job, and its end. Raises ProcessLostError where the process has ended."""
        try:
            number, ended = self.connection.recv()
        except (EOFError, OSError):
            raise ProcessLostError(
                f"the process that held the session ended by itself ({self._child.describe_end()})"
            ) from None
        self._orders.pop(number, None)
        return number, ended

    async def call(self, order: JobOrder, request: Request, limit_s: float) -> Ended:
        """Run a job and wait for it; closing the coroutine revokes the job.

        Raises ProcessLostError where the process ended, or did not answer within `limit_s` and was killed.
        """
        number = self.ask(order, request)
        deadline = time.monotonic() + limit_s

        def find() -> Ended | None:
            while self.has_answer:
                answered, ended = self.receive()
                if answered == number:
                    assert ended is not None  # only closing this revokes it
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
        """Tell it to end, without waiting. The board's agent restores its clocks."""
        self._child.hang_up()

    def stop(self) -> None:
        """End it and wait; kill it where it does not end by itself. Safe to call twice."""
        self._child.stop(_STOP_TIMEOUT_S)

    def kill(self) -> None:
        self._child.kill()
