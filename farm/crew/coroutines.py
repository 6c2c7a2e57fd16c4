"""Poll-based coroutines: each awaits a predicate, and `Loop.run` resumes those whose predicate holds.

Nothing here blocks. The engine's loop, which waits for Ray, or a crew's thread polls them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import types
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from farm.measure.blocking import start_loop

_waiters: set[Waiter] = set()
_lock = threading.Lock()


def ring_all() -> None:
    """Ring all waiters of this process: a board has an answer. From any thread."""
    with _lock:
        waiters = list(_waiters)
    for each in waiters:
        each.ring()


class Waiter:
    """Self-pipe wake-up for a thread that polls. Used by one thread, but for `ring`."""

    def __init__(self) -> None:
        self._ears, self._bell = socket.socketpair()
        with _lock:
            _waiters.add(self)
        self._ears.setblocking(False)
        self._bell.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._ears, select.POLLIN)
        self._waited_for: frozenset[Any] = frozenset()

    def wait(self, timeout_s: float, references: Collection[Any] = ()) -> None:
        """Wait until `ring` was called, a board answered, a Ray reference is done or the time is over.

        A `ring` whose cause was handled already ends the wait, too.
        """
        now = frozenset(references)
        for reference in now - self._waited_for:
            reference.future().add_done_callback(self.ring)
        self._waited_for = now
        if self._poll.poll(timeout_s * 1e3):
            self._ears.recv(4096)

    def close(self) -> None:
        """Close the pipe; `ring` then does nothing. Safe to call twice."""
        with _lock:
            _waiters.discard(self)
        self._ears.close()
        self._bell.close()

    def ring(self, _: object = None) -> None:
        """End the wait, or the next one. A full pipe wakes already, a closed one has no reader."""
        with contextlib.suppress(OSError):
            self._bell.send(b"!")


T = TypeVar("T")
Find = Callable[[], Any]


@types.coroutine
def until(find: Callable[[], T | None]) -> Generator[Find, T, T]:
    """Wait until `find` returns a value (not None or False), and return that; or raise its error."""
    return (yield find)


async def pause(seconds: float) -> None:
    """Wait for `seconds`."""
    over_s = time.monotonic() + seconds
    await until(lambda: time.monotonic() >= over_s)


async def on_loop(work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Await `work` on the loop of sessions. Raises what it raises, TransientError where the loop cannot start."""
    future: Future[T] = start_loop().start_task_soon(work, *arguments)
    await until(future.done)
    return future.result()


class Promise(Generic[T]):
    """Is awaited until `answer` is set."""

    answer: T | None = None

    def __await__(self) -> Generator[Find, T, T]:
        return (yield lambda: self.answer)


class Running:
    """A running coroutine; it runs to its first wait at once."""

    def __init__(self, coroutine: Coroutine[Find, Any, None]) -> None:
        self._coroutine = coroutine
        self.is_over = False
        self._resume(lambda: coroutine.send(None))

    def go_on(self) -> bool:
        """Resume it if its wait is over; return whether it was."""
        if self.is_over:
            return False
        try:
            found = self._find()
        except Exception as error:  # noqa: BLE001  its waiter gets it
            thrown = error
            self._resume(lambda: self._coroutine.throw(thrown))
            return True
        if found:
            self._resume(lambda: self._coroutine.send(found))
        return bool(found)

    def close(self) -> None:
        """End it where it waits: its `finally` clauses run."""
        self.is_over = True
        self._coroutine.close()

    def _resume(self, resume: Callable[[], Find]) -> None:
        try:
            self._find = resume()
        except StopIteration:
            self.is_over = True


class Loop:
    """The running jobs. Not thread-safe; never waits."""

    def __init__(self) -> None:
        self._jobs: list[Running] = []

    def start(self, coroutine: Coroutine[Find, Any, None]) -> Running:
        """Start a coroutine; return it for `close`."""
        self._jobs.append(job := Running(coroutine))
        return job

    def close(self) -> None:
        """End all jobs where they wait, even if one of them raises."""
        with contextlib.ExitStack() as stack:
            for job in self._jobs:
                stack.callback(job.close)

    def run(self) -> None:
        """Resume all until each of them waits."""
        while sum(job.go_on() for job in list(self._jobs)):
            self._jobs = [job for job in self._jobs if not job.is_over]
