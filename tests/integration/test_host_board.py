"""The host itself as a board of a crew: it survives every process of its farm, and nothing is left when it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import signal
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import pytest

from device_agent.protocol import FaultSide, Limits, MeasureSpec, OperatingPoint, Outcome, Status, TensorSpec
from farm.artifacts.on_board import LOCAL, hold_board
from farm.campaign.engine.board_keeping import BoardsAsked
from farm.campaign.engine.boards import Arrived, EngineBoards, Left
from farm.campaign.engine.host import BOARD_TYPE, HostBoard
from farm.crew.held_board import Ended
from farm.errors import UnavailableError
from farm.processes.machine import machine_lock
from farm.settings import Settings
from farm.store import Store
from tests.integration import candidates
from tests.integration.conftest import wait_until
from tests.ports import find_free_port

SHAPE = TensorSpec((candidates.SIZE, candidates.SIZE), "float32")
QUICK = MeasureSpec((SHAPE,) * 3, limits=Limits(3.0, threads=1))
SHORT = dataclasses.replace(QUICK, limits=Limits(1.0, threads=1, load_timeout_s=1.0))
HANGS = MeasureSpec((SHAPE,) * 3, entry="loops", limits=Limits(30.0, threads=1))


class NoServices:
    tracker = None


class Bench:
    def __init__(self, crew: EngineBoards, store: Store, name: str, others: Collection[int], notes: list[str]) -> None:
        """`others`: processes of ours that are not the crew's, by id; `notes`: what the crew says."""
        self.crew, self.store, self.name, self._others, self._notes = crew, store, name, others, notes
        self.events: list[Any] = []

    def poll(self) -> bool:
        new = self.crew.poll()
        self.events += new
        return not new

    def measure(self, library: bytes, spec: MeasureSpec = QUICK) -> Outcome:
        return self.end(self.begin(library, spec))

    def begin(self, library: bytes, spec: MeasureSpec) -> Future[Ended]:
        return self.crew.measure(self.name, OperatingPoint(), spec, library)

    def end(self, measured: Future[Ended]) -> Outcome:
        wait_until(lambda: (self.poll(), measured.done())[1], f"an end; said was {self._notes}")
        outcome: Outcome = measured.result().result
        return outcome

    def happened(self) -> set[str]:
        return {f"{event.kind} {event.subject}" for event in self.store.events.fetch()}

    def find(self, module: str) -> psutil.Process:
        return next(each for each in self._children() if module in " ".join(each.cmdline()))

    def has(self, module: str) -> bool:
        return any(module in " ".join(each.cmdline()) for each in self._children())

    def is_computing(self) -> bool:
        workers = [worker for session in self.find("device_agent").children() for worker in session.children()]
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(sum(worker.cpu_times()[:2]) > 0.3 for worker in workers)
        return False

    def _children(self) -> list[psutil.Process]:
        found = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
        return [each for each in found if each.pid not in self._others]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The store of a home of its own, with a lock of its own: another farm on this machine is not what is tested."""
    home = tmp_path_factory.mktemp("home")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="fh-", dir="/tmp") as temporary,
        Store(home / "farm.db") as store,
    ):
        patch.setattr(tempfile, "tempdir", temporary)
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield store


@pytest.fixture(scope="module")
def bench(store: Store) -> Iterator[Bench]:
    home = pathlib.Path(str(store.location)).parent
    settings = Settings(home=str(home), tracker_port=find_free_port())
    others, notes = {each.pid for each in psutil.Process().children()}, list[str]()
    with EngineBoards(NoServices(), store, notes.append, HostBoard(settings, store, notes.append)) as crew:
        name = crew.want_host(True)
        crew.want([BoardsAsked("c", "campaign", BOARD_TYPE, frozenset({name}))])
        bench = Bench(crew, store, name, others, notes)
        wait_until(lambda: (bench.poll(), bench.events)[1], f"a board; said was {notes}")
        arrived = bench.events.pop(0)
        assert isinstance(arrived, Arrived)
        assert (arrived.board, arrived.is_host) == (name, True)
        yield bench


def test_it_is_a_board_like_others(bench: Bench, matmul: bytes) -> None:
    """Registered with what it says of itself, leased, and measured on; another farm is kept away meanwhile."""
    assert bench.measure(matmul).status is Status.OK
    row = bench.store.boards.require(bench.name)
    assert (row.board_type, row.health, row.lease.purpose) == (BOARD_TYPE, "good", "campaign")
    assert row.description["cores_online"]
    with (pathlib.Path(tempfile.gettempdir()) / f"tvm-farm-{os.getuid()}.lock").open() as file:
        assert file.read().strip() == str(os.getpid())
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_killed_agent_is_started_again(bench: Bench, matmul: bytes, bad: bytes) -> None:
    """Its trial is the board's fault; the board is kept in good health, and the next trial is good."""
    running = bench.begin(bad, HANGS)
    # Not before its worker computes: a session that asks its agent for the lease when that dies is blameless.
    wait_until(lambda: bench.poll() and bench.is_computing(), "a worker that computes")
    bench.find("device_agent").kill()
    assert bench.end(running).status.fault_side is FaultSide.BOARD
    assert bench.measure(matmul).status is Status.OK
    assert "restarted agent" in bench.happened()
    assert bench.store.boards.require(bench.name).health == "good"
    assert not [event for event in bench.events if isinstance(event, Left)]


def test_a_killed_tracker_is_hardly_noticed(bench: Bench, matmul: bytes) -> None:
    """It is started again, and no trial suffers."""
    bench.find("tracker").kill()
    assert bench.measure(matmul).status is Status.OK
    wait_until(lambda: bench.poll() and "restarted tracker" in bench.happened(), "a tracker")
    assert bench.measure(matmul).status is Status.OK


def test_a_frozen_agent_is_replaced(bench: Bench, matmul: bytes) -> None:
    """One that stops answering, with its session, is ended after two trials in a row and started again."""
    wait_until(lambda: bench.poll() and bench.has("device_agent"), "an agent")
    agent = bench.find("device_agent")
    for process in [agent, *agent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker may end just now; the agent is frozen all the same
            process.send_signal(signal.SIGSTOP)
    assert bench.measure(matmul, SHORT).status is Status.BOARD_LOST
    # One may be lost while its agent starts; three in all would be the board's end, so the next have time enough.
    assert Status.OK in (bench.measure(matmul).status for _ in range(2))
    assert f"stopped {BOARD_TYPE}/{bench.name}" in bench.happened()


def test_an_agent_that_cannot_start_ends_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it died and its program is broken, the crew says so at once."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/bin/false")
        bench.find("device_agent").kill()
        with pytest.raises(UnavailableError, match="the agent ended at once"):
            wait_until(lambda: bench.poll() and False, "an error")
    wait_until(lambda: bench.poll() and bench.has("device_agent"), "an agent")


def test_it_ends_when_nobody_wants_it(bench: Bench) -> None:
    """The lease is given back, tracker and agent are gone, and others may measure on this machine."""
    bench.crew.want([])
    bench.crew.want_host(False)
    wait_until(lambda: bench.poll() and not bench.crew.has_taken(bench.name), "it to be left")
    assert [event for event in bench.events if isinstance(event, Left)]
    wait_until(lambda: bench.poll() and not bench.has("device_agent"), "the agent to be gone")
    wait_until(lambda: bench.store.boards.require(bench.name).lease is None, "the lease to be given back")
    with machine_lock():
        pass


def test_what_cannot_be_had_is_said_once(store: Store, tmp_path: pathlib.Path) -> None:
    """While another farm measures here, a campaign that wants this machine waits, and the reason is shown."""
    notes: list[str] = []
    host = HostBoard(Settings(home=str(tmp_path), tracker_port=find_free_port()), store, notes.append)
    with (pathlib.Path(tempfile.gettempdir()) / f"tvm-farm-{os.getuid()}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        host.want()
        host.want()
        with pytest.raises(UnavailableError, match="another farm command is measuring"):
            host.open()
    assert host.name == ""
    assert len(notes) == 1


def test_work_that_is_not_timed_waits_for_no_measuring(store: Store, tmp_path: pathlib.Path) -> None:
    """While another farm measures here, this machine is held for a comparison of outputs, and for no timing."""
    settings = Settings(home=str(tmp_path), tracker_port=find_free_port())
    with (pathlib.Path(tempfile.gettempdir()) / f"tvm-farm-{os.getuid()}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with hold_board(settings, store, LOCAL, 0.0, "verify", print, is_timed=False) as held:
            assert held.description.board_type == BOARD_TYPE
        with (
            pytest.raises(UnavailableError, match="another farm command is measuring"),
            hold_board(settings, store, LOCAL, 0.0, "run", print),
        ):
            pass
