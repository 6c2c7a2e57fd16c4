"""Small live updates: one look at the store for all who watch, and the pieces of pages that changed, made once.

A watcher is a position in a short list of updates: one that does not read blocks no other, costs no
memory, and gets a request to reload its page once it is too far behind.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

import anyio.to_thread
from fastapi.sse import ServerSentEvent

from farm.errors import FarmError

# Changes in the store reach the pages within two seconds.
PERIOD_S = 0.5
# A browser opens one for each page; more than these are an attack.
MOST_WATCHERS = 256
# Updates kept for slow watchers.
_KEPT = 64
# The browser's pause before it reconnects.
_RETRY_MS = 2000
_TOLD_AT_MOST_EVERY_S = 60.0

Part = tuple[str, str]

_log = logging.getLogger(__name__)


class Hub:
    """Looks while there are watchers. `look` returns the pieces that changed since its last call, each with the id of
    the element that it replaces; it runs on a thread, one call at a time.
    """

    def __init__(self, look: Callable[[], Sequence[Part]]) -> None:
        self._look = look
        self._updates: collections.deque[tuple[int, str]] = collections.deque(maxlen=_KEPT)
        self._number = 0
        self._changed = asyncio.Condition()
        self._ended = False
        self._told_at = -_TOLD_AT_MOST_EVERY_S
        self.watchers = 0

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                if self.watchers:
                    await self._turn()
                await asyncio.sleep(PERIOD_S)
        finally:
            with contextlib.suppress(RuntimeError):
                await self.end()

    async def end(self) -> None:
        """Disconnect all watchers: the server ends."""
        self._ended = True
        async with self._changed:
            self._changed.notify_all()

    async def _turn(self) -> None:
        try:
            parts = await anyio.to_thread.run_sync(self._look)
        except FarmError as error:  # the store is busy, or away: the pages stand still until it is back
            if time.monotonic() - self._told_at > _TOLD_AT_MOST_EVERY_S:
                self._told_at = time.monotonic()
                _log.warning("no live updates: %s", error)
            return
        if parts:
            self._number += 1
            self._updates.append((self._number, json.dumps(parts)))
            async with self._changed:
                self._changed.notify_all()

    async def watch(self) -> AsyncIterator[ServerSentEvent]:
        """Yield one browser's updates from now on."""
        self.watchers += 1
        seen = self._number
        try:
            # At once, so that a page knows that it is live.
            yield ServerSentEvent(raw_data="[]", event="parts", retry=_RETRY_MS)
            while not self._ended:
                async with self._changed:
                    while not self._ended and self._number <= seen:
                        await self._changed.wait()
                if self._updates and self._updates[0][0] > seen + 1:
                    seen = self._number
                    yield ServerSentEvent(raw_data="", event="stale")
                    continue
                for number, text in [each for each in self._updates if each[0] > seen]:
                    seen = number
                    yield ServerSentEvent(raw_data=text, event="parts")
        finally:
            self.watchers -= 1
