"""What every store promises of records: chosen, forgotten, and those of two farms put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from farm.settings import StoreLocation
from farm.store import Store
from farm.store.totals import TrialCosts
from farm.values import DEFAULT_POINT, SEARCH_TRIAL, WINNER_TRIAL, Record
from tests.places import Places
from tests.stored_workloads import make_record, make_trial, make_workload

NANO, TX2 = "jetson-nano", "jetson-tx2"


def begin(store: Store) -> int:
    number = store.campaigns.start("farm tune", "tiny-cnn", "00", NANO, 16, {})
    store.workloads.save(
        number, [make_workload(name, target={"kind": "llvm", "mcpu": "cortex-a57"}) for name in ("w1", "w2")]
    )
    return number


@pytest.fixture
def store(place: StoreLocation) -> Iterator[Store]:
    with Store(place) as store:
        begin(store)
        yield store


@pytest.fixture
def other(places: Places) -> Iterator[Store]:
    """Another farm's store, with a campaign and workloads of its own, two of which both know."""
    with Store(places.make()) as store:
        begin(store)
        yield store


def bundle_of(store: Store) -> Any:
    return store.imports.fetch_bundle(store.records.fetch(simulated=None))


def test_trials_are_written_together_and_once(store: Store) -> None:
    """A batch is counted like single trials; what is there already is left out of it."""
    assert store.trials.add(make_trial("c0"))
    assert store.trials.add_several([make_trial(f"c{number}") for number in range(5)]) == 4
    assert store.trials.add_several([make_trial("bad", None, attempt=2)]) == 1
    assert store.trials.count_statuses() == {"ok": 5, "wrong_result": 1}


def test_the_best_are_each_candidates_best(store: Store) -> None:
    """By rising time, each candidate once, none that ever computed a wrong result, nothing of another place."""
    store.trials.add_several([make_trial(f"c{number}", 1.0 + number / 10) for number in range(9)])
    store.trials.add_several([make_trial("c3", 0.5, attempt=n, purpose=WINNER_TRIAL) for n in range(30)])
    store.trials.add_several([make_trial("c0", None, attempt=2), make_trial("fast", 0.1, operating_point="max")])
    store.trials.add_several([make_trial("model", 0.1, simulated=True)])
    best = store.records.fetch_best_trials("w1", NANO, DEFAULT_POINT, simulated=False, limit=3)
    assert [(row.candidate, row.median_s) for row in best] == [("c3", 0.5), ("c1", 1.1), ("c2", 1.2)]
    assert store.records.fetch_best_trials("w2", NANO, DEFAULT_POINT, simulated=False) == []
    assert store.records.fetch_operating_points("w1", simulated=False) == [(NANO, DEFAULT_POINT), (NANO, "max")]


def test_records_are_chosen(store: Store) -> None:
    """By place, time, campaign, target and origin; what nothing was asked about does not matter."""
    store.trials.add_several([make_trial("c1")])
    store.records.save(make_record(1.0))
    store.records.save(make_record(1.0, "c2", operating_point="max", board_type=TX2, origin={"store": "x"}))
    store.records.save(make_record(1.0, "c3", workload="w2", simulated=True))

    def ask(**values: Any) -> list[str]:
        return [each.candidate for each in store.records.fetch(**values)]

    [first, _] = store.records.fetch()
    assert ask() == ["c1", "c2"]
    assert ask(simulated=None, workloads=["w2"]) == ["c3"]
    assert ask(board_type=TX2) == ask(operating_point="max") == ask(imported=True) == ["c2"]
    assert ask(campaign=1) == ask(imported=False) == ["c1"]
    assert ask(target="cortex-a57") == ["c1", "c2"]
    assert ask(target="carmel") == ask(until=first.verified_at) == ask(since=first.verified_at + 60) == []
    assert ask(since=first.verified_at) == ["c1", "c2"]


def test_records_come_in_parts(store: Store) -> None:
    """Each once over all parts, in the order of the whole, with the count of all that are meant."""
    for number in range(5):
        store.records.save(make_record(1.0, f"c{number}", operating_point=f"p{number}"))
    store.records.save(make_record(1.0, "s", operating_point="p1", simulated=True))
    whole = [each.candidate for each in store.records.fetch(simulated=None)]
    parts = [store.records.fetch_page(2, start, simulated=None) for start in (0, 2, 4, 6)]
    assert [each.candidate for part, _ in parts for each in part] == whole
    assert {total for _, total in parts} == {store.records.count(simulated=None)} == {6}
    assert store.records.fetch_page(2, 0, target="carmel") == ([], 0)
    assert store.records.fetch_page(9, 0, workloads=["w1"], operating_point="p3")[1] == store.records.count() - 4 == 1


def test_forgotten_records_leave_their_trials(store: Store) -> None:
    """A record that was replaced meanwhile stays; what a search begins from is still there."""
    store.trials.add_several([make_trial("c1")])
    store.records.save(make_record(1.0))
    old = store.records.fetch()
    store.records.save(make_record(0.5, "c2"))
    assert store.records.remove(old) == 0
    assert store.records.remove(store.records.fetch()) == 1
    assert store.records.fetch() == []
    assert len(store.trials.fetch()) == 1


def test_another_farms_records_are_taken_in_once(store: Store, other: Store) -> None:
    """With their trials and workloads, saying where they are from and when they were verified there; twice is once."""
    other.workloads.save(1, [make_workload("w3")])
    other.trials.add_several([make_trial("c9", 0.5, workload="w3", held_s=9.0), make_trial("c8", 0.6, workload="w3")])
    other.records.save(make_record(0.5, "c9", workload="w3", evidence={"samples": 30}))
    taken = store.imports.take_in(bundle_of(other), "/srv/other.db", "ann@here")
    assert (taken.records, taken.trials, taken.workloads) == (1, 1, 1)
    [record] = store.records.fetch()
    [theirs] = other.records.fetch()
    assert dataclasses.replace(record, origin=None) == theirs
    assert (record.origin["store"], record.origin["source"]) == (other.imports.fetch_identity(), "/srv/other.db")
    [trial] = store.trials.fetch()
    campaign = next(each for each in store.campaigns.fetch_searches() if each.id == trial["campaign"])
    assert campaign.settings["origin"]["store"] == other.imports.fetch_identity()
    assert (campaign.state, campaign.model) == ("imported", "tiny-cnn")
    # What trials cost elsewhere, and how boards of these names fared there, says nothing about this farm's.
    assert store.totals.fetch_trial_costs(NANO, simulated=False) == TrialCosts()
    assert store.trials.fetch_newest_outcomes(0, 9) == []
    again = store.imports.take_in(bundle_of(other), "/srv/other.db", "ann@here")
    assert (again.records, again.trials, again.workloads, again.ours_stayed) == (0, 0, 0, 0)
    assert store.trials.count_statuses() == {"ok": 1}


@pytest.mark.parametrize(
    ("first", "second", "wins"),
    [
        (make_record(1.0, "c8"), make_record(0.9, "c9"), True),
        (make_record(0.9, "c8"), make_record(1.0, "c9"), False),
        (make_record(0.9, "c8"), make_record(1.0, "c9", evidence={"samples": 30}), True),
        (make_record(1.0, "c8", evidence={"samples": 30}), make_record(0.9, "c9"), False),
        (make_record(1.0, "c8"), make_record(1.0, "c9"), False),
    ],
    ids=["faster", "slower", "verified-again", "first-verified-again", "equal"],
)
def test_of_two_imported_records_the_better_verified_wins(
    store: Store, other: Store, first: Record, second: Record, wins: bool
) -> None:
    """The trials of both are kept in any case."""
    for number, each in enumerate((first, second)):
        other.trials.add_several([make_trial(each.candidate, each.median_s)])
        other.records.save(each, replace=True)
        taken = store.imports.take_in(bundle_of(other), "there", "ann")
        assert (taken.theirs_won, taken.ours_stayed) == ((int(wins), int(not wins)) if number else (0, 0))
    [record] = store.records.fetch()
    assert record.candidate == (second if wins else first).candidate
    assert {trial["candidate"] for trial in store.trials.fetch()} == {"c8", "c9"}


def test_no_imported_record_displaces_one_that_was_verified_here(store: Store, other: Store) -> None:
    """Another farm's time is its word alone: its trial comes in to be tried, and a record of our own displaces it."""
    store.trials.add_several([make_trial("c1", 1.0)])
    store.records.save(make_record(1.0))
    other.trials.add_several([make_trial("c9", 1e-9)])
    other.records.save(make_record(1e-9, "c9", evidence={"samples": 30}))
    assert store.imports.take_in(bundle_of(other), "there", "ann").ours_stayed == 1
    assert [each.candidate for each in store.records.fetch()] == ["c1"]
    known = store.trials.fetch_known_candidates("w1", NANO, DEFAULT_POINT, simulated=False)
    assert [each.candidate for each in known] == ["c1", "c9"]
    store.records.remove(store.records.fetch())
    store.imports.take_in(bundle_of(other), "there", "ann")
    assert [each.candidate for each in store.records.fetch()] == ["c9"]
    assert store.records.save(make_record(1.0))
    assert [(each.candidate, each.origin) for each in store.records.fetch()] == [("c1", None)]


def test_imported_trials_say_nothing_of_a_candidate_that_was_tried_here(store: Store, other: Store) -> None:
    """Another farm cannot make our candidate wrong, slow or fast."""
    store.trials.add_several([make_trial("c1", 1.0)])
    store.records.save(make_record(1.0))
    other.trials.add_several([make_trial("c1", 1e-9), make_trial("c1", None, attempt=2)])
    other.records.save(make_record(1e-9, "c1"))
    assert store.imports.take_in(bundle_of(other), "there", "ann").trials == 0
    [known] = store.trials.fetch_known_candidates("w1", NANO, DEFAULT_POINT, simulated=False)
    assert known.median_s == 1.0


def test_what_is_known_to_be_wrong_is_refused(store: Store, other: Store) -> None:
    """A candidate that computed a wrong result here is no record here, whichever farm verified it."""
    store.trials.add_several([make_trial("c9", None)])
    other.trials.add_several([make_trial("c9", 0.5)])
    other.records.save(make_record(0.5, "c9"))
    assert store.imports.take_in(bundle_of(other), "there", "ann").refused == 1
    assert store.records.fetch() == []


@pytest.mark.parametrize("purpose", [None, SEARCH_TRIAL, WINNER_TRIAL])
def test_a_record_that_says_it_is_ours_is_imported(store: Store, other: Store, purpose: str | None) -> None:
    """The farm that gave it is its origin, also where we tried its candidate: only a final of ours makes a record."""
    store.trials.add_several([make_trial("c9", purpose=purpose)] if purpose else [])
    other.trials.add_several([make_trial("c9", 0.5)])
    ours = {"store": store.imports.fetch_identity(), "source": "", "by": "", "at": 0}
    other.records.save(make_record(0.5, "c9", origin=ours))
    for _ in range(2):
        store.imports.take_in(bundle_of(other), "there", "ann")
        [record] = store.records.fetch()
        assert record.origin["store"] == other.imports.fetch_identity()


def test_another_farms_failures_judge_no_candidate(store: Store, other: Store) -> None:
    """A wrong result that was imported refuses no record, and hides no candidate from a search."""
    other.trials.add_several([make_trial("c9", 0.5), make_trial("c9", None, attempt=2), make_trial("c8", None)])
    other.records.save(make_record(0.5, "c9"))
    other.records.save(make_record(0.5, "c8", operating_point="max"))
    taken = store.imports.take_in(bundle_of(other), "there", "ann")
    assert (taken.records, taken.refused) == (2, 0)
    [best] = store.records.fetch_best_trials("w1", NANO, DEFAULT_POINT, simulated=False)
    [known] = store.trials.fetch_known_candidates("w1", NANO, DEFAULT_POINT, simulated=False)
    assert [each.median_s for each in (best, known)] == [0.5, 0.5]
    assert len(store.trials.fetch_similar(["w1"], simulated=False)) == 1
