"""What every store promises: trials once and for ever, several writers at once, and plain words when it cannot work."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from device_agent.protocol import Outcome, Status
from farm.errors import InternalError, TransientError, UnavailableError
from farm.settings import StoreLocation
from farm.store import Store, database, soundness
from farm.values import DEFAULT_POINT, WINNER_TRIAL, Board
from tests.contract.conftest import run_python
from tests.places import execute
from tests.stored_workloads import make_record, make_trial, make_workload

ROOT = pathlib.Path(__file__).parents[2]
_WRITER = """
import sys
from device_agent.protocol import Outcome, Status
from farm.settings import parse_store
from farm.store import Store
from farm.values import Trial
name, count = sys.argv[2], int(sys.argv[3])
with Store(parse_store(sys.argv[1])) as store:
    for number in range(count):
        store.trials.add(Trial(1, "w1", f"{name}-{number}", "default", 1, Outcome(Status.OK, latency_s=(1.0,)), "[]"))
        store.trials.add(Trial(1, "w1", f"both-{number}", "default", 1, Outcome(Status.OK, latency_s=(1.0,)), "[]"))
"""
_WITHOUT_RIGHTS = """
import os, pathlib, sqlite3, sys
import farm.store.sqlite
from farm.errors import FarmError
from farm.settings import parse_store
from farm.store import Store
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    Store(parse_store(sys.argv[1]))
except FarmError as error:
    print(type(error).__name__, "|", error.message, "|", error.hint)
"""
_ON_A_FULL_DISK = """
import pathlib, resource, sys
from device_agent.protocol import Outcome, Status
from farm.errors import FarmError
from farm.settings import parse_store
from farm.store import Store
from farm.values import Trial
store = Store(parse_store(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
written = 0
try:
    while written < 100:
        outcome = Outcome(Status.OK, latency_s=(1.0,))
        store.trials.add(Trial(1, "w1", f"c{written}", "default", 1, outcome, "x" * 20_000))
        written += 1
except FarmError as error:
    print(written, "|", type(error).__name__, "|", error.hint)
"""
_READ_ON_A_FULL_DISK = """
import pathlib, resource, signal, sys
from farm.errors import UnavailableError
from farm.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file may grow by a byte, that of an index neither
with Store(pathlib.Path(sys.argv[1])) as store:
    print(len(store.campaigns.fetch_searches()))
    try:
        store.events.add("x", "y", "z")
    except UnavailableError as error:
        print(error.message)
"""


@pytest.fixture
def store(place: StoreLocation) -> Iterator[Store]:
    with Store(place) as store:
        begin(store)
        yield store


def begin(store: Store) -> int:
    campaign = store.campaigns.start("farm tune", "tiny-cnn", "00", "jetson-nano", 16, {"batch": 8})
    store.workloads.save(campaign, [make_workload(name) for name in ("w1", "w2")])
    return campaign


# Trials


def test_a_trial_is_written_once(store: Store) -> None:
    """A second delivery of the same trial changes nothing and says so."""
    assert store.trials.add(make_trial("c1", 1.0))
    assert not store.trials.add(make_trial("c1", 9.0))
    assert [row["median_s"] for row in store.trials.fetch(1)] == [1.0]


def test_another_attempt_is_another_trial(store: Store) -> None:
    """Each part of a trial's identity makes a new one."""
    assert store.trials.add(make_trial("c1", None, Status.NOISY))
    for other in (
        {"attempt": 2},
        {"operating_point": "maxn"},
        {"candidate": "c2"},
        {"workload": "w2"},
        {"board_type": "jetson-tx2"},
        {"purpose": WINNER_TRIAL},
    ):
        given = {"candidate": "c1", "median_s": None, "status": Status.NOISY} | other
        assert store.trials.add(make_trial(**given))
        assert not store.trials.add(make_trial(**given))
    assert len(store.trials.fetch()) == 7


@pytest.mark.parametrize("statement", ["UPDATE trials SET median_s = 0", "DELETE FROM trials"])
def test_trials_are_append_only(store: Store, place: StoreLocation, statement: str) -> None:
    """The database itself refuses to change or delete a trial."""
    store.trials.add(make_trial("c1", 1.0))
    with pytest.raises(sa.exc.IntegrityError, match="append-only"):
        execute(place, statement)
    assert [row["median_s"] for row in store.trials.fetch(1)] == [1.0]


def test_an_index_of_others_loses_no_trial_silently(store: Store, place: StoreLocation) -> None:
    """Where a unique index that is none of the farm's refuses a trial, the writer gets an error."""
    execute(place, "CREATE UNIQUE INDEX ix_own ON trials (campaign, board)")
    assert store.trials.add(make_trial("c1", 1.0))
    assert not store.trials.add(make_trial("c1", 1.0))
    with pytest.raises(InternalError, match="a rule that is none of a farm's"):
        store.trials.add_several([make_trial("c2", 2.0), make_trial("c3", 3.0)])
    assert store.trials.count(1)["ok"] == 1
    find = soundness.find_server_problems if isinstance(place, str) else soundness.find_problems
    assert "none of a farm's" in find(place)[0]  # type: ignore[arg-type]


def test_a_trial_of_no_campaign_is_our_bug(store: Store) -> None:
    """A row that the schema refuses is an internal error, not a lost trial."""
    with pytest.raises(InternalError, match=r"(?i)foreign key"):
        store.trials.add(make_trial(campaign=99))


def test_an_outcome_comes_back_as_it_was(store: Store) -> None:
    """All that a board said is kept: samples, evidence, nulls."""
    outcome = Outcome(Status.CRASHED, "worker died", signal="SIGSEGV", board="b", simulated=True)
    store.trials.add(make_trial(outcome=outcome))
    [row] = store.trials.fetch(1)
    assert Outcome.from_dict(row["outcome"]) == outcome
    assert (row["status"], row["fault_side"], row["median_s"], row["simulated"]) == ("crashed", "candidate", None, True)


def test_trials_are_counted_by_side(store: Store) -> None:
    """Every side has a number, zero included."""
    for index, status in enumerate([Status.OK, Status.OK, Status.CRASHED, Status.BOARD_LOST, Status.NOISY]):
        store.trials.add(make_trial(f"c{index}", 1.0, status))
    assert store.trials.count(1) == {
        "ok": 2,
        "candidate_faults": 1,
        "board_faults": 1,
        "farm_faults": 0,
        "sample_faults": 1,
    }


def test_known_candidates_leave_out_what_says_nothing_about_them(store: Store) -> None:
    """The best median of good trials, None for a candidate's own fault; faults of board and farm are left out."""
    again = begin(store)
    store.trials.add(make_trial("good", 3.0))
    store.trials.add(make_trial("good", 2.0, campaign=again))
    store.trials.add(make_trial("bad", None, Status.CRASHED))
    store.trials.add(make_trial("lost", None, Status.BOARD_LOST))
    store.trials.add(make_trial("ours", None, Status.FARM_ERROR))
    known = store.trials.fetch_known_candidates("w1", "jetson-nano", DEFAULT_POINT, simulated=False)
    assert {row.candidate: row.median_s for row in known} == {"good": 2.0, "bad": None}


def test_a_wrong_result_outweighs_a_good_time(store: Store) -> None:
    """A candidate that computed nonsense once is known as a failure, however fast it was."""
    store.trials.add(make_trial("c1", 1.0))
    store.trials.add(make_trial("c1", None, Status.WRONG_RESULT, purpose=WINNER_TRIAL))
    [row] = store.trials.fetch_known_candidates("w1", "jetson-nano", DEFAULT_POINT, simulated=False)
    assert row.median_s is None


def test_simulated_trials_stay_apart(store: Store) -> None:
    """What a virtual board measured is not known of a real one."""
    store.trials.add(make_trial(outcome=Outcome(Status.OK, latency_s=(1.0,), simulated=True)))
    assert store.trials.fetch_known_candidates("w1", "jetson-nano", DEFAULT_POINT, simulated=False) == []
    assert len(store.trials.fetch_known_candidates("w1", "jetson-nano", DEFAULT_POINT, simulated=True)) == 1


# Records, boards, campaigns, events


def test_a_record_is_replaced_only_by_a_faster_one(store: Store) -> None:
    """The best verified trial is kept, whichever came first."""
    assert store.records.save(make_record(2.0))
    assert not store.records.save(make_record(2.0))
    assert not store.records.save(make_record(3.0))
    assert store.records.save(make_record(1.0, candidate="c2"))
    [kept] = store.records.fetch(board_type="jetson-nano")
    assert (kept.median_s, kept.candidate, kept.workload_name, kept.flop) == (1.0, "c2", "conv2d w1", 1e6)


def test_records_are_kept_per_board_type_point_and_simulation(store: Store) -> None:
    """One record each; simulated ones are shown only when asked for."""
    for other in ({}, {"board_type": "jetson-tx2"}, {"operating_point": "maxn"}, {"simulated": True}):
        assert store.records.save(make_record(1.0, **other))
    assert len(store.records.fetch()) == 3
    assert len(store.records.fetch(simulated=True)) == 1
    assert len(store.records.fetch(simulated=None)) == 4
    assert len(store.records.fetch(workloads=["w2"])) == 0
    assert len(store.records.fetch(operating_point="maxn")) == 1


def test_a_board_seen_again_keeps_its_first_day(store: Store) -> None:
    """Saving a board twice updates what it says of itself, not when it was added."""
    store.boards.save(Board("b", "local", simulated=False, description={"cores": 2}))
    [before] = store.boards.fetch()
    store.boards.save(Board("b", "local", simulated=False, description={"cores": 4}))
    [after] = store.boards.fetch()
    assert after.added_at == before.added_at
    assert after.seen_at >= before.seen_at
    assert after.description == {"cores": 4}


def test_a_campaign_ends_in_a_state(store: Store) -> None:
    """Running until it is said how it ended; the newest comes first."""
    second = begin(store)
    store.campaigns.finish(1, "finished")
    newest, oldest = store.campaigns.fetch_searches()
    assert (newest.id, newest.state, newest.finished_at) == (second, "running", None)
    assert (oldest.id, oldest.state, oldest.settings) == (1, "finished", {"batch": 8})


def test_events_keep_their_order(store: Store) -> None:
    """What happened first is listed first."""
    store.events.add("restarted", "agent", "it had died")
    store.events.add("board_lost", "local/b", "hung up")
    assert [event.kind for event in store.events.fetch()] == ["restarted", "board_lost"]


# Several processes


def test_two_processes_write_at_once(store: Store, place: StoreLocation) -> None:
    """No trial of either is lost, none that both deliver is doubled, and neither sees an error."""
    writers = [run_python(_WRITER, place, name, 60) for name in ("left", "right")]
    for writer in writers:
        _, complaints = writer.communicate(timeout=60)
        assert writer.returncode == 0, complaints
    names = [row["candidate"] for row in store.trials.fetch()]
    assert len(names) == len(set(names)) == 180


def test_a_lock_that_stays_is_transient(store: Store, place: StoreLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command in the middle of a long transaction: trying again may work, and the error says so."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)
    with Store(place) as impatient:
        locked = pytest.raises(TransientError, match="locked by another command")
        with Store(place) as blocker, blocker.session.writing(), locked:
            impatient.trials.add(make_trial())
        assert impatient.trials.add(make_trial())


# Places that do not work


def test_a_folder_that_cannot_be_made(tmp_path: pathlib.Path) -> None:
    """A file stands where the folder should be: the error names it and points to FARM_HOME."""
    (tmp_path / "home").write_text("")
    with pytest.raises(UnavailableError, match="cannot make the folder") as caught:
        Store(tmp_path / "home" / "farm.sqlite")
    assert "FARM_HOME" in caught.value.hint


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_a_read_only_folder(existing: bool) -> None:
    """Neither a new nor an existing store can be used there; the error names the file and points to FARM_HOME."""
    # Not pytest's own folder: another user, whom root becomes for this test, cannot look into that.
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        path = folder / "farm.sqlite"
        if existing:
            Store(path).close()
        folder.chmod(0o555)
        unprivileged = run_python(_WITHOUT_RIGHTS, path)
        answer, complaints = unprivileged.communicate(timeout=60)
        assert unprivileged.returncode == 0, complaints
        assert answer.startswith("UnavailableError |")
        assert str(path) in answer
        assert "FARM_HOME" in answer
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_full_disk_loses_nothing_written_and_can_be_read(tmp_path: pathlib.Path) -> None:
    """When no byte more fits the error points to FARM_HOME, and every trial reported as written is there.

    Readers still see the store as it is; writers report that the disk is full.
    """
    path = tmp_path / "farm.db"
    with Store(path) as store:
        begin(store)
    answers = []
    for script in (_ON_A_FULL_DISK, _READ_ON_A_FULL_DISK):
        child = run_python(script, path)
        answer, complaints = child.communicate(timeout=60)
        assert child.returncode == 0, complaints
        answers.append(answer)
    written, kind, hint = (word.strip() for word in answers[0].split("|"))
    assert kind == "UnavailableError"
    assert "FARM_HOME" in hint
    assert 0 < int(written) < 100
    count, refused = answers[1].splitlines()
    assert count == "1"
    assert "cannot be used for writing: its disk is full" in refused
    with Store(path) as store:
        assert [row["candidate"] for row in store.trials.fetch()] == [f"c{n}" for n in range(int(written))]


def test_a_path_may_hold_any_character(tmp_path: pathlib.Path) -> None:
    """A question mark or a percent sign in a folder's name is part of the name."""
    path = tmp_path / "what? 100% #1" / "farm.sqlite"
    with Store(path) as store:
        begin(store)
    assert path.is_file()
