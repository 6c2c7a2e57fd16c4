"""Collect what Prometheus shows from the services. `farm/metrics/` defines the metrics."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from farm.errors import FarmError
from farm.metrics.farm_metrics import Exporter, FarmMetrics
from farm.settings import Settings
from farm.store import Store
from farm.types.states import TrialSums

if TYPE_CHECKING:
    from farm.services.keeper import Keeper

# As often as an ordinary Prometheus scrapes.
PERIOD_S = 15.0
# The largest share of the time spent on queries.
_SHARE = 0.05
# The last values of a campaign that is over stay for some scrapes.
_LATELY_S = 600.0
# A store with more running campaigns shows the newest: each has some thirty series.
MOST_CAMPAIGNS = 100
# Longer than a store's own deadline of 30 s, in which the thread may be.
_STOP_TIMEOUT_S = 35.0

_PERIOD_S = 1.0
_log = logging.getLogger(__name__)


class Figures:
    """Updates `metrics` from store and disk, now and every `period_s`, until `close`."""

    def __init__(self, settings: Settings, metrics: FarmMetrics, period_s: float = PERIOD_S) -> None:
        self._settings, self._metrics, self._period_s = settings, metrics, period_s
        # The sums over each campaign's trials so far.
        self._sums: dict[int, TrialSums] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="farm-figures", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after its running query."""
        self._ended.set()
        self._thread.join(_STOP_TIMEOUT_S)

    def _work(self) -> None:
        while not self._ended.is_set():
            try:
                with Store(self._settings.store_location) as store:
                    while not self._ended.is_set():
                        began = time.monotonic()
                        self._sums = observe(store, self._settings, self._metrics, self._sums)
                        self._ended.wait(max(self._period_s, (time.monotonic() - began) / _SHARE))
            except (FarmError, OSError) as error:  # the store is busy or unreachable: next time
                _log.warning("figures for Prometheus: %s", error)
            self._ended.wait(self._period_s)


def observe(
    store: Store, settings: Settings, metrics: FarmMetrics, before: Mapping[int, TrialSums]
) -> dict[int, TrialSums]:
    """Query once; `before` is the last return value. Raises FarmError, OSError."""
    disk = shutil.disk_usage(settings.home_path)
    metrics.observe_disk(disk.free, disk.total)
    metrics.observe_trials(store.trials.count_statuses())
    standings = store.totals.fetch_standings(_LATELY_S, MOST_CAMPAIGNS)
    sums = {each.id: store.totals.sum_trials(each.id, before.get(each.id)) for each in standings}
    metrics.observe_campaigns(store.campaigns.count(), standings, sums)
    return sums


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
        """Copy the keeper's state; cheap to call on every turn."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + _PERIOD_S
        self.metrics.observe_boards(keeper.rows)
        for name, board in keeper.boards.items():
            self.metrics.observe_link(name, board.state.up, board.state.connects)
        addresses = {name: (board.board_type, board.route.metrics_address) for name, board in keeper.boards.items()}
        self.set_targets({name: (kind, address) for name, (kind, address) in addresses.items() if address})
        self.metrics.observe_tracker(keeper.tracker.is_alive, keeper.tracker_restarts)

    def note_report(self, report: Mapping[str, Any]) -> None:
        """Count a probe."""
        self.metrics.observe_probe(str(report["board"]), report)

    def set_targets(self, targets: Mapping[str, tuple[str, tuple[str, int]]]) -> None:
        """Set the local addresses of boards' own metrics; see `Exporter.set_targets`."""
        if self._exporter:
            self._exporter.set_targets(targets)

    def close(self) -> None:
        if self._figures:
            self._figures.close()
        if self._exporter:
            self._exporter.close()
