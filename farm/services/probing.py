"""Probes as the services see them: who is due, who was asked, what came of it, who waits for it."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from farm.services.probe_plan import ProbePast, note_report, plan_probes
from farm.services.worker import ProbeWorker, Report
from farm.settings import Settings

Answered = concurrent.futures.Future[Report]


class Probing:
    """Has the worker probe whoever is due or asked for. Used by the keeper's main thread alone."""

    def __init__(
        self,
        settings: Settings,
        tracker: tuple[str, int],
        logs: Path,
        defer: Callable[[Callable[[], None]], None],
    ) -> None:
        """`defer` has the main thread do something soon."""
        self._settings = settings
        self._waiting: dict[str, list[Answered]] = {}
        self.past: dict[str, ProbePast] = {}
        self.reports: dict[str, Report] = {}
        self.on_report: Callable[[Report], None] = lambda report: None
        self.worker = ProbeWorker(
            settings.home_path,
            settings.store_location,
            tracker,
            logs / "prober.log",
            lambda name, report: defer(lambda: self._on_answer(name, report)),
        )

    def step(self, rows: Sequence[dict[str, Any]], reachable: Collection[str]) -> None:
        """Ask for what is due."""
        self.worker.look()
        # Pauses after failures are for boards that stay; one that was away may be mended.
        self.past = {name: past for name, past in self.past.items() if name in reachable}
        within_reach = [row for row in rows if row["name"] in reachable]
        for name in self._waiting.keys() & set(reachable):
            self.worker.ask(name)
        now = time.monotonic()
        for name in plan_probes(within_reach, self.past, self.worker.busy, now, self._settings.probe_interval_s):
            self.worker.ask(name)

    def request(self, name: str) -> Answered:
        """The report of the next probe of a board, asked for as soon as the board can be reached and is free."""
        answered: Answered = concurrent.futures.Future()
        self._waiting.setdefault(name, []).append(answered)
        return answered

    def withdraw(self, name: str, answered: Answered) -> None:
        """Nobody waits for that report any more."""
        waiting = self._waiting.get(name, [])
        if answered in waiting:
            waiting.remove(answered)
        if not waiting:
            self._waiting.pop(name, None)

    def close(self) -> None:
        """End the worker; whoever waits is told."""
        self.worker.close()

    def _on_answer(self, name: str, report: Report) -> None:
        self.worker.conclude(name)
        self.past[name] = note_report(self.past.get(name), report, time.monotonic())
        self.reports[name] = report | {"at": time.time()}
        self.on_report(report)
        if report.get("busy"):  # whoever waits goes on waiting: `step` asks again
            return
        for answered in self._waiting.pop(name, []):
            answered.set_result(report)
