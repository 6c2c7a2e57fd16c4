"""What every store promises of decisions about models: the latest counts, and is found by what it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from farm.settings import StoreLocation
from farm.store import Store
from farm.types.states import ModelDecision
from farm.values import DEFAULT_POINT, name_workloads

DECISION = ModelDecision(
    "ab" * 32, name_workloads(["w1", "w2"]), "nano", DEFAULT_POINT, True, {"w1": "c1"}, {"said": "gained"}, 3
)


@pytest.fixture
def store(place: StoreLocation) -> Iterator[Store]:
    with Store(place) as store:
        yield store


def test_the_latest_decision_takes_the_place_of_the_one_before(store: Store) -> None:
    """About one model at one place there is one; it comes back whole, with when it was made."""
    store.decisions.save(DECISION)
    later = dataclasses.replace(DECISION, refused={}, campaign=4)
    store.decisions.save(later)
    (found,) = store.decisions.fetch(model_sha256=DECISION.model_sha256)
    assert dataclasses.replace(found, decided_at=0.0) == later
    assert found.decided_at > 0


def test_decisions_are_found_by_what_they_are_about(store: Store) -> None:
    """Another point, type, kind of boards or set of workloads is another decision."""
    others = [
        dataclasses.replace(DECISION, operating_point="mode=MAXN"),
        dataclasses.replace(DECISION, board_type="tx2"),
        dataclasses.replace(DECISION, simulated=False, campaign=5),
        dataclasses.replace(DECISION, workloads=name_workloads(["w1"])),
    ]
    for each in (DECISION, *others):
        store.decisions.save(each)
    assert len(store.decisions.fetch()) == 5
    assert [each.board_type for each in store.decisions.fetch(board_type="tx2")] == ["tx2"]
    assert [each.campaign for each in store.decisions.fetch(simulated=False)] == [5]
    assert len(store.decisions.fetch(campaign=3, board_type="nano", simulated=True)) == 3
