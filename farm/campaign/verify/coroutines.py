"""Coroutines without an event loop: they wait for what is to be found, and `Loop.run` resumes whoever can go on.

The engine's loop waits for Ray and must not wait anywhere else, so nothing here does: who waits is looked at again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Find = Callable[[], Any]


@types.coroutine
def until(find: Callable[[], T | None]) -> Generator[Find, T, T]:
    """Wait until `find` gives something (not None or False), and return that. It is called often."""
    return (yield find)


class Promise(Generic[T]):
    """It is awaited until somebody sets `answer`."""

    answer: T | None = None

    def __await__(self) -> Generator[Find, T, T]:
        return (yield lambda: self.answer)


class Running:
    """A coroutine under way; it goes as far as its first wait at once."""

    def __init__(self, coroutine: Coroutine[Find, Any, None]) -> None:
        self._coroutine = coroutine
        self.is_over = False
        self._send(None)

    def go_on(self) -> bool:
        """Resume it where what it waits for is there; whether it was."""
        found = None if self.is_over else self._find()
        if found:
            self._send(found)
        return bool(found)

    def close(self) -> None:
        """End it where it waits: its `finally` clauses run."""
        self.is_over = True
        self._coroutine.close()

    def _send(self, found: Any) -> None:
        try:
            self._find: Find = self._coroutine.send(found)
        except StopIteration:
            self.is_over = True


class Loop:
    """The jobs under way. Not thread-safe; never waits."""

    def __init__(self) -> None:
        self._jobs: list[Running] = []

    def start(self, coroutine: Coroutine[Find, Any, None]) -> Running:
        """Have it go on from now on; returns it for `close`."""
        self._jobs.append(job := Running(coroutine))
        return job

    def run(self) -> None:
        """Have all go on until each of them waits for what is not there."""
        while sum(job.go_on() for job in list(self._jobs)):
            self._jobs = [job for job in self._jobs if not job.is_over]
