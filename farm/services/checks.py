"""Checks made one after another: the result of each, its duration, and skipping of those that need a failed one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from device_agent.protocol import StrEnum
from farm.errors import FarmError


class Level(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # works, but an operator should know
    FAILED = "failed"
    NOT_TRIED = "not tried"  # a check that it needs failed


@dataclasses.dataclass(frozen=True)
class Check:
    """One hop: what was found, or what is wrong; `advice` is what to do."""

    name: str
    level: Level
    detail: str
    advice: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether work can go on."""
        return self.level in (Level.OK, Level.WARNING)

    def to_document(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"level": str(self.level), "seconds": round(self.seconds, 3)}


@dataclasses.dataclass(frozen=True)
class Doubt:
    """The result of a hop that works, with a doubt for an operator."""

    detail: str
    advice: str = ""


# Returns what was found, or raises FarmError or OSError with what is wrong.
Work = Callable[[], str | Doubt]
Show = Callable[[Check], None]


def run_check(name: str, work: Work) -> Check:
    """Run one hop; never raises what `Work` may raise."""
    began = time.monotonic()
    try:
        found = work()
    except FarmError as error:
        return Check(name, Level.FAILED, error.message, error.hint, time.monotonic() - began)
    except OSError as error:
        return Check(name, Level.FAILED, str(error), seconds=time.monotonic() - began)
    took_s = time.monotonic() - began
    if isinstance(found, Doubt):
        return Check(name, Level.WARNING, found.detail, found.advice, took_s)
    return Check(name, Level.OK, found, seconds=took_s)


def run_each(hops: Sequence[tuple[str, Work]], show: Show, is_over: Callable[[], str] = lambda: "") -> bool:
    """Run independent hops; return whether none failed. Once `is_over` returns a reason, the rest is not tried."""
    good = True
    for name, work in hops:
        reason = is_over()
        check = Check(name, Level.NOT_TRIED, reason) if reason else run_check(name, work)
        good = good and check.level is not Level.FAILED
        show(check)
    return good


def run_chain(hops: Sequence[tuple[str, Work]], show: Show) -> bool:
    """Run hops in order until one fails; the rest is shown as not tried. Return whether none failed."""
    failed: list[str] = []

    def note(check: Check) -> None:
        failed.extend([check.name] if check.level is Level.FAILED else [])
        show(check)

    return run_each(hops, note, lambda: f"needs {failed[0]}" if failed else "")
