"""Many leased boards at once: virtual Nanos behind a tracker, given work, harmed, taken back, left and taken again."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import psutil
import pytest

from device_agent.protocol import (
    Engine,
    FaultSide,
    Limits,
    MeasureSpec,
    OperatingPoint,
    Outcome,
    RunSpec,
    Status,
    TensorSpec,
)
from device_agent.sysfs import Tree
from farm.campaign.engine.board_keeping import BoardsAsked
from farm.campaign.engine.boards import Arrived, BoardEvent, EngineBoards, Left
from farm.campaign.engine.host import HostBoard
from farm.campaign.engine.reference_kernels import Rhythm
from farm.connectivity.tracker import Tracker
from farm.crew import health
from farm.crew.health import Kind, Observation
from farm.crew.held_board import Ended
from farm.settings import Settings
from farm.store import Store
from farm.values import Board, Lease
from farm.virtual.client import SimulatedTree
from tests.integration import candidates
from tests.integration.conftest import PATIENCE_S, Agent, wait_until

TYPE = "jetson-nano"
DEFAULT = OperatingPoint()
SLOW = OperatingPoint(cpu_freq_hz={"a57": 403_200_000})
SHAPE = TensorSpec((candidates.SIZE, candidates.SIZE), "float32")
QUICK = MeasureSpec((SHAPE,) * 3, limits=Limits(10.0, threads=1))
# Holds its board until it is stopped: `loops` never ends, and has this long.
HANGS = MeasureSpec((SHAPE,) * 3, entry="loops", limits=Limits(60.0, threads=1))


class Within:
    """Boards that are within reach already, as behind the farm's services."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = Tracker(tracker.host, tracker.port)


def ask(names: Iterable[str]) -> list[BoardsAsked]:
    return [BoardsAsked("c", "campaign", TYPE, frozenset(names))]


class Bench:
    def __init__(self, crew: EngineBoards, store: Store, agents: dict[str, Agent], notes: list[str]) -> None:
        self.crew, self.store, self.agents, self.notes = crew, store, agents, notes
        self.events: list[BoardEvent] = []

    def wait_for(self, condition: Callable[[BoardEvent], bool], what: str) -> Any:
        """Poll until such an event comes; returns it, and forgets it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for index, event in enumerate(self.events):
                if condition(event):
                    del self.events[index]
                    return event
            assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S:g} s, but {self.events}"
            self.wait()

    def wait(self) -> None:
        self.crew.bell.wait(0.1)
        self.events += self.crew.poll()

    def measure(
        self, board: str, library: bytes, spec: MeasureSpec = QUICK, point: OperatingPoint = DEFAULT
    ) -> Future[Ended]:
        """Have a board measure."""
        return self.crew.measure(board, point, spec, library)

    def measured(self, measured: Future[Ended]) -> Outcome:
        """The outcome of a measurement once it has ended."""
        wait_until(lambda: (self.wait(), measured.done())[1], "the end of a measurement")
        outcome: Outcome = measured.result().result
        return outcome

    def arrived(self, *names: str) -> None:
        missing = set(names)
        while missing:
            missing.discard(self.wait_for(lambda e: isinstance(e, Arrived) and e.board in missing, "board").board)

    def left(self, name: str) -> Left:
        event = self.wait_for(lambda e: isinstance(e, Left) and e.board == name, f"leaving of {name}")
        assert isinstance(event, Left)
        return event

    def busy(self, name: str) -> bool:
        held = self.crew._held.get(name)
        return held is not None and any(call.kind != "reference" and not call.revoked for call in held.calls)

    def find_drifting(self, name: str, library: bytes) -> Left:
        deadline = time.monotonic() + PATIENCE_S
        here = set(self.agents)
        while here == set(self.agents):
            assert time.monotonic() < deadline, "it was never found out"
            for board in here:
                if not self.busy(board):
                    self.measure(board, library)
            self.wait()
            here -= {event.board for event in self.events if isinstance(event, Left)}
        return self.left(name)

    def hardware(self, name: str) -> Tree:
        """A virtual board's kernel files as root sees them."""
        [socket] = self.agents[name].folder.glob("device-rig-*/board.sock")
        return SimulatedTree(f"{socket}.root")

    def wait_note(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not any(text in note for note in self.notes):
            assert time.monotonic() < deadline, self.notes
            self.wait()

    def observe(self, name: str, kind: Kind) -> None:
        """What the farm's services or an operator would say of a board."""
        self.store.boards.observe(name, kind, "test", health.decide_by(Observation(kind), health.HealthLimits()))

    def take(self, name: str, owner: str, purpose: str) -> Lease:
        deadline = time.monotonic() + PATIENCE_S
        while self.store.boards.require(name).lease is not None:
            assert time.monotonic() < deadline, f"{name} was never given back"
            self.wait()
        return self.store.leases.acquire(name, owner, purpose)

    def wait_busy(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.agents[name].session_files("busy"):
            assert time.monotonic() < deadline, "the candidate never began"
            self.wait()


@pytest.fixture(scope="module")
def fleet(
    tracker: Any, start_agent: Callable[..., Agent], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Store, dict[str, Agent]]]:
    folder = tmp_path_factory.mktemp("crew")
    where = f"{tracker.host}:{tracker.port}"
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ff-", dir="/tmp") as temporary,
        Store(folder / "farm.db") as store,
    ):
        patch.setattr(tempfile, "tempdir", temporary)
        options = ("--virtual", TYPE, "--tracker", where, "--port", "9700", "--port-end", "9799")
        # All at once: what they do first is waiting for the disk and for sensors.
        started = [start_agent(*options, wait=False) for _ in range(3)]
        agents = {agent.key.partition("/")[2]: agent for agent in started}
        for name, agent in agents.items():
            wait_until((agent.folder / f"{name}.json").exists, f"agent {name} to be ready")
            store.boards.save(Board(name, TYPE, simulated=True))
        yield store, agents


@pytest.fixture(scope="module")
def bench(fleet: tuple[Store, dict[str, Agent]], tracker: Any) -> Iterator[Bench]:
    """One crew for the tests of this module; each test leaves the boards with it."""
    store, agents = fleet
    notes: list[str] = []
    # Reference kernels as often as can be, once there are any.
    rhythm = Rhythm(every_trials=2, share=1.0, settling_s=0.0, first_pause_s=0.1)
    with EngineBoards(Within(tracker), store, notes.append, HostBoard(Settings(), store, notes.append), rhythm) as crew:
        bench = Bench(crew, store, agents, notes)
        assert crew.poll() == []
        crew.want(ask(agents))
        bench.arrived(*agents)
        yield bench
    assert all(row.lease is None for row in store.boards.fetch())


def test_boards_measure_side_by_side_two_deep(bench: Bench, matmul: bytes) -> None:
    """Every board takes two measurements at a time; each ends once, on the board that it was given to."""
    given = {bench.measure(name, matmul): name for name in bench.agents for _ in range(2)}
    assert all(bench.busy(name) for name in bench.agents)
    for measured, name in given.items():
        outcome = bench.measured(measured)
        assert (outcome.status, outcome.board, outcome.simulated) == (Status.OK, name, True)
        assert 0 < measured.result().board_s < PATIENCE_S
    assert not any(bench.busy(name) for name in bench.agents)
    leases = [row.lease.purpose for row in bench.store.boards.fetch()]
    assert leases == ["campaign"] * 3


def test_a_point_is_held_for_the_trial_that_asks_for_it(bench: Bench, matmul: bytes) -> None:
    """Each outcome says at which clocks it was taken: those it was asked for, and none where none were."""
    name = next(iter(bench.agents))
    outcomes = []
    for point in (DEFAULT, SLOW, SLOW, DEFAULT):
        outcomes.append(bench.measured(bench.measure(name, matmul, point=point)))
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 4
    assert [outcome.point for outcome in outcomes] == [None, SLOW, SLOW, None]
    assert all(set(each.after.cpu_freq_hz.values()) == {403_200_000} for each in outcomes[1:3] if each.after)


def test_a_program_runs_on_a_board(bench: Bench, matmul: bytes) -> None:
    """Its outputs come back with the outcome."""
    name = next(iter(bench.agents))
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((candidates.SIZE,) * 2).astype("float32") for _ in range(2))
    inputs = {"a": a, "b": b, "c": np.zeros_like(a)}
    ran = bench.crew.run(name, DEFAULT, RunSpec(Engine.KERNEL), matmul, inputs)
    assert bench.measured(ran).status is Status.OK
    assert any(np.allclose(output, a @ b, atol=1e-3) for output in ran.result().outputs.values())


def test_running_and_waiting_measurements_can_be_taken_back(bench: Bench, matmul: bytes, bad: bytes) -> None:
    """Neither is reported any more, and the board takes new work at once, without blame."""
    name = next(iter(bench.agents))
    running, waiting = bench.measure(name, bad, HANGS), bench.measure(name, matmul)
    bench.wait_busy(name)
    assert waiting.cancel()
    assert running.cancel()
    assert not bench.busy(name)
    began = time.monotonic()
    assert bench.measured(bench.measure(name, matmul)).status is Status.OK
    assert time.monotonic() - began < 10
    assert bench.store.boards.require(name).health == "good"


def test_a_drained_board_is_left_and_comes_back(bench: Bench, matmul: bytes, bad: bytes) -> None:
    """An operator's word ends what runs there without blame; the others go on; put back, it is leased anew."""
    name, other, _ = bench.agents
    running = bench.measure(name, bad, HANGS)
    bench.wait_busy(name)
    bench.observe(name, Kind.DRAIN)
    left = bench.left(name)
    assert "maintenance" in left.reason
    assert bench.measured(bench.measure(other, matmul)).status is Status.OK
    bench.observe(name, Kind.UNDRAIN)
    bench.observe(name, Kind.PROBE_PASSED)
    bench.arrived(name)
    assert not running.done()
    assert bench.measured(bench.measure(name, matmul)).status is Status.OK


def test_a_lease_ended_by_force_is_let_go_of(bench: Bench, bad: bytes) -> None:
    """The board is left within a second or two, without blame, and leased anew once it is free."""
    name = next(iter(bench.agents))
    bench.measure(name, bad, HANGS)
    bench.wait_busy(name)
    [before] = [row.lease.token for row in bench.store.boards.fetch() if row.name == name]
    bench.store.leases.force_release(name, "operator", "needed it")
    assert bench.left(name).reason == "our lease was ended"
    bench.arrived(name)
    row = next(row for row in bench.store.boards.fetch() if row.name == name)
    assert row.lease.token > before
    assert row.health == "good"


def test_the_lease_of_a_killed_engine_is_not_waited_for(bench: Bench) -> None:
    """The lease of a dead campaign's process is released at once; any other lease is kept."""
    name, other, third = bench.agents
    bench.crew.want(ask([third]))
    for each in (name, other):
        bench.left(each)
    killed = subprocess.Popen([sys.executable, "-c", "pass"])
    killed.wait(PATIENCE_S)
    owner = f"ann@{socket.gethostname()} pid {killed.pid}"
    leased = [(name, owner, "campaign"), (other, owner, "tune")]
    leases = [bench.take(*each) for each in leased]
    bench.crew.want(ask(bench.agents))
    bench.arrived(name)
    assert not [e for e in bench.events if isinstance(e, Arrived) and e.board == other]
    assert bench.store.leases.release(leases[1])
    bench.arrived(other)


def test_a_board_that_is_not_wanted_is_given_back_when_idle(bench: Bench, matmul: bytes) -> None:
    """It ends what it has, and is then free for others."""
    name, *others = bench.agents
    number = bench.measure(name, matmul)
    bench.crew.want(ask(others))
    assert bench.measured(number).status is Status.OK
    assert bench.left(name).reason == "not needed any more"
    bench.crew.want(ask([name, *others]))
    bench.arrived(name)


def test_a_board_that_becomes_slow_is_found_out(bench: Bench, matmul: bytes) -> None:
    """30 % slower in mid-campaign, and nothing says so: it is left with how much and since when, and doubted; back and
    still slow, it is given no work; mended, it is.
    """
    *_, drifting = bench.agents
    spec = MeasureSpec((SHAPE,) * 3, repeat=5, min_repeat_s=0.02, limits=Limits(10.0, threads=1))
    bench.crew.offer_reference_kernel(TYPE, DEFAULT, spec, matmul)
    for _ in range(4):
        for number in [bench.measure(name, matmul) for name in bench.agents]:
            bench.measured(number)
    hardware = bench.hardware(drifting)
    harmed_after = bench.store.trials.fetch_mark()
    hardware.write("/sys/virtual/fault", "slow:1.3")
    left = bench.find_drifting(drifting, matmul)
    assert "slower than 2 other boards of its type" in left.reason
    assert left.doubted_after is not None
    assert left.doubted_after <= harmed_after
    assert bench.store.boards.require(drifting).health == "suspect"
    bench.notes.clear()
    bench.observe(drifting, Kind.PROBE_PASSED)
    bench.wait_note(f"left {drifting}")
    assert not [e for e in bench.events if isinstance(e, Arrived)]
    hardware.write("/sys/virtual/fault", "clear")
    bench.observe(drifting, Kind.PROBE_PASSED)
    bench.arrived(drifting)
    assert not [e for e in bench.events if isinstance(e, Left)]


def test_hardware_that_hangs_is_not_the_candidates_fault(bench: Bench, matmul: bytes) -> None:
    """The agent lives, and its sensors never answer: the candidate was loaded, and is to be measured again."""
    *_, name = bench.agents
    hardware = bench.hardware(name)
    hardware.write("/sys/virtual/fault", "hang")
    spec = MeasureSpec((SHAPE,) * 3, limits=Limits(1.0, threads=1))
    outcome = bench.measured(bench.measure(name, matmul, spec))
    hardware.write("/sys/virtual/fault", "clear")
    assert outcome.status.fault_side in (FaultSide.FARM, FaultSide.BOARD), outcome.message
    assert bench.measured(bench.measure(name, matmul)).status is Status.OK


def test_a_board_that_dies_is_blamed_and_left(bench: Bench, matmul: bytes, bad: bytes) -> None:
    """Kill -9 of everything on a board in mid-measurement: its trial says so, and the farm doubts the board."""
    name, other, _ = list(bench.agents)[::-1]
    running, waiting = bench.measure(name, bad, HANGS), bench.measure(name, matmul)
    bench.wait_busy(name)
    agent = bench.agents[name]
    for process in [psutil.Process(agent.process.pid), *agent.descendants()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert bench.measured(running).status is Status.BOARD_LOST
    left = bench.left(name)
    assert "suspect" in left.reason
    assert not waiting.done()
    assert bench.store.boards.require(name).health == "suspect"
    assert bench.measured(bench.measure(other, matmul)).status is Status.OK
