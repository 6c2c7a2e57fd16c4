"""Every metric of the coordinator, once: its name, its labels and its meaning.

Names follow Prometheus: base units, `_total` for what only grows. How values get in is `farm_metrics.py`'s business.
"""

from __future__ import annotations

import dataclasses

PREFIX = "tvm_farm_"


@dataclasses.dataclass(frozen=True)
class Metric:
    """One line of the table. `name` is without the prefix; `buckets` are a histogram's upper bounds."""

    name: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """What may be done with it; a counter starts at 0 with the process, unless its text says otherwise."""
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"

    @property
    def full_name(self) -> str:
        """As Prometheus sees it."""
        return PREFIX + self.name


# From a board that answers at once to the deadline of one that hangs.
_PROBE_BUCKETS_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

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
LINK_UP = Metric("board_link_up", ("board",), "Whether the way to a board stands: SSH, or its process.")
LINK_CONNECTS = Metric(
    "board_link_connects_total", ("board",), "How often the way to a board came up; 1 is no loss yet."
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
WORKER_RESTARTS = Metric(
    "probe_worker_restarts_total", (), "How often the process that makes probes was started again."
)
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
    "Trials of a campaign's search: ok, or by whose fault they failed. From the store, whoever carried it out.",
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
CAMPAIGN_ETA = Metric(
    "campaign_eta_seconds", ("campaign",), "Until a campaign is finished; absent while nobody can say."
)
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
