"""Tuning on leased boards: two virtual Nanos behind the tracker, taken, lost, ended by force, and left."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from farm.campaign.engine import Engine
from farm.campaign.fleet_site import FleetSite
from farm.campaign.fleet_tuning import FleetTuning
from farm.errors import BoardUnsafeError, UnavailableError
from farm.fleet.health import Kind, Limits, Observation, decide_by
from farm.fleet.tracker import Tracker
from farm.inventory.board_types import require_board_type
from farm.models.inputs import read_inputs
from farm.models.source import resolve_model
from farm.report.progress import Progress
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT, Board, Virtual
from tests.integration.conftest import Agent, find_free_port

BUDGET = 4
# Long enough for the run to notice, within half a second, what happened to its board.
LONG = 14
TYPE = "jetson-nano"


class Quiet:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, progress: Progress) -> None:
        pass


class Within:
    """Boards that are within reach already, as behind the farm's services."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = Tracker(tracker.host, tracker.port)


class Bench:
    """A tuning on one of two boards, its store, and the workloads of the tiny model."""

    def __init__(self, tuning: FleetTuning, store: Store, agents: dict[str, Agent], listener: Quiet) -> None:
        self.tuning, self.store, self.agents, self.listener = tuning, store, agents, listener
        self.source = resolve_model("tiny-cnn")
        self.workloads = tuning.load(self.source, read_inputs(self.source.load()), ["conv2d"])

    def tune(self, on_progress: Callable[[Progress], None], budget: int = BUDGET) -> list[dict[str, Any]]:
        """Tune until the budget is spent; returns every trial that was written."""
        number = self.store.start_campaign("test", "tiny-cnn", self.source.sha256, TYPE, budget, {})
        Engine(self.tuning.parts, self.store, number, self.workloads, {}).tune(budget, on_progress)
        return self.store.fetch_trials(number)


@pytest.fixture(scope="module")
def bench(tracker: Any, start_agent: Callable[..., Agent], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One tuning for the tests of this module."""
    home = tmp_path_factory.mktemp("home")
    settings = Settings(
        home=str(home), tracker_port=find_free_port(), batch=2, warmup=1, measure_timeout_s=5.0, population=16
    )
    where = f"{tracker.host}:{tracker.port}"
    listener = Quiet()
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ff-", dir="/tmp") as temporary,
        Store(home / "farm.db") as store,
    ):
        patch.setattr(tempfile, "tempdir", temporary)
        patch.setenv("FARM_ZIG_CACHE", str(home / "zig"))
        agents = {}
        for _ in range(2):
            agent = start_agent("--virtual", TYPE, "--tracker", where, "--port", "9700", "--port-end", "9799")
            name = agent.key.partition("/")[2]
            agents[name] = agent
            store.save_board(Board(name, TYPE, simulated=True))
        tuning = FleetTuning(
            settings,
            store,
            require_board_type(TYPE),
            listener,
            wait_s=20.0,
            open_services=lambda settings, boards, note: contextlib.nullcontext(Within(tracker)),
        )
        with tuning:
            yield Bench(tuning, store, agents, listener)
        assert all(board["lease"] is None for board in store.fetch_boards())


def accounted(trials: list[dict[str, Any]], budget: int = BUDGET) -> None:
    """Assert that the budget was spent, nothing twice: one trial per candidate that counts, others before it."""
    counting = [t for t in trials if t["fault_side"] in (None, "candidate")]
    assert len(counting) == budget
    assert set(Counter((t["workload"], t["candidate"]) for t in counting).values()) == {1}
    for key in {(t["workload"], t["candidate"]) for t in trials}:
        attempts = [t["attempt"] for t in trials if (t["workload"], t["candidate"]) == key]
        assert attempts == list(range(1, len(attempts) + 1))


def once(action: Callable[[], Any]) -> Callable[[Progress], None]:
    """A listener that acts once, after the first trial."""
    done: list[bool] = []

    def listen(progress: Progress) -> None:
        if not done and progress.trials >= 1:
            action()
            done.append(True)
        if progress.phase == "done":
            assert done, "the harm was never done"

    return listen


def observe(store: Store, name: str, kind: Kind) -> None:
    """What the farm's services would say of a board."""
    store.observe_board(name, kind, "test", decide_by(Observation(kind), Limits()))


def test_a_run_on_a_leased_board_ends_in_records_of_its_own_kind(bench: Bench) -> None:
    """Every trial and record is the board's, under its type, and says simulated; none passes for a real one."""
    tuned = bench.tuning.tune("tune", bench.source, bench.workloads, BUDGET, True, time.monotonic())
    assert tuned.verdict.records >= 1
    name = bench.tuning.site.name
    trials = bench.store.fetch_trials(tuned.campaign)
    accounted(trials)
    assert {(t["board"], t["simulated"]) for t in trials if t["status"] == "ok"} == {(name, True)}
    assert bench.store.fetch_records(board_type=TYPE) == []
    records = bench.store.fetch_records(board_type=TYPE, simulated=True)
    assert len(records) == tuned.verdict.records
    assert all(
        not bench.store.fetch_known_candidates(workload.hash, TYPE, DEFAULT_POINT, False)
        for workload in bench.workloads
    )
    target = bench.tuning.parts.target()
    assert target["num-cores"] == 4  # the board's; the processor is this host's, whose code it runs
    assert target["mtriple"].startswith(bench.tuning.board().description["architecture"])
    [lease] = [board["lease"] for board in bench.store.fetch_boards() if board["name"] == name]
    assert lease["purpose"] == "tune"


def test_a_lease_ended_by_force_pauses_the_run(bench: Bench) -> None:
    """The session is cut, a board is leased anew, and every trial is made and kept once."""
    before = bench.tuning.site.lease
    assert before is not None
    trials = bench.tune(once(lambda: bench.store.force_release(before.board, "operator", "needed it")), LONG)
    accounted(trials, LONG)
    assert {t["fault_side"] for t in trials} <= {None, "candidate", "farm"}
    after = bench.tuning.site.lease
    assert after is not None
    assert after.token > before.token
    assert any("our lease was ended" in note for note in bench.listener.notes)


def test_a_drained_board_is_left_for_another(bench: Bench) -> None:
    """What an operator takes out of service is left at once, without blame; the run goes on elsewhere."""
    name = bench.tuning.site.name
    trials = bench.tune(once(lambda: observe(bench.store, name, Kind.DRAIN)), LONG)
    accounted(trials, LONG)
    assert bench.tuning.site.name != name
    assert {t["fault_side"] for t in trials} <= {None, "candidate", "farm"}
    observe(bench.store, name, Kind.UNDRAIN)
    observe(bench.store, name, Kind.PROBE_PASSED)


def test_a_board_that_dies_is_blamed_and_replaced(bench: Bench) -> None:
    """Kill -9 of everything on the board in use: it becomes suspect, and the run goes on with the other one."""
    name = bench.tuning.site.name

    def kill() -> None:
        agent = bench.agents[name]
        for process in [psutil.Process(agent.process.pid), *agent.descendants()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    trials = bench.tune(once(kill), LONG)
    accounted(trials, LONG)
    assert any(t["status"] == "board_lost" for t in trials)
    assert bench.tuning.site.name != name
    board = bench.store.require_board(name)
    assert board["health"] == "suspect"
    assert "a fault on the board's side" in board["health_reason"]


def test_waiting_in_vain_says_for_what(bench: Bench, tracker: Any, tmp_path: pathlib.Path) -> None:
    """Without a board within the time given, the error has each board's reason; where nothing can help, at once."""
    with Store(tmp_path / "farm.db") as store:
        for name in ("a", "b"):
            store.register_board(name, TYPE, Virtual())
            observe(store, name, Kind.BACK)
            observe(store, name, Kind.PROBE_PASSED)
        store.acquire_lease("a", "ann", "sweep")
        observe(store, "b", Kind.LOST)
        notes: list[str] = []
        with pytest.raises(
            UnavailableError, match=r"within 0\.2 s \(a: leased by ann: sweep; b: offline: it cannot be"
        ):
            FleetSite(Within(tracker), store, TYPE, None, "tune", 0.2, notes.append)
        assert len(notes) == 1
        observe(store, "b", Kind.UNSAFE)
        began = time.monotonic()
        with pytest.raises(BoardUnsafeError, match="b: unsafe"):
            FleetSite(Within(tracker), store, TYPE, "b", "tune", 60.0, notes.append)
        assert time.monotonic() - began < 5


def test_nobody_is_blamed_for_services_that_are_gone(bench: Bench, tmp_path: pathlib.Path) -> None:
    """Where the tracker does not answer, boards are neither taken nor found at fault; the error names the services."""
    with Store(tmp_path / "farm.db") as store:
        store.save_board(Board("a", TYPE, simulated=True))
        gone = Within(Tracker("127.0.0.1", find_free_port()))
        with pytest.raises(UnavailableError, match="a: the farm's services do not answer"):
            FleetSite(gone, store, TYPE, None, "tune", 0.2, lambda text: None)
        assert [event["kind"] for event in store.fetch_board_events()] == []
