"""The table of metrics, and that it equals what is exported."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from farm.errors import UnavailableError
from farm.metrics import farm_metrics
from farm.metrics.farm_metrics import HOST, TRIES, Exporter, FarmMetrics
from farm.types.documents import BoardInfo
from farm.types.states import CampaignStanding, TrialSums
from farm.values import Health, State
from tests.board_rows import make_lease, make_row

NOW = 1_000_000.0
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> FarmMetrics:
    return FarmMetrics(registry, lambda: NOW)


def row(name: str, state: State = State.IDLE, health: Health = Health.GOOD, held_at: float | None = None) -> BoardInfo:
    lease = None if held_at is None else make_lease(acquired_at=held_at)
    transport = {"kind": "virtual", "seed": 0}
    return make_row(name, simulated=True, transport=transport, state=state, health=health, lease=lease)


def read(registry: CollectorRegistry) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def find(samples: Samples, name: str, **labels: str) -> float | None:
    """The value of one series, None where there is no such."""
    return samples.get((farm_metrics.PREFIX + name, frozenset(labels.items())))


def test_the_table_is_what_is_exported(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """Every metric of the table, of the kind that it says, before any value was set; and no other."""
    found = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in text_string_to_metric_families(generate_latest(registry).decode())
    }
    assert found == {metric.full_name: metric.kind for metric in farm_metrics.METRICS}


def test_every_pair_of_state_and_health_is_always_there(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """An alert on a state that no board is in must see 0, not nothing."""
    metrics.observe_boards([row("a"), row("b", State.OFFLINE, Health.SUSPECT), row("c")])
    samples = read(registry)
    pairs = {
        (state, health): find(samples, "boards", state=str(state), health=str(health))
        for state in State
        for health in Health
    }
    assert pairs.pop((State.IDLE, Health.GOOD)) == 2
    assert pairs.pop((State.OFFLINE, Health.SUSPECT)) == 1
    assert set(pairs.values()) == {0}
    assert [find(samples, "board_state", board="b", state=str(state)) for state in State] == [0, 0, 1]
    assert sum(find(samples, "board_health", board="b", health=str(health)) or 0 for health in Health) == 1


def test_a_failure_is_an_increase(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """Counts of probes are there at 0 before the first one: else Prometheus would not see it."""
    metrics.observe_boards([row("a")])
    assert find(read(registry), "probes_total", board="a", result="failed") == 0


def test_a_board_that_is_gone_leaves_no_series(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """Its last values would be taken for its present ones."""
    metrics.observe_boards([row("a", State.LEASED, held_at=NOW - 5), row("b")])
    for name in "ab":
        metrics.observe_link(name, True, 1)
        metrics.observe_probe(name, {"passed": True, "seconds": 1.0, "median_s": 0.01, "factor": 1.02})
    assert any(("board", "a") in labels for _, labels in read(registry))
    metrics.observe_boards([row("b")])
    assert not any(("board", "a") in labels for _, labels in read(registry))
    assert find(read(registry), "golden_kernel_factor", board="b") == 1.02


def test_probes_are_counted_by_result(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """The histogram has those that were made; one that was skipped says nothing of a duration."""
    metrics.observe_boards([row("a")])
    for report in (
        {"passed": True, "seconds": 0.3},
        {"passed": True, "seconds": 0.3},
        {"passed": False, "seconds": 500.0},
        {"passed": False, "skipped": True, "seconds": 9.0},
    ):
        metrics.observe_probe("a", report)
    samples = read(registry)
    counted = [find(samples, "probes_total", board="a", result=result) for result in ("passed", "failed", "skipped")]
    assert counted == [2, 1, 1]
    assert find(samples, "probe_duration_seconds_count") == 3
    assert find(samples, "probe_duration_seconds_sum") == pytest.approx(500.6)
    assert find(samples, "probe_duration_seconds_bucket", le="0.25") == 0
    assert find(samples, "probe_duration_seconds_bucket", le="0.5") == 2
    assert find(samples, "probe_duration_seconds_bucket", le="128.0") == 2
    assert find(samples, "probe_duration_seconds_bucket", le="+Inf") == 3


def test_leases_age_between_observations(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """The age is worked out on the scrape; a clock that was set back does not make it negative."""
    metrics.observe_boards(
        [row("a", State.LEASED, held_at=NOW - 90), row("b", State.LEASED, held_at=NOW + 90), row("c")]
    )
    samples = read(registry)
    assert find(samples, "leases_open") == 2
    assert [find(samples, "lease_age_seconds", board=name) for name in "abc"] == [90, 0, None]


def test_tracker_and_trials_are_as_told(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """Counters take over the totals that others keep; every status of a trial is there."""
    metrics.observe_tracker(True, 2)
    metrics.observe_trials({"ok": 7, "run_timeout": 1})
    samples = read(registry)
    assert find(samples, "tracker_up") == 1
    assert find(samples, "tracker_restarts_total") == 2
    assert find(samples, "trials_total", status="ok") == 7
    assert find(samples, "trials_total", status="build_failed") == 0


def standing(name: str, state: str, wanted: str = "run", **progress: Any) -> CampaignStanding:
    return CampaignStanding(len(name), name, state, wanted, board_types=("nano", "tx2"), **progress)


def test_a_campaign_is_told_as_its_engine_says(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """Latency, boards and times are there once they are said; a prediction is marked, and what is unknown is absent."""
    at = {"board_type": "nano", "point": "default"}
    models = [
        {"name": "mlp", "latency_s": 0.25, "predicted": 1, **at},
        {"name": "vgg", "latency_s": None, "predicted": 0, **at},
    ]
    boards = [{"name": name, "board_type": "nano", "doing": doing} for name, doing in (("a", "idle"), ("b", "idle"))]
    row = standing("c", "running", models=models, boards=boards, eta_s=90.0, search_s=4.0)
    sums = {1: TrialSums(9, {"ok": 7, "board": 1}, 3.5, 2.0)}
    metrics.observe_campaigns({"running": 1}, [row, standing("new", "submitted")], sums)
    samples = read(registry)
    labels = {"campaign": "c", "board_type": "nano", "operating_point": "default"}
    assert find(samples, "campaign_best_latency_seconds", model="mlp", **labels) == 0.25
    assert find(samples, "campaign_best_latency_seconds", model="vgg", **labels) is None
    assert find(samples, "campaign_predicted_workloads", model="mlp", **labels) == 1
    assert [
        find(samples, "campaign_boards", campaign="c", board_type=kind, doing="idle") for kind in ("nano", "tx2")
    ] == [2, 0]
    assert find(samples, "campaign_eta_seconds", campaign="c") == 90
    assert find(samples, "campaign_elapsed_seconds", campaign="c") is None
    assert find(samples, "campaign_search_seconds_total", campaign="c") == 4
    assert find(samples, "campaign_build_seconds_total", campaign="c") == 3.5
    assert [find(samples, "campaign_trials_total", campaign="c", side=side) for side in ("ok", "board", "farm")] == [
        *(7, 1, 0)
    ]
    assert find(samples, "campaign_trials_total", campaign="new", side="ok") is None
    assert find(samples, "campaign_state", campaign="new", state="submitted") == 1
    assert (find(samples, "campaigns", state="running"), find(samples, "campaigns", state="failed")) == (1, 0)


def test_the_queue_is_who_has_no_board_of_a_type(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """Campaigns that wait for an operator or are over queue for nothing; a queue that is empty is 0, not gone."""
    has_nano = [{"name": "a", "board_type": "nano", "doing": "measuring"}]
    rows = [standing("one", "running", boards=has_nano), standing("another", "waiting")]
    idle = [standing("paused", "paused"), standing("over", "finished"), standing("left", "interrupted")]
    metrics.observe_campaigns({}, [*rows, *idle, standing("held", "running", "pause")], {})
    samples = read(registry)
    assert [find(samples, "boards_wanted", board_type=kind) for kind in ("nano", "tx2")] == [1, 2]
    metrics.observe_campaigns({}, [], {})
    samples = read(registry)
    assert [find(samples, "boards_wanted", board_type=kind) for kind in ("nano", "tx2")] == [0, 0]
    assert not any(("campaign", "one") in labels for _, labels in samples)


def test_a_busy_port_is_skipped(registry: CollectorRegistry, metrics: FarmMetrics) -> None:
    """The address says which one it became; where ten are busy the setting is named."""
    with Exporter(registry, find_free_ports(TRIES)) as first, Exporter(registry, first.address[1]) as second:
        assert second.address[1] == first.address[1] + 1
        text = fetch(first, "/metrics")
        assert "# HELP tvm_farm_info" in text
        assert fetch(second, "/metrics") == text
    with Exporter(registry, 65535), pytest.raises(UnavailableError, match="FARM_METRICS_PORT"):
        Exporter(registry, 65535)


def test_boards_own_metrics_are_announced(registry: CollectorRegistry) -> None:
    """In the form of Prometheus' HTTP service discovery; any other path is not there."""
    with Exporter(registry, find_free_ports(1)) as exporter:
        assert fetch(exporter, "/targets") == "[]"
        exporter.set_targets({"a": ("jetson-nano", ("127.0.0.1", 4711))})
        assert json.loads(fetch(exporter, "/targets")) == [
            {"targets": ["127.0.0.1:4711"], "labels": {"board": "a", "board_type": "jetson-nano"}}
        ]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(exporter, "/etc/passwd")


def fetch(exporter: Exporter, path: str) -> str:
    host, port = exporter.address
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def find_free_ports(count: int) -> int:
    for first in range(20000, 60000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind((HOST, port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")
