"""Time in tests: a clock whose time passes only when something waits, and waiting for what takes real time."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

import pytest


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


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0, look_s: float = 0.01) -> Any:
    """Wait until `condition` is true and return its value; fail naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:g} s for {what}")
        select.select([], [], [], look_s)
    return value
