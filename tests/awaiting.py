"""Boards awaited by a test, on its own thread."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from farm.crew.coroutines import Loop, until
from farm.crew.leased_site import FleetSite

T = TypeVar("T")


def await_here(work: Coroutine[Any, Any, T], timeout_s: float = 180.0) -> T:
    """What comes of it. Raises what it raises."""
    loop, results = Loop(), list[T]()

    async def note() -> None:
        results.append(await work)

    job = loop.start(note())
    deadline = time.monotonic() + timeout_s
    while not job.is_over:
        assert time.monotonic() < deadline, "it did not end"
        loop.run()
        time.sleep(0.01)
    return results[0]


def take(site: FleetSite) -> FleetSite:
    """The site, once it has a board. Raises what it raises where there is none."""

    async def wait() -> FleetSite:
        await until(lambda: not site.ensure_alive() and site.has_board)
        return site

    return await_here(wait())
