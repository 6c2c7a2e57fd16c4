"""Boards awaited by a test, on its own thread."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

from farm.crew.leased_site import FleetSite

T = TypeVar("T")


def await_here(work: Coroutine[Any, Any, T], timeout_s: float = 180.0) -> T:
    """What comes of it. Raises what it raises."""

    async def limited() -> T:
        with anyio.fail_after(timeout_s):
            return await work

    return anyio.run(limited)


def take(site: FleetSite) -> FleetSite:
    """The site, once it has a board. Raises what it raises where there is none."""

    async def wait() -> FleetSite:
        while site.ensure_alive() or not site.has_board:
            await anyio.sleep(0.01)
        return site

    return await_here(wait())
