"""What every store promises of sweeps: each visit once and for ever, one process per sweep, nothing lost to a kill."""

from __future__ import annotations

import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from farm.errors import InternalError, TransientError, UsageError
from farm.processes.machine import close_abandoned_sweeps, process_identity
from farm.settings import StoreLocation
from farm.store import Store
from farm.store.session import StoreSession
from farm.store.sweeps import ENDED
from tests.contract.conftest import run_python
from tests.fleet_store import Clocks
from tests.places import execute

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE_S = 60.0
_RESUMING = """
import sys
from farm.processes.machine import process_identity
from farm.errors import TransientError
from farm.settings import parse_store
from farm.store import Store
with Store(parse_store(sys.argv[1])) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        store.sweeps.resume(1, process_identity())
        print("mine", flush=True)
    except TransientError:
        print("another's", flush=True)
    written = store.sweeps.add_point(1, variant="", batch=1, key="k", visit=1, board="b", measurement={}, outcome={})
    print(written, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def store(place: StoreLocation, clocks: Clocks) -> Iterator[Store]:
    with Store(StoreSession(place, clocks.read, clocks.read_wall)) as store:
        yield store


def begin(store: Store, **fields: Any) -> int:
    values: dict[str, Any] = {
        "command": "farm sweep run squeezenet1.1 --board n-1",
        "model": "squeezenet1.1",
        "model_sha256": "00",
        "board_type": "jetson-nano",
        "simulated": True,
        "request": {"cpu_freqs": [102_000_000, 1_479_000_000], "batch": [1, 4]},
        "goal": {"objective": "energy", "deadline_s": None},
        "grid": {"points": [{"key": "cpu=102"}], "merged": []},
        "settings": {"process": process_identity()},
    }
    return store.sweeps.start(**(values | fields))


def visit(store: Store, sweep: int, number: int = 1, **fields: Any) -> bool:
    """Write a visit to the tuned model's point cpu=102."""
    values: dict[str, Any] = {
        "variant": "tuned",
        "batch": 1,
        "key": "cpu=102",
        "visit": number,
        "board": "n-1",
        "measurement": {"latency": {"value": 0.1 + number, "low": 0.1, "high": 9.0}, "power": None},
        "outcome": {"status": "ok"},
    }
    return store.sweeps.add_point(sweep, **(values | fields))


# Sweeps


def test_a_sweep_reads_as_it_was_begun(store: Store, clocks: Clocks) -> None:
    """What was asked for comes back as it was given; it runs, holds nothing yet, and began when it did."""
    sweep = store.sweeps.require(begin(store, settings={"repeat": 3}))
    assert (sweep.model, sweep.board_type, sweep.simulated) == ("squeezenet1.1", "jetson-nano", True)
    assert sweep.request == {"cpu_freqs": [102_000_000, 1_479_000_000], "batch": [1, 4]}
    assert sweep.goal == {"objective": "energy", "deadline_s": None}
    assert sweep.grid == {"points": [{"key": "cpu=102"}], "merged": []}
    assert sweep.settings == {"repeat": 3}
    assert (sweep.state, sweep.summary, sweep.visits) == ("running", None, 0)
    assert (sweep.started_at, sweep.finished_at) == (clocks.wall, None)


def test_sweeps_are_listed_newest_first(store: Store) -> None:
    """The list begins with the sweep begun last, says how much each holds, and shows them as they are shown alone."""
    first, second = begin(store), begin(store, model="tiny-cnn")
    visit(store, first)
    visit(store, first, 2)
    listed = store.sweeps.fetch()
    assert [(row.id, row.model, row.visits) for row in listed] == [(second, "tiny-cnn", 0), (first, "squeezenet1.1", 2)]
    assert listed == [store.sweeps.require(second), store.sweeps.require(first)]


@pytest.mark.parametrize("state", sorted(ENDED))
def test_a_sweep_ends_with_what_it_says(store: Store, clocks: Clocks, state: str) -> None:
    """Each way to end is kept, with the time and the summary."""
    sweep = begin(store)
    clocks.pass_s(7)
    store.sweeps.finish(sweep, state, {"front": ["cpu=102"], "pick": None})
    row = store.sweeps.require(sweep)
    assert (row.state, row.summary) == (state, {"front": ["cpu=102"], "pick": None})
    assert row.finished_at - row.started_at == 7


def test_an_end_is_one_that_there_is_and_keeps_the_summary(store: Store) -> None:
    """A sweep voided after it had said something still says it. A misspelt state never reaches the file."""
    sweep = begin(store)
    store.sweeps.finish(sweep, "finished", {"front": []})
    store.sweeps.finish(sweep, "voided")
    assert (store.sweeps.require(sweep).state, store.sweeps.require(sweep).summary) == ("voided", {"front": []})
    sweep = begin(store)
    with pytest.raises(InternalError, match="done"):
        store.sweeps.finish(sweep, "done")
    assert store.sweeps.require(sweep).state == "running"


@pytest.mark.parametrize("sweep", [0, -1, 2, 10**30, -(10**30)])
def test_an_unknown_sweep_is_the_callers_mistake(store: Store, sweep: int) -> None:
    """For any number, the error names the command that lists sweeps."""
    begin(store)
    for call in (
        lambda: store.sweeps.require(sweep),
        lambda: store.sweeps.finish(sweep, "failed"),
        lambda: store.sweeps.resume(sweep, {}),
    ):
        with pytest.raises(UsageError, match=f"no sweep {sweep}") as caught:
            call()
        assert "farm sweep list" in caught.value.hint
    assert store.sweeps.fetch_points(sweep) == []


# Visits


def test_a_visit_is_written_once(store: Store, clocks: Clocks) -> None:
    """A second delivery changes nothing and says so, even if it says another thing."""
    sweep = begin(store)
    assert visit(store, sweep)
    assert not visit(store, sweep)
    assert not visit(store, sweep, key="cpu=204", measurement={}, board="n-2")
    [row] = store.sweeps.fetch_points(sweep)
    assert (row.key, row.board, row.recorded_at) == ("cpu=102", "n-1", clocks.wall)
    assert row.measurement == {"latency": {"value": 1.1, "low": 0.1, "high": 9.0}, "power": None}
    assert row.outcome == {"status": "ok"}


def test_each_part_of_a_visits_identity_makes_another(store: Store) -> None:
    """Sweep, variant, batch and visit tell visits apart, and they come back in the order of writing."""
    sweep, other = begin(store), begin(store)
    assert visit(store, sweep, 2)
    assert visit(store, sweep, 1)
    assert visit(store, sweep, variant="untuned")
    assert visit(store, sweep, batch=4)
    assert visit(store, other)
    rows = store.sweeps.fetch_points(sweep)
    assert [(row.variant, row.batch, row.visit) for row in rows] == [
        ("tuned", 1, 2),
        ("tuned", 1, 1),
        ("untuned", 1, 1),
        ("tuned", 4, 1),
    ]
    assert len(store.sweeps.fetch_points(other)) == 1


def test_measured_numbers_come_back_to_the_last_bit(store: Store) -> None:
    """No digit of a measurement is lost on the way through the file."""
    sweep = begin(store)
    numbers = {"latency_s": 0.1 + 0.2, "energy_j": 5e-324, "freq_hz": 1_479_000_000, "at_s": 1e300, "power_w": None}
    visit(store, sweep, measurement=numbers)
    assert store.sweeps.fetch_points(sweep)[0].measurement == numbers


def test_a_visit_of_no_sweep_is_refused(store: Store) -> None:
    """A visit always belongs to a sweep that there is."""
    with pytest.raises(InternalError, match=r"(?i)foreign key"):
        visit(store, 7)


@pytest.mark.parametrize("action", ["UPDATE sweep_points SET board = 'x'", "DELETE FROM sweep_points"])
def test_a_visit_stays_as_it_is(store: Store, place: StoreLocation, action: str) -> None:
    """The file itself refuses to change or delete a visit."""
    visit(store, begin(store))
    with pytest.raises(sa.exc.IntegrityError, match="append-only"):
        execute(place, action)


# Going on


@pytest.mark.parametrize("state", sorted(ENDED))
def test_an_ended_sweep_goes_on(store: Store, clocks: Clocks, state: str) -> None:
    """A resumed sweep runs under its old number, in a new process, with its visits and without an outdated summary."""
    sweep = begin(store, settings={"repeat": 3, "process": {"host": "gone", "pid": 1, "created": 1.0}})
    visit(store, sweep)
    before = store.sweeps.require(sweep)
    clocks.pass_s(9)
    store.sweeps.finish(sweep, state, {"front": []})
    mine = process_identity()
    row = store.sweeps.resume(sweep, mine)
    assert row == before.model_copy(update={"settings": {"repeat": 3, "process": mine}})
    assert row == store.sweeps.require(sweep)
    assert not visit(store, sweep)
    assert visit(store, sweep, 2)


def test_a_running_sweep_is_not_taken_over(store: Store) -> None:
    """Resuming a running sweep reports where it runs, and changes nothing."""
    sweep = begin(store)
    before = store.sweeps.require(sweep)
    with pytest.raises(TransientError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        store.sweeps.resume(sweep, {"pid": 1})
    assert store.sweeps.require(sweep) == before


def test_of_several_processes_one_resumes(store: Store, place: StoreLocation) -> None:
    """Commands that resume a sweep at once, and deliver the same visit at once: each is done by one of them."""
    store.sweeps.finish(begin(store), "interrupted")
    processes = [run_python(_RESUMING, place) for _ in range(4)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        answers: list[tuple[str, str]] = []
        for process in processes:
            answers.append((process.stdout.readline().strip(), process.stdout.readline().strip()))
        assert sorted(whose for whose, _ in answers) == ["another's"] * 3 + ["mine"]
        assert sorted(written for _, written in answers) == ["False"] * 3 + ["True"]
        [winner] = [process for process, (whose, _) in zip(processes, answers, strict=True) if whose == "mine"]
        assert store.sweeps.require(1).settings["process"]["pid"] == winner.pid
    finally:
        for process in processes:
            process.communicate("\n", timeout=DEADLINE_S)


# Killed


def test_only_what_nobody_works_on_is_interrupted(store: Store) -> None:
    """Sweeps of a process that lives, of another machine, of an unknown owner, and ended ones are left as they are."""
    here = process_identity()
    left = [
        begin(store),
        begin(store, settings={"process": here | {"host": "elsewhere", "pid": 2**22 + 1}}),
        begin(store, settings={}),
    ]
    ended = begin(store, settings={"process": here | {"created": 1.0}})
    store.sweeps.finish(ended, "finished")
    reused = begin(store, settings={"process": here | {"created": here["created"] - 100}})
    gone = begin(store, settings={"process": here | {"pid": 2**22 + 1}})
    assert close_abandoned_sweeps(store) == [reused, gone]
    states = {row.id: row.state for row in store.sweeps.fetch()}
    assert states == dict.fromkeys(left, "running") | {ended: "finished", reused: "interrupted", gone: "interrupted"}
    assert close_abandoned_sweeps(store) == []


def test_a_killed_process_that_nobody_waited_for_works_on_nothing(store: Store) -> None:
    """A sweep is interrupted as soon as its process is dead, even where the process table still holds its name."""
    process = run_python("import sys; sys.stdin.readline()")
    try:
        named = {"host": socket.gethostname(), "pid": process.pid, "created": psutil.Process(process.pid).create_time()}
        sweep = begin(store, settings={"process": named})
        assert close_abandoned_sweeps(store) == []
        process.kill()
        # Tells of its death and leaves it in the process table.
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is not None
        assert close_abandoned_sweeps(store) == [sweep]
    finally:
        process.communicate(timeout=DEADLINE_S)
