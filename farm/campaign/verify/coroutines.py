"""Poll-based coroutines: each awaits a predicate, and `Loop.run` resumes those whose predicate holds.

Nothing here blocks: the engine runs them between its other work, and their order is always the same.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Find = Callable[[], Any]


@types.coroutine
def until(find: Callable[[], T | None]) -> Generator[Find, T, T]:
    """Wait until `find` returns a value (not None or False), and return that; or raise its error."""
    return (yield find)


async def done(future: Future[T]) -> T:
    """Wait for a future, and return its result; or raise its error."""
    await until(future.done)
    return future.result()


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
