"""What the store says of earlier runs in numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from device_agent.protocol import Status
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.totals import TrialCosts
from farm.values import Record
from tests.stored_workloads import make_trial, make_workload


@pytest.fixture
def store(place: StoreLocation) -> Iterator[Store]:
    with Store(place) as store:
        campaign = store.campaigns.start("farm tune", "mlp", "00", "jetson-nano", 16, {})
        store.workloads.save(campaign, [make_workload(name) for name in ("w1", "w2")])
        yield store


def add(store: Store, candidate: str, status: Status = Status.OK, **values: Any) -> None:
    median_s = 0.1 if status is Status.OK else None
    assert store.trials.add(make_trial(candidate, median_s, status, **{"simulated": True} | values))


def test_costs_are_medians_of_what_reached_a_board(store: Store) -> None:
    """A trial that held no board says nothing of what holding one costs."""
    add(store, "a", held_s=1.0, build_s=0.2)
    add(store, "b", held_s=3.0, build_s=0.6)
    add(store, "c", Status.BUILD_FAILED, build_s=9.0)
    add(store, "d", held_s=2.0)
    add(store, "e", held_s=50.0, build_s=50.0, simulated=False)
    assert store.totals.fetch_trial_costs("jetson-nano", simulated=True) == TrialCosts(3, 2.0, 0.4)
    assert store.totals.fetch_trial_costs("jetson-tx2", simulated=True) == TrialCosts()


def test_candidates_are_counted_once(store: Store) -> None:
    """Candidates count by workload and point, however often they were tried, and only where trials speak of them."""
    add(store, "a", Status.NOISY)
    add(store, "a", attempt=2)
    add(store, "b", Status.CRASHED)
    add(store, "c", Status.BOARD_LOST)
    add(store, "a", operating_point="a57=1428MHz")
    add(store, "a", workload="w2", simulated=False)
    hashes = ["w1", "w2", *(f"other{number}" for number in range(1200))]
    known = store.totals.count_known_candidates(hashes, "jetson-nano", simulated=True)
    assert known == {("w1", "default"): 2, ("w1", "a57=1428MHz"): 1}
    assert store.totals.count_known_candidates(["w2"], "jetson-nano", simulated=False) == {("w2", "default"): 1}


def test_records_are_found_by_point(store: Store) -> None:
    """A record covers its workload at its own operating point, and simulated ones stay apart."""
    for point, simulated in (("default", True), ("mode=MAXN", False)):
        record = Record("w1", "w1", "jetson-nano", point, "graph/2", "a", 0.1, 1.0, 0.0, 0.0, simulated, "[]")
        assert store.records.save(record)
    assert store.totals.fetch_recorded(["w1", "w2"], "jetson-nano", simulated=True) == {("w1", "default")}
    assert store.totals.fetch_recorded(["w1"], "jetson-nano", simulated=False) == {("w1", "mode=MAXN")}
    assert store.totals.fetch_recorded([], "jetson-nano", simulated=False) == set()
