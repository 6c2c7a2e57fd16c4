"""What is live: updates of pages for all who watch them, and readings of boards (load, temperature, power).

One look at the store makes the pieces of pages that changed. A watcher is a position in a short list of updates: one
that does not read blocks no other, costs no memory, and gets a request to reload its page once it is too far behind. A
board's own exporter (`device-agent metrics`), whose address the services name, is read once a second for all pages.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import requests
from fastapi.sse import ServerSentEvent
from prometheus_client.parser import text_string_to_metric_families

from farm.connectivity.services import SERVICES
from farm.errors import FarmError
from farm.web import charts

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
# A page is shown without an exporter that answers later.
_TIMEOUT_S = 1.0
_PREFIX = "device_agent_"
_MAX_BYTES = 1 << 20
# Exporters read a sensor at each request: several pages share one answer.
_FRESH_S = 1.0
# Readings kept for a chart, two seconds apart while a page is open.
_KEPT_READINGS = 300


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


@dataclasses.dataclass(frozen=True)
class LiveReading:
    """Loads and duties as shares of 1, memory in bytes, temperatures in °C, clocks in Hz, power in W; by name.

    `at` is in s since the epoch. What the board cannot read is None or missing. `cpu_load` needs a reading before.
    """

    at: float
    cpu_load: float | None
    gpu_load: float | None
    memory_used: float | None
    memory_total: float | None
    temperature_c: Mapping[str, float]
    clock_hz: Mapping[str, float]
    power_w: Mapping[str, float]
    fan_duty: Mapping[str, float]
    busy_s: float | None = None


class LiveBoards:
    """Readings of boards' exporters, kept while pages watch. Thread-safe."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._kept: dict[str, collections.deque[LiveReading]] = {}

    def read(self, board: str) -> list[LiveReading]:
        """Return the latest readings, oldest first, with one of now; empty without an exporter or an answer."""
        with self._lock:
            kept = self._kept.setdefault(board, collections.deque(maxlen=_KEPT_READINGS))
            if kept and time.time() - kept[-1].at < _FRESH_S:
                return list(kept)
            services = SERVICES.find(self._home)
            try:
                if not services or not services["metrics"]:
                    return []
                targets = json.loads(_fetch("http://{}:{}/targets".format(*services["metrics"])))
                address = next((each["targets"][0] for each in targets if each["labels"]["board"] == board), None)
                if address is None:
                    return []
                kept.append(parse(_fetch(f"http://{address}/metrics"), time.time(), kept[-1] if kept else None))
            except (OSError, ValueError, LookupError, TypeError):  # the board, or the services, went away
                return []
            return list(kept)


def parse(text: str, at: float, before: LiveReading | None = None) -> LiveReading:
    """Read an exporter's answer; `before` is the reading that the CPU's load is counted from. Raises ValueError."""
    values: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = next(iter(sample.labels.values()), "")
            values.setdefault(sample.name.removeprefix(_PREFIX), {})[label] = float(sample.value)

    def find(name: str) -> float | None:
        return next(iter(values.get(name, {}).values()), None)

    busy_s, cores, cpu_load = find("cpu_busy_seconds_total"), find("cores_online"), None
    if before is not None and before.busy_s is not None and busy_s is not None and cores and at > before.at:
        cpu_load = min(1.0, max(0.0, (busy_s - before.busy_s) / (at - before.at) / cores))
    total, left = find("memory_total_bytes"), find("memory_available_bytes")
    return LiveReading(
        at,
        cpu_load,
        find("gpu_load_ratio"),
        total - left if total is not None and left is not None else None,
        total,
        values.get("temperature_celsius", {}),
        values.get("clock_hertz", {}),
        values.get("power_watts", {}),
        values.get("fan_duty_ratio", {}),
        busy_s,
    )


def draw(readings: Sequence[LiveReading]) -> dict[str, Any] | None:
    """Return the newest reading and charts of the last minutes; None without a reading."""
    if not readings:
        return None
    times = [each.at for each in readings]
    loads = {
        "CPU": [(each.at, each.cpu_load * 100) for each in readings if each.cpu_load is not None],
        "GPU": [(each.at, each.gpu_load * 100) for each in readings if each.gpu_load is not None],
    }
    total = max(readings[-1].power_w, key=lambda rail: readings[-1].power_w[rail], default=None)
    power = [(each.at, each.power_w[total]) for each in readings if total in each.power_w] if total else []
    warm = [(each.at, max(each.temperature_c.values())) for each in readings if each.temperature_c]
    drawn = []
    for title, unit, lines in (
        ("Load", "%", loads),
        ("Power", "W", {total or "": power}),
        ("Warmest", "°C", {"": warm}),
    ):
        if shown := [(name, line) for name, line in lines.items() if len(line) > 1]:
            names = f": {', '.join(name for name, _ in shown if name)}".rstrip(": ")
            caption = f"{title} of the last minutes"
            plan = charts.plan_times(title, caption, unit, shown, times, 100.0 if unit == "%" else None)
            drawn.append((title + names, charts.show(plan)))
    return {"reading": readings[-1], "charts": drawn}


def _fetch(url: str) -> str:
    with requests.Session() as session:
        session.trust_env = False  # a proxy could not reach these
        with session.get(url, timeout=_TIMEOUT_S, stream=True) as answer:
            answer.raise_for_status()
            data: bytes = answer.raw.read(_MAX_BYTES, decode_content=True)
            return data.decode("utf-8", "replace")
