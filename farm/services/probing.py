"""The services' probes: due ones, requested ones, and their reports to waiters."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from farm.connectivity.tracker import Tracker
from farm.crew.calibration import KERNEL_FOLDER
from farm.crew.crew import Crew
from farm.errors import FarmError
from farm.inventory.board_types import load_board_types
from farm.search.codegen import golden
from farm.services.probe import Prober, ProbeReport
from farm.services.probe_rules import ProbePast, note_report, plan_probes
from farm.settings import Settings
from farm.types.documents import BoardInfo

_log = logging.getLogger(__name__)

Report = dict[str, Any]
Answer = concurrent.futures.Future[ProbeReport]
Answered = concurrent.futures.Future[Report]


class Probing:
    """Runs due and requested probes. Used by the keeper's main thread alone."""

    def __init__(
        self, settings: Settings, tracker: tuple[str, int], defer: Callable[[Callable[[], None]], None]
    ) -> None:
        """`defer` has the main thread do something soon."""
        self._settings, self._tracker, self._defer = settings, tracker, defer
        self._crew: Crew | None = None
        self._prober: Prober | None = None
        self._waiting: dict[str, list[Answered]] = {}
        self.past: dict[str, ProbePast] = {}
        self.reports: dict[str, Report] = {}
        self.on_report: Callable[[Report], None] = lambda report: None
        # Boards with an open probe.
        self.busy: set[str] = set()

    def step(self, rows: Sequence[BoardInfo], reachable: Collection[str]) -> None:
        """Start the probes that are due."""
        # Pauses after failures are for connected boards; one that was away may be repaired.
        self.past = {name: past for name, past in self.past.items() if name in reachable}
        within_reach = [row for row in rows if row.name in reachable]
        for name in self._waiting.keys() & set(reachable):
            self._ask(name)
        now = time.monotonic()
        for name in plan_probes(within_reach, self.past, self.busy, now, self._settings.probe_interval_s):
            self._ask(name)

    def request(self, name: str) -> Answered:
        """Request the next report on a board, once it is connected and free."""
        answered: Answered = concurrent.futures.Future()
        self._waiting.setdefault(name, []).append(answered)
        return answered

    def withdraw(self, name: str, answered: Answered) -> None:
        """Drop a request."""
        waiting = self._waiting.get(name, [])
        if answered in waiting:
            waiting.remove(answered)
        if not waiting:
            self._waiting.pop(name, None)

    def close(self) -> None:
        """End open probes, which return their leases."""
        if self._crew is not None:
            self._crew.close()

    def _ask(self, name: str) -> None:
        """Probe a board, unless it is being probed. A probe that cannot start counts as skipped."""
        if name in self.busy:
            return
        self.busy.add(name)
        try:
            crew, prober = self._require_crew()
        except (FarmError, OSError) as error:
            self._on_answer(name, skipped(name, 0.0, f"no board can be probed now: {error}"))
            return

        async def probe() -> ProbeReport:
            return await prober.probe(crew.store, name)

        answer = crew.start(probe())
        answer.add_done_callback(lambda _: self._defer(lambda: self._on_answer(name, _to_report(name, answer))))

    def _require_crew(self) -> tuple[Crew, Prober]:
        """Return the crew and its prober. Raises what starting a crew raises, such as without a store."""
        if self._crew is None or self._prober is None:
            kernels = golden.GoldenKernels(self._settings.home_path / KERNEL_FOLDER)
            owner = f"probe@{socket.gethostname()}:{os.getpid()}"
            prober = Prober(Tracker(*self._tracker), kernels, load_board_types(), owner)
            self._crew, self._prober = Crew(self._settings, lambda text: None), prober
        return self._crew, self._prober

    def _on_answer(self, name: str, report: Report) -> None:
        self.busy.discard(name)
        _log.info("%s: %s", name, report.get("kind") or f"skipped: {report['reason']}", extra={"board": name})
        self.past[name] = note_report(self.past.get(name), report, time.monotonic())
        self.reports[name] = report | {"at": time.time()}
        self.on_report(report)
        if report.get("busy"):  # its waiters go on waiting: `step` asks again
            return
        for answered in self._waiting.pop(name, []):
            answered.set_result(report)


def skipped(board: str, seconds: float, reason: str) -> Report:
    """Return the report of a probe that was not made: neither passed nor failed."""
    return ProbeReport(board, skipped=True, seconds=seconds, reason=reason).to_dict()


def _to_report(name: str, answer: Answer) -> Report:
    if answer.cancelled():
        return skipped(name, 0.0, "the services end")
    error = answer.exception()
    if error is None:
        return answer.result().to_dict()
    if not isinstance(error, FarmError):
        _log.error("probing %s", name, exc_info=error, extra={"board": name})
        return skipped(name, 0.0, f"a bug of the farm's: {error!r}")
    return skipped(name, 0.0, str(error))
