"""What every store says of campaigns for Prometheus: how each stands, and sums over its trials."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from device_agent.protocol import Status
from farm.settings import StoreLocation
from farm.store import Store
from farm.types.states import TrialSums
from farm.values import WINNER_TRIAL
from tests.contract.test_campaign_store import NANO, TX2, add, submit


@pytest.fixture
def store(place: StoreLocation) -> Iterator[Store]:
    with Store(place) as store:
        assert submit(store) == 1
        yield store


def test_sums_go_on_from_where_they_were(store: Store) -> None:
    """Trials are counted by side, seconds added up, and a sum that goes on is the sum of all."""
    add(store, "a", build_s=0.5, held_s=1.0)
    add(store, "b", None, Status.CRASHED, build_s=0.25)
    first = store.totals.sum_trials(1)
    assert first == TrialSums(2, {"ok": 1, "candidate": 1}, 0.75, 1.0)
    add(store, "c", None, Status.BOARD_LOST, held_s=3.0)
    add(store, "a", purpose=WINNER_TRIAL, held_s=2.0)  # a winner's: it held a board, and is none of the search
    second = store.totals.sum_trials(1, first)
    assert second == store.totals.sum_trials(1)
    assert second.by_side == {"ok": 1, "candidate": 1, "board": 1}
    assert (second.build_s, second.board_s) == (0.75, 6.0)
    assert store.totals.sum_trials(1, second) == second
    assert store.totals.sum_trials(99).by_side == {}


def test_standings_are_of_campaigns_under_way(store: Store) -> None:
    """One that is over is reported for a while, then no more; what no engine has said is None; the newest are kept."""
    submit(store, "second", (NANO,))
    [first, second] = store.totals.fetch_standings(600.0, 10)
    assert (first.name, first.state, first.wanted, first.board_types) == ("fleet", "submitted", "run", (NANO, TX2))
    assert (second.board_types, second.models, second.eta_s) == ((NANO,), None, None)
    models = [{"name": "mlp", "board_type": NANO, "point": "default", "latency_s": 0.5, "predicted": 1, "workloads": 2}]
    store.campaigns.save_progress(
        1, {"models": models, "boards": [], "eta_s": None, "wall_clock_s": 7.5, "tasks": [{}]}
    )
    store.campaigns.note(2, "finished", "")
    [first, second] = store.totals.fetch_standings(600.0, 10)
    assert (first.models, first.boards, first.eta_s, first.wall_clock_s) == (models, [], None, 7.5)
    assert first.search_s is None  # an engine of before did not say it
    assert second.state == "finished"
    assert [row.name for row in store.totals.fetch_standings(-1.0, 10)] == ["fleet"]
    assert [row.name for row in store.totals.fetch_standings(600.0, 1)] == ["second"]
    assert store.campaigns.count() == {"submitted": 1, "finished": 1}
