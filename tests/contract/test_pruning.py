"""What every store forgets of events, and what it never does."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest

from device_agent.protocol import Outcome, Status
from farm.errors import InternalError, UsageError
from farm.settings import StoreLocation
from farm.store import Store, pruning, schema
from farm.store.session import StoreSession
from farm.values import WINNER_TRIAL, Board, Trial
from tests.fleet_store import Clocks
from tests.stored_workloads import make_record, make_workload

DAY_S = 86400.0
GOOD = Outcome(Status.OK, latency_s=(1e-3, 1e-3, 1e-3), board="b")
# A process that is killed within a deleting transaction.
KILLED = """
import os, sys
from farm.store import Store, schema, database
lift = database.deletable
def deletable(connection):
    with lift(connection):
        if connection.exec_driver_sql("SELECT count(*) FROM trials").scalar() < 45:
            os.kill(os.getpid(), 9)
        yield
database.deletable = __import__("contextlib").contextmanager(deletable)
from farm.store import pruning
pruning._FIRST_CHUNK = pruning._LARGEST_CHUNK = 5
place = sys.argv[1]
with Store(place if "://" in place else __import__("pathlib").Path(place)) as store:
    sum(store.pruning.forget_trials(1, "an operator"))
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "EVENTS_KEPT", 20)
    monkeypatch.setattr(pruning, "EVENTS_ALWAYS_KEPT", 5)


def add_events(store: Store, count: int, *subjects: str) -> None:
    """Some of a rack's events, in turns."""
    for number in range(count):
        for subject in subjects:
            store.events.add("kind", subject, str(number))


@pytest.mark.usefixtures("small")
def test_of_each_the_newest_are_kept(place: StoreLocation, clocks: Clocks) -> None:
    """One that has too many costs no other anything."""
    with Store(StoreSession(place, clocks.read, lambda: clocks.wall)) as store:
        add_events(store, 3, "quiet")
        add_events(store, 50, "loud")
        assert store.pruning.prune_events() == 30
        assert [row.message for row in store.events.fetch("loud")] == [str(number) for number in range(30, 50)]
        assert len(store.events.fetch("quiet")) == 3
        assert store.pruning.prune_events() == 0


@pytest.mark.usefixtures("small")
def test_what_is_old_goes_but_for_the_last(place: StoreLocation, clocks: Clocks) -> None:
    """A season later the last few are left, and all that came since; a clock that was set far ahead costs no more."""
    with Store(StoreSession(place, clocks.read, lambda: clocks.wall)) as store:
        add_events(store, 10, "a", "b")
        clocks.wall += pruning.EVENTS_KEPT_S + DAY_S
        add_events(store, 4, "b")
        assert store.pruning.prune_events() == 5 + 9
        assert [row.message for row in store.events.fetch("a")] == ["5", "6", "7", "8", "9"]
        assert [row.message for row in store.events.fetch("b")] == ["9", "0", "1", "2", "3"]


@pytest.mark.usefixtures("small")
def test_boards_events_are_bounded_too(place: StoreLocation, clocks: Clocks) -> None:
    """A board that is leased for every probe does not fill the disk."""
    with Store(StoreSession(place, clocks.read, lambda: clocks.wall)) as store:
        store.boards.save(Board("b", "local", simulated=False))
        for _ in range(20):
            store.leases.release(store.leases.acquire("b", "me", "probe"))
        store.pruning.prune_events()
        assert len(store.events.fetch_of_boards("b")) == 20


@pytest.mark.usefixtures("small")
def test_all_together_are_bounded(place: StoreLocation, clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subjects that come and go, a few events each, do not add up."""
    monkeypatch.setattr(pruning, "EVENTS_KEPT_IN_ALL", 30)
    with Store(StoreSession(place, clocks.read, lambda: clocks.wall)) as store:
        add_events(store, 1, *(f"s{number}" for number in range(50)))
        assert store.pruning.prune_events() == 20


def test_counting_reads_no_trial(tmp_path: pathlib.Path) -> None:
    """Sums over a campaign's trials are read from an index, all trials by status from a table of a few rows."""
    with Store(tmp_path / "s") as store, store.session.engine.connect() as connection:
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


def tune(store: Store, trials: int, *, over: bool) -> int:
    """A campaign of so many candidates, of which the first has a record, the second was a winner's rival, and the third
    computed a wrong result.
    """
    number = store.campaigns.start("farm tune m", "m", "", "local", trials, {})
    store.workloads.save(number, [make_workload()])
    wrong = Outcome(Status.WRONG_RESULT, board="b")
    made = [Trial(number, "w", f"{number}-{each}", "default", 1, GOOD, "[]") for each in range(trials)]
    made[2] = Trial(number, "w", f"{number}-2", "default", 1, wrong, "[]")
    made += [Trial(number, "w", f"{number}-{each}", "default", 2, GOOD, "[]", purpose=WINNER_TRIAL) for each in (0, 1)]
    assert store.trials.add_several(made) == trials + 2
    if over:
        store.campaigns.finish(number, "finished")
    return number


def keep_record(store: Store, candidate: str) -> None:
    store.records.save(make_record(1e-3, candidate, workload="w", board_type="local"), replace=True)


def list_left(store: Store, campaign: int) -> list[str]:
    """The candidates of a campaign's trials that are there."""
    return [row["candidate"] for row in store.trials.fetch(campaign, columns=("candidate",))]


def test_trials_go_but_for_what_rests_on_them(place: StoreLocation, clocks: Clocks) -> None:
    """A record's candidate, what winners were measured in, and wrong results stay; a campaign under way loses nothing.

    Deleting twice is deleting once, who ordered it is written down, and trials are as safe from others as before.
    """
    with Store(StoreSession(place, clocks.read, lambda: clocks.wall)) as store:
        old, young, running = tune(store, 30, over=True), tune(store, 10, over=False), tune(store, 10, over=False)
        clocks.wall += 100 * DAY_S
        store.campaigns.finish(young, "failed")
        keep_record(store, "1-0")
        [found] = store.pruning.plan(clocks.wall - 90 * DAY_S).campaigns
        assert (found.campaign, found.name, found.trials, found.kept) == (old, "1", 28, 4)
        assert [each.campaign for each in store.pruning.plan().campaigns] == [old, young]
        assert 20_000 < store.pruning.plan(names=["1"]).bytes < 40_000
        with pytest.raises(UsageError, match="not over"):
            store.pruning.plan(names=[str(running)])
        with pytest.raises(UsageError, match="no campaign"):
            store.pruning.plan(names=["unknown"])
        assert sum(store.pruning.forget_trials(old, "ana@rack")) == 28
        assert list_left(store, old) == ["1-0", "1-2", "1-0", "1-1"]
        assert (
            sum(store.pruning.forget_trials(old, "ana@rack"))
            == sum(store.pruning.forget_trials(running, "ana@rack"))
            == 0
        )
        assert len(list_left(store, young)) == len(list_left(store, running)) == 12
        assert [row.candidate for row in store.records.fetch_best_trials("w", "local", "default", simulated=False)][
            :1
        ] == ["1-0"]
        [change] = store.events.fetch_changes(5)
        assert (change.kind, change.subject, change.by) == ("trials_forgotten", "campaign 1", "ana@rack")
        with pytest.raises(InternalError, match="append-only"), store.session.writing() as connection:
            connection.execute(schema.trials.delete())


def test_who_was_killed_while_deleting_is_followed(place: StoreLocation) -> None:
    """What was deleted before is gone, what the killed one was at is there, and the next one goes on; a record that
    came meanwhile keeps its trial.
    """
    with Store(place) as store:
        tune(store, 60, over=True)
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(place)], capture_output=True, timeout=60, check=False
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        assert 40 <= len(list_left(store, 1)) < 45
        left = list_left(store, 1)[-3]
        keep_record(store, left)
        with pytest.raises(InternalError, match="append-only"), store.session.writing() as connection:
            connection.execute(schema.trials.delete())
        assert sum(store.pruning.forget_trials(1, "me")) > 30
        assert sorted(list_left(store, 1)) == sorted({"1-2", left} | {"1-0", "1-1"})
        assert store.pruning.fetch_room()[0] > 0
