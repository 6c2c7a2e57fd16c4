"""The farm's metrics: definitions, the values that the services report, and the exporter."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from device_agent.protocol import FaultSide, Status
from farm.closing import Closing
from farm.errors import UnavailableError
from farm.types.documents import BoardInfo
from farm.types.states import CampaignStanding, CampaignState, TrialSums
from farm.values import Health, State
from farm.version import __version__

PREFIX = "tvm_farm_"

# From the quickest answer of a board to the deadline of one that hangs.
_PROBE_BUCKETS_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
HOST = "127.0.0.1"
# As for the tracker: a second farm on this machine finds a port.
TRIES = 10
SIDES = ("ok", *map(str, FaultSide))
DOINGS = ("idle", "measuring", "verifying")
# States in which a campaign waits for no board: finalists have theirs, the others wait for an operator.
_NO_QUEUE = (CampaignState.VERIFYING, CampaignState.INTERRUPTED, CampaignState.PAUSED)
_TO_RUN = "run"
_RESULTS = ("passed", "failed", "skipped")
Family = GaugeMetricFamily | CounterMetricFamily


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric. `name` is without the prefix; `buckets` are a histogram's upper bounds."""

    name: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """Its Prometheus type; a counter starts at 0 with the process, unless its text says otherwise."""
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"

    @property
    def full_name(self) -> str:
        """Its name in Prometheus."""
        return PREFIX + self.name


INFO = Metric("info", ("version",), "Always 1; the farm's version.")
BOARDS = Metric("boards", ("state", "health"), "Boards in the store, by state and health; every pair is always there.")
BOARD_INFO = Metric("board_info", ("board", "board_type", "transport", "simulated"), "Always 1; who a board is.")
BOARD_STATE = Metric("board_state", ("board", "state"), "1 for the state that a board is in, 0 for the others.")
BOARD_HEALTH = Metric("board_health", ("board", "health"), "1 for the health that a board has, 0 for the others.")
BOARD_SEEN = Metric(
    "board_last_seen_timestamp_seconds",
    ("board",),
    "When a board last described itself, since the epoch; absent if never.",
)
LINK_UP = Metric("board_link_up", ("board",), "Whether the connection to a board is up: SSH, or its process.")
LINK_CONNECTS = Metric(
    "board_link_connects_total", ("board",), "How often the connection to a board was established; 1 is no loss yet."
)
PROBES = Metric("probes_total", ("board", "result"), "Probes made, by result: passed, failed, skipped.")
PROBE_SECONDS = Metric("probe_duration_seconds", (), "How long probes took that passed or failed.", _PROBE_BUCKETS_S)
GOLDEN_SECONDS = Metric(
    "golden_kernel_seconds", ("board",), "Median time of the golden kernel in a board's latest probe."
)
GOLDEN_FACTOR = Metric(
    "golden_kernel_factor",
    ("board",),
    "A board's golden-kernel time divided by its type's: 1.05 is 5 % slower. Absent until enough is known.",
)
LEASES = Metric("leases_open", (), "Leases that are open.")
LEASE_AGE = Metric("lease_age_seconds", ("board",), "How long a board has been held; absent if it is not.")
TRACKER_UP = Metric("tracker_up", (), "Whether TVM's tracker runs.")
TRACKER_RESTARTS = Metric("tracker_restarts_total", (), "How often the tracker was started again.")
TRIALS = Metric("trials_total", ("status",), "Trials in the store, of all time, by status.")

CAMPAIGNS = Metric("campaigns", ("state",), "Campaigns in the store, by state; every state is always there.")
CAMPAIGN_STATE = Metric(
    "campaign_state",
    ("campaign", "state"),
    "1 for the state of a campaign that is not over, or was until lately; 0 for the others.",
)
CAMPAIGN_TRIALS = Metric(
    "campaign_trials_total",
    ("campaign", "side"),
    "Trials of a campaign's search: ok, or by the side at fault. From the store, for all engines.",
)
CAMPAIGN_BUILD = Metric(
    "campaign_build_seconds_total", ("campaign",), "How long compilers were busy for a campaign's trials."
)
CAMPAIGN_BOARDS_HELD = Metric(
    "campaign_board_seconds_total", ("campaign",), "How long boards were busy with a campaign's trials."
)
CAMPAIGN_SEARCH = Metric(
    "campaign_search_seconds_total", ("campaign",), "How long a campaign's search has been looking for candidates."
)
CAMPAIGN_ELAPSED = Metric("campaign_elapsed_seconds", ("campaign",), "Time since a campaign began, pauses left out.")
CAMPAIGN_ETA = Metric("campaign_eta_seconds", ("campaign",), "Until a campaign is finished; absent while unknown.")
CAMPAIGN_BOARDS = Metric(
    "campaign_boards",
    ("campaign", "board_type", "doing"),
    "Boards that a campaign has, by what they do: measuring, verifying, or idle.",
)
CAMPAIGN_LATENCY = Metric(
    "campaign_best_latency_seconds",
    ("campaign", "model", "board_type", "operating_point"),
    "Sum of the best times of a model's workloads; absent while one has neither a time nor a prediction.",
)
CAMPAIGN_PREDICTED = Metric(
    "campaign_predicted_workloads",
    ("campaign", "model", "board_type", "operating_point"),
    "Workloads of a model that count by their prediction in that sum.",
)
BOARDS_WANTED = Metric(
    "boards_wanted",
    ("board_type",),
    "Campaigns that are to run and have no board of a type that they want: how long the queue for it is.",
)
HOME_FREE = Metric("home_free_bytes", (), "Free space on the disk that holds FARM_HOME.")
HOME_SIZE = Metric("home_size_bytes", (), "Size of the disk that holds FARM_HOME.")

METRICS = tuple(each for each in list(globals().values()) if isinstance(each, Metric))


class Exporter(Closing):
    """Serves a registry until `close`."""

    def __init__(self, registry: CollectorRegistry, first_port: int) -> None:
        """Listen on the first free port from `first_port` on. Raises UnavailableError if ten are busy."""
        self._lock = threading.Lock()
        self._targets: list[dict[str, object]] = []
        self._server, self._thread = _start(registry, first_port)
        self._serve_metrics = make_wsgi_app(registry)
        self._server.set_app(self._serve)
        self.address: tuple[str, int] = (HOST, int(self._server.server_address[1]))

    def set_targets(self, targets: Mapping[str, tuple[str, tuple[str, int]]]) -> None:
        """Set the targets of boards' own metrics: board, its type, address. Replaces earlier ones."""
        found: list[dict[str, object]] = [
            {"targets": [f"{host}:{port}"], "labels": {"board": name, "board_type": board_type}}
            for name, (board_type, (host, port)) in sorted(targets.items())
        ]
        with self._lock:
            self._targets = found

    def close(self) -> None:
        """Stop serving. Blocks for up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path in ("/", "/metrics"):
            served: Iterable[bytes] = self._serve_metrics(environ, start_response)
            return served
        if path == "/targets":
            with self._lock:
                body = json.dumps(self._targets).encode()
            start_response("200 OK", [("Content-Type", "application/json")])
            return [body]
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"there are /metrics and /targets\n"]


def _start(registry: CollectorRegistry, first_port: int) -> tuple[WSGIServer, threading.Thread]:
    for port in range(first_port, min(first_port + TRIES - 1, 65535) + 1):
        with contextlib.suppress(OSError):
            return start_http_server(port, HOST, registry)
    raise UnavailableError(
        f"ports {first_port} to {first_port + TRIES - 1} are all in use, so metrics cannot be served",
        "Set FARM_METRICS_PORT to the first of ten free ports, or to 0 for no metrics.",
    )


# By metric, then by label values.
Values = dict[Metric, dict[tuple[str, ...], float]]


def to_values(
    counts: Mapping[str, int], standings: Sequence[CampaignStanding], sums: Mapping[int, TrialSums]
) -> Values:
    """All series of campaigns. Values that no engine reported are absent, and so are sums without trials."""
    values: Values = {CAMPAIGNS: {(str(state),): counts.get(state, 0) for state in CampaignState}, BOARDS_WANTED: {}}
    values |= {metric: {} for metric in _OF_ONE}
    for row in standings:
        _add(values, row, sums.get(row.id))
    return values


_OF_ONE = (
    CAMPAIGN_STATE, CAMPAIGN_TRIALS, CAMPAIGN_BUILD, CAMPAIGN_BOARDS_HELD, CAMPAIGN_SEARCH, CAMPAIGN_ELAPSED,
    CAMPAIGN_ETA, CAMPAIGN_BOARDS, CAMPAIGN_LATENCY, CAMPAIGN_PREDICTED,
)  # fmt: skip


def _add(values: Values, row: CampaignStanding, sums: TrialSums | None) -> None:
    name, state = row.name, CampaignState(row.state)
    values[CAMPAIGN_STATE] |= {(name, str(each)): each is state for each in CampaignState}
    if sums is not None:
        values[CAMPAIGN_TRIALS] |= {(name, side): sums.by_side.get(side, 0) for side in SIDES}
        values[CAMPAIGN_BUILD][name,] = sums.build_s
        values[CAMPAIGN_BOARDS_HELD][name,] = sums.board_s
    for metric, seconds in (
        (CAMPAIGN_SEARCH, row.search_s),
        (CAMPAIGN_ELAPSED, row.wall_clock_s),
        (CAMPAIGN_ETA, row.eta_s),
    ):
        if seconds is not None:
            values[metric][name,] = float(seconds)
    boards, has = values[CAMPAIGN_BOARDS], set()
    for board_type in row.board_types:
        boards |= {(row.name, board_type, doing): 0 for doing in DOINGS}
    for board in row.boards or ():  # a finished campaign has none
        doing = (row.name, board["board_type"], board["doing"])
        boards[doing] = boards.get(doing, 0) + 1
        has.add(board["board_type"])
    if not state.over and row.wanted == _TO_RUN and state not in _NO_QUEUE:
        for board_type in row.board_types:
            queue = values[BOARDS_WANTED]
            queue[board_type,] = queue.get((board_type,), 0) + (board_type not in has)
    for model in row.models or ():
        labels = (name, model["name"], model["board_type"], model["point"])
        values[CAMPAIGN_PREDICTED][labels] = model["predicted"]
        if model["latency_s"] is not None:
            values[CAMPAIGN_LATENCY][labels] = model["latency_s"]


class FarmMetrics(Collector):
    """The coordinator's metrics, in a registry of its own. Thread-safe; every call replaces earlier values.

    A board missing from `observe_boards` is dropped, with all its series.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> None:
        """Register with `registry`. `clock` gives seconds since the epoch."""
        self._clock = clock
        self._lock = threading.Lock()
        self._values: Values = {metric: {} for metric in METRICS if metric.kind != "histogram"}
        self._held_since: dict[str, float] = {}
        disable_created_metrics()  # type: ignore[no-untyped-call] # a series more of every histogram, which is not in the table
        seconds = PROBE_SECONDS
        self._probe_seconds = Histogram(seconds.full_name, seconds.help, buckets=seconds.buckets, registry=registry)
        self._values[INFO][(__version__,)] = 1
        self.observe_boards(())
        self.observe_tracker(False, 0)
        self.observe_trials({})
        self.observe_campaigns({}, (), {})
        registry.register(self)

    def observe_boards(self, rows: Sequence[BoardInfo]) -> None:
        """Set all boards, as `store.boards.fetch` returns them."""
        values: Values = {
            BOARDS: {(str(state), str(health)): 0 for state in State for health in Health},
            BOARD_INFO: {},
            BOARD_STATE: {},
            BOARD_HEALTH: {},
            BOARD_SEEN: {},
        }
        for row in rows:
            name = row.name
            values[BOARDS][row.state, row.health] += 1
            who = (name, row.board_type, row.transport["kind"], "true" if row.simulated else "false")
            values[BOARD_INFO][who] = 1
            values[BOARD_STATE] |= {(name, str(state)): state == row.state for state in State}
            values[BOARD_HEALTH] |= {(name, str(health)): health == row.health for health in Health}
            if row.seen_at is not None:
                values[BOARD_SEEN][name,] = row.seen_at
        held = {row.name: row.lease.acquired_at for row in rows if row.lease}
        known = {row.name for row in rows}
        with self._lock:
            self._values |= values
            self._values[LEASES][()] = len(held)
            self._held_since = held
            for metric in (LINK_UP, LINK_CONNECTS, PROBES, GOLDEN_SECONDS, GOLDEN_FACTOR):
                found = self._values[metric]
                for labels in [labels for labels in found if labels[0] not in known]:
                    del found[labels]
            for name in known:
                # From the first scrape on: `increase` misses the first failure of a counter that appears with it.
                for each in _RESULTS:
                    self._values[PROBES].setdefault((name, each), 0)

    def observe_link(self, name: str, up: bool, connects: int) -> None:
        """Whether the connection to a board is up, and how often it was established."""
        with self._lock:
            self._values[LINK_UP][name,] = up
            self._values[LINK_CONNECTS][name,] = connects

    def observe_probe(self, name: str, report: Mapping[str, Any]) -> None:
        """A probe's result: `passed`, and if present `skipped`, `seconds`, `median_s`, `factor`."""
        result = "skipped" if report.get("skipped") else "passed" if report.get("passed") else "failed"
        with self._lock:
            probes = self._values[PROBES]
            probes[name, result] = probes.get((name, result), 0) + 1
            if result != "skipped":
                self._probe_seconds.observe(float(report.get("seconds") or 0.0))
            if (median_s := report.get("median_s")) is not None:
                self._values[GOLDEN_SECONDS][name,] = float(median_s)
            if (factor := report.get("factor")) is not None:
                self._values[GOLDEN_FACTOR][name,] = float(factor)

    def observe_tracker(self, up: bool, restarts: int) -> None:
        """Whether the tracker runs, and how often it was restarted."""
        with self._lock:
            self._values[TRACKER_UP][()] = up
            self._values[TRACKER_RESTARTS][()] = restarts

    def observe_trials(self, counts: Mapping[str, int]) -> None:
        """Set trials of all time by status, as `store.trials.count_statuses` returns them."""
        with self._lock:
            self._values[TRIALS] = {(str(status),): counts.get(status, 0) for status in Status}

    def observe_campaigns(
        self, counts: Mapping[str, int], standings: Sequence[CampaignStanding], sums: Mapping[int, TrialSums]
    ) -> None:
        """Campaigns by state, those under way, and the sums over their trials by number, as from `Store`
        (`campaigns.count`, `fetch_standings`, `sum_trials`).
        """
        values = to_values(counts, standings, sums)
        with self._lock:
            # A type without waiting campaigns has a queue of 0, not none.
            for labels in self._values[BOARDS_WANTED]:
                values[BOARDS_WANTED].setdefault(labels, 0)
            self._values |= values

    def observe_disk(self, free_bytes: int, size_bytes: int) -> None:
        """The free space and size of FARM_HOME's disk."""
        with self._lock:
            self._values[HOME_FREE][()] = free_bytes
            self._values[HOME_SIZE][()] = size_bytes

    def collect(self) -> Iterator[Family]:
        """Every metric except the histogram, in order; called on a scrape."""
        now = self._clock()
        with self._lock:
            values = {metric: dict(found) for metric, found in self._values.items()}
            values[LEASE_AGE] = {(name,): max(0.0, now - at) for name, at in self._held_since.items()}
        for metric in METRICS:
            if metric not in values:  # the histogram collects itself
                continue
            family: Family
            if metric.kind == "counter":
                family = CounterMetricFamily(metric.full_name, metric.help, labels=metric.labels)
            else:
                family = GaugeMetricFamily(metric.full_name, metric.help, labels=metric.labels)
            for labels, value in values[metric].items():
                family.add_metric(labels, float(value))
            yield family

    def describe(self) -> Iterator[Family]:
        """As `collect`, for the registry's check of names."""
        return self.collect()
