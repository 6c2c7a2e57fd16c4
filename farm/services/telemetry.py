"""From what the services see to what Prometheus is told. The metrics themselves are in `farm/metrics/`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from farm.errors import FarmError
from farm.metrics.exporter import Exporter
from farm.metrics.farm_metrics import FarmMetrics
from farm.services.figures import PERIOD_S, Figures
from farm.settings import Settings

if TYPE_CHECKING:
    from farm.services.keeper import Keeper

_PERIOD_S = 1.0

_log = logging.getLogger(__name__)


class Telemetry:
    """Serves metrics until `close`. `watch` and `note_report` belong to the keeper's main thread."""

    def __init__(self, settings: Settings, period_s: float = PERIOD_S) -> None:
        """Listen as the settings say. `address` is None where no metrics are wanted, or no port was free.

        `period_s` is how often the store is asked.
        """
        registry = CollectorRegistry()
        self.metrics = FarmMetrics(registry)
        self._next_at = 0.0
        self._exporter: Exporter | None = None
        if settings.metrics_port:
            try:
                self._exporter = Exporter(registry, settings.metrics_port)
            except FarmError as error:  # the farm works without
                _log.warning("%s", error)
        self._figures = Figures(settings, self.metrics, period_s) if self._exporter else None
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
        self.metrics.observe_probe_worker(keeper.probing.restarts)

    def note_report(self, report: Mapping[str, Any]) -> None:
        """A probe has been made."""
        self.metrics.observe_probe(str(report["board"]), report)

    def set_targets(self, targets: Mapping[str, tuple[str, tuple[str, int]]]) -> None:
        """Where boards' own metrics are reached here; see `Exporter.set_targets`."""
        if self._exporter:
            self._exporter.set_targets(targets)

    def close(self) -> None:
        """Stop serving."""
        if self._figures:
            self._figures.close()
        if self._exporter:
            self._exporter.close()
