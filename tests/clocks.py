"""A clock for what is given one: its time passes only when something waits."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self.passing: Callable[[float], None] = lambda now_s: None

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.passing(self.now_s)

    wait = sleep
