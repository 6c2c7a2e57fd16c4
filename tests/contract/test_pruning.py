"""What every store forgets of events, and what it never does."""

from __future__ import annotations

import pathlib

import pytest

from farm.settings import StoreLocation
from farm.store import Store, pruning, schema
from farm.values import Board
from tests.fleet_store import Clocks

DAY_S = 86400.0


@pytest.fixture
def clocks() -> Clocks:
    """Clocks that stand still until moved."""
    return Clocks()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test can fill."""
    monkeypatch.setattr(pruning, "EVENTS_KEPT", 20)
    monkeypatch.setattr(pruning, "EVENTS_ALWAYS_KEPT", 5)


def add_events(store: Store, count: int, *subjects: str) -> None:
    """Some of a rack's events, in turns."""
    for number in range(count):
        for subject in subjects:
            store.add_event("kind", subject, str(number))


@pytest.mark.usefixtures("small")
def test_of_each_the_newest_are_kept(place: StoreLocation, clocks: Clocks) -> None:
    """One that has too many costs no other anything."""
    with Store(place, clocks.read, lambda: clocks.wall) as store:
        add_events(store, 3, "quiet")
        add_events(store, 50, "loud")
        assert store.prune_events() == 30
        assert [row["message"] for row in store.fetch_events("loud")] == [str(number) for number in range(30, 50)]
        assert len(store.fetch_events("quiet")) == 3
        assert store.prune_events() == 0


@pytest.mark.usefixtures("small")
def test_what_is_old_goes_but_for_the_last(place: StoreLocation, clocks: Clocks) -> None:
    """A season later the last few are left, and all that came since; a clock that was set far ahead costs no more."""
    with Store(place, clocks.read, lambda: clocks.wall) as store:
        add_events(store, 10, "a", "b")
        clocks.wall += pruning.EVENTS_KEPT_S + DAY_S
        add_events(store, 4, "b")
        assert store.prune_events() == 5 + 9
        assert [row["message"] for row in store.fetch_events("a")] == ["5", "6", "7", "8", "9"]
        assert [row["message"] for row in store.fetch_events("b")] == ["9", "0", "1", "2", "3"]


@pytest.mark.usefixtures("small")
def test_boards_events_are_bounded_too(place: StoreLocation, clocks: Clocks) -> None:
    """A board that is leased for every probe does not fill the disk."""
    with Store(place, clocks.read, lambda: clocks.wall) as store:
        store.save_board(Board("b", "local", simulated=False))
        for _ in range(20):
            store.release_lease(store.acquire_lease("b", "me", "probe"))
        store.prune_events()
        assert len(store.fetch_board_events("b")) == 20


@pytest.mark.usefixtures("small")
def test_all_together_are_bounded(place: StoreLocation, clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subjects that come and go, a few events each, do not add up."""
    monkeypatch.setattr(pruning, "EVENTS_KEPT_IN_ALL", 30)
    with Store(place, clocks.read, lambda: clocks.wall) as store:
        add_events(store, 1, *(f"s{number}" for number in range(50)))
        assert store.prune_events() == 20


def test_counting_reads_no_trial(tmp_path: pathlib.Path) -> None:
    """What a campaign's trials come to is read from an index, all trials by status from a table of a few rows."""
    with Store(tmp_path / "s") as store, store._engine.connect() as connection:
        seen: list[str] = []
        for statement in (
            "SELECT fault_side, count(*) FROM trials WHERE campaign = 1 AND purpose = 'search' GROUP BY fault_side",
            "SELECT total(held_s) FROM trials WHERE campaign = 1",
            "SELECT board_type, board, purpose, status, fault_side, count(*), total(held_s) FROM trials"
            " WHERE campaign = 1 GROUP BY board_type, board, purpose, status, fault_side",
        ):
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}").all()
            seen += [str(row[-1]) for row in plan if "trials" in str(row[-1])]
        assert all("USING COVERING INDEX ix_trials_campaign" in line for line in seen), seen
        assert len(seen) == 3
    assert set(schema.trial_counts.c.keys()) == {"status", "trials"}
