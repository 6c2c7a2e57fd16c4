"""From what the services see to what Prometheus is told. The metrics themselves are in `farm/metrics/`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from farm.errors import FarmError
from farm.metrics.exporter import Exporter
from farm.metrics.farm_metrics import FarmMetrics
from farm.settings import Settings

if TYPE_CHECKING:
    from farm.services.keeper import Keeper

_PERIOD_S = 1.0
# Counting reads the whole table of trials.
_TRIALS_PERIOD_S = 60.0

_log = logging.getLogger(__name__)


class Telemetry:
    """Serves metrics until `close`. `watch` and `note_report` belong to the keeper's main thread."""

    def __init__(self, settings: Settings, count_statuses: Callable[[], Mapping[str, int]]) -> None:
        """Listen as the settings say. `address` is None where no metrics are wanted, or no port was free.

        `count_statuses` counts all trials by status (`Store.count_statuses`).
        """
        registry = CollectorRegistry()
        self.metrics = FarmMetrics(registry)
        self._count_statuses = count_statuses
        self._next_at = self._trials_at = 0.0
        self._exporter: Exporter | None = None
        if settings.metrics_port:
            try:
                self._exporter = Exporter(registry, settings.metrics_port)
            except FarmError as error:  # the farm works without
                _log.warning("%s", error)
        self.address = self._exporter.address if self._exporter else None
        if self.address and self.address[1] != settings.metrics_port:
            _log.info("port %d is in use; metrics are on %d", settings.metrics_port, self.address[1])

    def watch(self, keeper: Keeper) -> None:
        """Take over what the keeper knows; cheap to call on every turn."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + _PERIOD_S
        self.metrics.observe_boards(keeper.rows)
        for name, board in keeper.boards.items():
            self.metrics.observe_link(name, board.state.up, board.state.connects)
        addresses = {name: (board.board_type, board.way.metrics_address) for name, board in keeper.boards.items()}
        self.set_targets({name: (kind, address) for name, (kind, address) in addresses.items() if address})
        self.metrics.observe_tracker(keeper.tracker.is_alive, keeper.tracker_restarts)
        self.metrics.observe_probe_worker(keeper.probing.worker.restarts)
        if now >= self._trials_at:
            self._trials_at = now + _TRIALS_PERIOD_S
            try:
                self.metrics.observe_trials(self._count_statuses())
            except FarmError as error:  # the store is busy: next time
                _log.warning("%s", error)

    def note_report(self, report: Mapping[str, Any]) -> None:
        """A probe has been made."""
        self.metrics.observe_probe(str(report["board"]), report)

    def set_targets(self, targets: Mapping[str, tuple[str, tuple[str, int]]]) -> None:
        """Where boards' own metrics are reached here; see `Exporter.set_targets`."""
        if self._exporter:
            self._exporter.set_targets(targets)

    def close(self) -> None:
        """Stop serving."""
        if self._exporter:
            self._exporter.close()
