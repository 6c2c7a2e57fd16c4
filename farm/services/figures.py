"""What Prometheus is told that has to be asked of the store, or of the disk: on a thread with a store of its own, so
that a long table keeps nobody's boards waiting.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Mapping
from typing import Any

from farm.errors import FarmError
from farm.metrics.farm_metrics import FarmMetrics
from farm.settings import Settings
from farm.store import Store

# As often as an ordinary Prometheus asks.
PERIOD_S = 15.0
# Of the time, so much at most is spent on asking.
_SHARE = 0.05
# The last values of a campaign that is over stay for some scrapes.
_LATELY_S = 600.0
# A store with more campaigns under way shows the newest: each has some thirty series.
MOST_CAMPAIGNS = 100
_STOP_TIMEOUT_S = 35.0

_log = logging.getLogger(__name__)


class Figures:
    """Tells `metrics` what the store and the disk have to say, now and every `period_s`, until `close`."""

    def __init__(self, settings: Settings, metrics: FarmMetrics, period_s: float = PERIOD_S) -> None:
        self._settings, self._metrics, self._period_s = settings, metrics, period_s
        # What trials of each campaign have come to so far.
        self._sums: dict[int, dict[str, Any]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="farm-figures", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what it is asking is waited for."""
        self._ended.set()
        self._thread.join(_STOP_TIMEOUT_S)

    def _work(self) -> None:
        while not self._ended.is_set():
            try:
                with Store(self._settings.store_location) as store:
                    self._ask_until_it_fails(store)
            except (FarmError, OSError) as error:  # the store is busy, or gone for a while: next time
                _log.warning("figures for Prometheus: %s", error)
            self._ended.wait(self._period_s)

    def _ask_until_it_fails(self, store: Store) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            self._sums = observe(store, self._settings, self._metrics, self._sums)
            self._ended.wait(max(self._period_s, (time.monotonic() - began) / _SHARE))


def observe(
    store: Store, settings: Settings, metrics: FarmMetrics, before: Mapping[int, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Ask once; `before` is what this returned the last time. Raises FarmError, OSError."""
    disk = shutil.disk_usage(settings.home_path)
    metrics.observe_disk(disk.free, disk.total)
    metrics.observe_trials(store.count_statuses())
    standings = store.fetch_standings(_LATELY_S, MOST_CAMPAIGNS)
    sums = {row["id"]: store.sum_trials(row["id"], before.get(row["id"])) for row in standings}
    metrics.observe_campaigns(store.count_campaigns(), standings, sums)
    return sums
