"""Calls to other processes, as futures with deadlines: of Ray's actors (`farm.campaign.engine.ray_calls`), of children
(`jobs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Calls(Generic[T]):
    """Open calls, each with what it is for. Not thread-safe; never waits."""

    def __init__(self) -> None:
        self._open: dict[Future[Any], tuple[T, float]] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def pending(self) -> list[Future[Any]]:
        return list(self._open)

    @property
    def about(self) -> list[T]:
        """What the open calls are for, in the order of calls."""
        return [about for about, _ in self._open.values()]

    def add(self, call: Future[Any], about: T, timeout_s: float) -> None:
        """Add a call."""
        self._open[call] = about, time.monotonic() + timeout_s

    def take(self) -> Iterator[tuple[T, Future[Any]]]:
        """Remove and yield calls in their order: those that are done, and those whose deadline has passed, not done."""
        for call, (about, deadline_s) in list(self._open.items()):
            if call in self._open and (call.done() or time.monotonic() > deadline_s):
                del self._open[call]
                yield about, call

    def drop(self, is_dropped: Callable[[T], bool]) -> list[T]:
        """Remove calls unanswered; return what they were for."""
        dropped = [call for call, (about, _) in self._open.items() if is_dropped(about)]
        return [self._open.pop(call)[0] for call in dropped]
