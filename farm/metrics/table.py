"""Every metric of the coordinator, once: its name, what kind it is, its labels and its meaning.

Names follow Prometheus: base units, `_total` for what only grows. How values get in is `farm_metrics.py`'s business.
"""

from __future__ import annotations

import dataclasses

from device_agent.protocol import StrEnum

PREFIX = "tvm_farm_"


class Kind(StrEnum):
    """What may be done with a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"  # starts at 0 with the process, unless its text says otherwise
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True)
class Metric:
    """One line of the table. `name` is without the prefix; `buckets` are a histogram's upper bounds."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As Prometheus sees it."""
        return PREFIX + self.name


# From a board that answers at once to the deadline of one that hangs.
_PROBE_BUCKETS_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

INFO = Metric("info", Kind.GAUGE, ("version",), "Always 1; the farm's version.")
BOARDS = Metric(
    "boards", Kind.GAUGE, ("state", "health"), "Boards in the store, by state and health; every pair is always there."
)
BOARD_INFO = Metric(
    "board_info", Kind.GAUGE, ("board", "board_type", "transport", "simulated"), "Always 1; who a board is."
)
BOARD_STATE = Metric(
    "board_state", Kind.GAUGE, ("board", "state"), "1 for the state that a board is in, 0 for the others."
)
BOARD_HEALTH = Metric(
    "board_health", Kind.GAUGE, ("board", "health"), "1 for the health that a board has, 0 for the others."
)
BOARD_SEEN = Metric(
    "board_last_seen_timestamp_seconds",
    Kind.GAUGE,
    ("board",),
    "When a board last described itself, since the epoch; absent if never.",
)
LINK_UP = Metric("board_link_up", Kind.GAUGE, ("board",), "Whether the way to a board stands: SSH, or its process.")
LINK_CONNECTS = Metric(
    "board_link_connects_total", Kind.COUNTER, ("board",), "How often the way to a board came up; 1 is no loss yet."
)
PROBES = Metric("probes_total", Kind.COUNTER, ("board", "result"), "Probes made, by result: passed, failed, skipped.")
PROBE_SECONDS = Metric(
    "probe_duration_seconds", Kind.HISTOGRAM, (), "How long probes took that passed or failed.", _PROBE_BUCKETS_S
)
GOLDEN_SECONDS = Metric(
    "golden_kernel_seconds", Kind.GAUGE, ("board",), "Median time of the golden kernel in a board's latest probe."
)
GOLDEN_FACTOR = Metric(
    "golden_kernel_factor",
    Kind.GAUGE,
    ("board",),
    "A board's golden-kernel time divided by its type's: 1.05 is 5 % slower. Absent until enough is known.",
)
LEASES = Metric("leases_open", Kind.GAUGE, (), "Leases that are open.")
LEASE_AGE = Metric("lease_age_seconds", Kind.GAUGE, ("board",), "How long a board has been held; absent if it is not.")
TRACKER_UP = Metric("tracker_up", Kind.GAUGE, (), "Whether TVM's tracker runs.")
TRACKER_RESTARTS = Metric("tracker_restarts_total", Kind.COUNTER, (), "How often the tracker was started again.")
WORKER_RESTARTS = Metric(
    "probe_worker_restarts_total", Kind.COUNTER, (), "How often the process that makes probes was started again."
)
TRIALS = Metric("trials_total", Kind.COUNTER, ("status",), "Trials in the store, of all time, by status.")

CAMPAIGNS = Metric(
    "campaigns", Kind.GAUGE, ("state",), "Campaigns in the store, by state; every state is always there."
)
CAMPAIGN_STATE = Metric(
    "campaign_state",
    Kind.GAUGE,
    ("campaign", "state"),
    "1 for the state of a campaign that is not over, or was until lately; 0 for the others.",
)
CAMPAIGN_TRIALS = Metric(
    "campaign_trials_total",
    Kind.COUNTER,
    ("campaign", "side"),
    "Trials of a campaign's search: ok, or by whose fault they failed. From the store, whoever carried it out.",
)
CAMPAIGN_BUILD = Metric(
    "campaign_build_seconds_total", Kind.COUNTER, ("campaign",), "How long compilers were busy for a campaign's trials."
)
CAMPAIGN_BOARDS_HELD = Metric(
    "campaign_board_seconds_total", Kind.COUNTER, ("campaign",), "How long boards were busy with a campaign's trials."
)
CAMPAIGN_SEARCH = Metric(
    "campaign_search_seconds_total",
    Kind.COUNTER,
    ("campaign",),
    "How long a campaign's search has been looking for candidates.",
)
CAMPAIGN_ELAPSED = Metric(
    "campaign_elapsed_seconds", Kind.GAUGE, ("campaign",), "Time since a campaign began, pauses left out."
)
CAMPAIGN_ETA = Metric(
    "campaign_eta_seconds", Kind.GAUGE, ("campaign",), "Until a campaign is finished; absent while nobody can say."
)
CAMPAIGN_BOARDS = Metric(
    "campaign_boards",
    Kind.GAUGE,
    ("campaign", "board_type", "doing"),
    "Boards that a campaign has, by what they do: measuring, verifying, or idle.",
)
CAMPAIGN_LATENCY = Metric(
    "campaign_best_latency_seconds",
    Kind.GAUGE,
    ("campaign", "model", "board_type", "operating_point"),
    "Sum of the best times of a model's workloads; absent while one has neither a time nor a prediction.",
)
CAMPAIGN_PREDICTED = Metric(
    "campaign_predicted_workloads",
    Kind.GAUGE,
    ("campaign", "model", "board_type", "operating_point"),
    "Workloads of a model that count by their prediction in that sum.",
)
BOARDS_WANTED = Metric(
    "boards_wanted",
    Kind.GAUGE,
    ("board_type",),
    "Campaigns that are to run and have no board of a type that they want: how long the queue for it is.",
)
HOME_FREE = Metric("home_free_bytes", Kind.GAUGE, (), "Free space on the disk that holds FARM_HOME.")
HOME_SIZE = Metric("home_size_bytes", Kind.GAUGE, (), "Size of the disk that holds FARM_HOME.")

METRICS: tuple[Metric, ...] = (
    INFO,
    BOARDS,
    BOARD_INFO,
    BOARD_STATE,
    BOARD_HEALTH,
    BOARD_SEEN,
    LINK_UP,
    LINK_CONNECTS,
    PROBES,
    PROBE_SECONDS,
    GOLDEN_SECONDS,
    GOLDEN_FACTOR,
    LEASES,
    LEASE_AGE,
    TRACKER_UP,
    TRACKER_RESTARTS,
    WORKER_RESTARTS,
    TRIALS,
    CAMPAIGNS,
    CAMPAIGN_STATE,
    CAMPAIGN_TRIALS,
    CAMPAIGN_BUILD,
    CAMPAIGN_BOARDS_HELD,
    CAMPAIGN_SEARCH,
    CAMPAIGN_ELAPSED,
    CAMPAIGN_ETA,
    CAMPAIGN_BOARDS,
    CAMPAIGN_LATENCY,
    CAMPAIGN_PREDICTED,
    BOARDS_WANTED,
    HOME_FREE,
    HOME_SIZE,
)
