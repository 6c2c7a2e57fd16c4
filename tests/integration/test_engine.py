"""The engine on a real farm: whoever is killed while it tunes, it finishes, and every trial is accounted for."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import signal
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray

from device_agent.protocol import FaultSide, Limits, MeasureSpec, Outcome, Status, TensorSpec
from farm.campaign import engine_verify
from farm.campaign.engine import MAX_FAULTS_IN_A_ROW, Engine
from farm.campaign.tuning import LocalTuning
from farm.errors import UnavailableError
from farm.inventory.board_types import require_board_type
from farm.models.inputs import read_inputs
from farm.models.source import resolve_model
from farm.report.progress import Progress
from farm.search import tvm_env
from farm.search.workloads import Workload
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT, Trial
from tests.integration import candidates
from tests.integration.conftest import find_free_port, wait_until

BUDGET = 6


class Quiet:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, progress: Progress) -> None:
        pass


class Bench:
    """A farm that is up, its store, and the workloads of the tiny model."""

    def __init__(self, local: LocalTuning, store: Store) -> None:
        self.local, self.store, self.parts = local, store, local.parts
        self.source = resolve_model("tiny-cnn")
        self.workloads = local.load(self.source, read_inputs(self.source.load()), ["conv2d"])
        self.board = local.board()

    def campaign(self, store: Store | None = None) -> int:
        """A new campaign for the workloads."""
        store = store or self.store
        number = store.start_campaign("test", "tiny-cnn", self.source.sha256, "local", BUDGET, {})
        store.save_workloads(number, [_row(workload) for workload in self.workloads])
        return number

    def tune(self, on_progress: Callable[[Progress], None], budget: int = BUDGET) -> list[dict[str, Any]]:
        """Tune `budget` trials; returns every trial that was written."""
        number = self.campaign()
        Engine(self.parts, self.store, number, self.workloads, {}).tune(budget, on_progress)
        return self.store.fetch_trials(number)

    def events(self) -> list[str]:
        """The kinds of what happened so far."""
        return [f"{event['kind']} {event['subject']}" for event in self.store.fetch_events()]


def _row(workload: Any) -> dict[str, Any]:
    return {
        "hash": workload.hash,
        "name": workload.name,
        "flop": workload.flop,
        "arguments": [],
        "target": dict(workload.target),
        "pipeline": workload.pipeline,
        "module_json": workload.module_json,
        "weight": workload.weight,
    }


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One farm for the tests of this module."""
    home = tmp_path_factory.mktemp("home")
    settings = Settings(
        home=str(home), tracker_port=find_free_port(), batch=2, warmup=1, measure_timeout_s=3.0, population=16
    )
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as temporary:
        # A lock of its own: another farm on this machine is not what is tested here.
        patch.setattr(tempfile, "tempdir", temporary)
        patch.setenv("FARM_ZIG_CACHE", str(home / "zig"))
        with (
            Store(home / "farm.db") as store,
            LocalTuning(settings, store, require_board_type("local"), Quiet()) as local,
        ):
            yield Bench(local, store)


def accounted(trials: list[dict[str, Any]], budget: int = BUDGET) -> None:
    """Assert that the budget was spent, nothing twice: one trial per candidate that counts, others before it."""
    counting = [t for t in trials if t["fault_side"] in (None, str(FaultSide.CANDIDATE))]
    assert len(counting) == budget
    assert set(Counter((t["workload"], t["candidate"]) for t in counting).values()) == {1}
    for key in {(t["workload"], t["candidate"]) for t in trials}:
        attempts = [t["attempt"] for t in trials if (t["workload"], t["candidate"]) == key]
        assert attempts == list(range(1, len(attempts) + 1))


def once(action: Callable[[], Any], when: Callable[[Progress], bool]) -> Callable[[Progress], None]:
    """A listener that acts the first time that `when` holds."""
    done: list[bool] = []

    def listen(progress: Progress) -> None:
        if not done and when(progress) and action() is not False:
            done.append(True)
        if progress.phase == "done":
            assert done, "the harm was never done"

    return listen


def measuring(progress: Progress) -> bool:
    """Whether a trial is on the board, and one was there before."""
    return progress.boards_busy > 0 and progress.trials >= 1


def kill(pid: int) -> None:
    """Kill -9; wait until it is done."""
    process = psutil.Process(pid)
    process.kill()
    wait_until(
        lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, f"{pid} to be dead", timeout_s=5
    )


def test_an_undisturbed_run_spends_its_budget(bench: Bench) -> None:
    """Every trial of the budget is written once and teaches the search."""
    trials = bench.tune(lambda progress: None)
    accounted(trials)
    assert all(t["attempt"] == 1 for t in trials)
    assert all(t["median_s"] > 0 for t in trials if t["status"] == "ok")


def test_a_killed_agent_costs_an_attempt(bench: Bench) -> None:
    """Kill -9 of the agent is the board's fault: the trial is made again on the agent that takes its place."""
    trials = bench.tune(once(lambda: kill(bench.local.farm.agent_pid), measuring))
    accounted(trials)
    assert "restarted agent" in bench.events()
    assert {t["fault_side"] for t in trials} <= {None, "candidate", "board"}


def test_a_killed_worker_of_the_agent_is_an_outcome(bench: Bench) -> None:
    """Kill -9 of the process that runs a candidate is that trial's outcome; the session goes on."""

    def strike() -> bool:
        agent = psutil.Process(bench.local.farm.agent_pid)
        for session in agent.children():
            for worker in session.children():
                worker.kill()
                return True
        return False

    trials = bench.tune(once(strike, lambda progress: True), budget=24)
    accounted(trials, 24)
    assert all(t["attempt"] == 1 for t in trials)


def test_a_killed_compiler_is_nobodys_fault(bench: Bench) -> None:
    """Kill -9 of compilers in the middle of their builds: what they built is built again."""

    def strike() -> bool:
        busy = [running.actor for running in bench.parts.builds._running.values()]
        for actor in busy:
            _kill_actor(actor)
        return bool(busy)

    before = bench.parts.builds.recycled
    accounted(bench.tune(once(strike, lambda progress: True)))
    assert bench.parts.builds.recycled > before


def test_a_killed_search_starts_again(bench: Bench) -> None:
    """Kill -9 of the search: a new one is told what is known, and proposes none of it again."""
    accounted(bench.tune(once(lambda: _kill_actor(bench.parts.search), lambda p: p.trials >= 1)))
    assert "restarted search" in bench.events()


def test_a_killed_board_actor_is_the_farms_fault(bench: Bench) -> None:
    """Kill -9 of the process that holds the board's session: its trials are the farm's faults, and made again."""
    trials = bench.tune(once(lambda: _kill_actor(bench.parts.board), measuring))
    accounted(trials)
    assert "restarted board actor" in bench.events()
    assert {t["fault_side"] for t in trials} <= {None, "candidate", "farm", "board"}


def test_a_killed_tracker_is_hardly_noticed(bench: Bench) -> None:
    """Kill -9 of the tracker: it is started again, and no trial suffers."""
    process = bench.local.farm.tracker._process
    assert process is not None
    trials = bench.tune(once(lambda: kill(process.pid), measuring))
    accounted(trials)
    assert "restarted tracker" in bench.events()
    assert all(t["attempt"] == 1 for t in trials)


def test_a_frozen_agent_is_replaced(bench: Bench) -> None:
    """An agent that stops answering, with its session, is ended after its deadline and started again."""

    def freeze() -> None:
        agent = psutil.Process(bench.local.farm.agent_pid)
        for process in [agent, *agent.children(recursive=True)]:
            # A worker may end between being listed and being stopped; the agent frozen all the same.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    trials = bench.tune(once(freeze, measuring), budget=3)
    accounted(trials, 3)
    assert any(t["status"] == "board_lost" for t in trials)
    assert "restarted agent" in bench.events()


def _kill_actor(actor: Any) -> None:
    """Kill -9 of the process behind a Ray actor, found without asking it: it may be busy."""
    from ray._private.state import actors

    pid = actors(actor._actor_id.hex())["Pid"]
    assert pid > 0
    kill(pid)


@pytest.mark.parametrize(
    ("entry", "statuses"),
    [
        ("segfault", {Status.CRASHED}),
        ("loops", {Status.RUN_TIMEOUT}),
        ("eats_memory", {Status.OUT_OF_MEMORY}),
    ],
)
def test_a_bad_candidate_is_blamed_and_the_next_works(
    bench: Bench, bad: bytes, matmul: bytes, entry: str, statuses: set[Status]
) -> None:
    """A candidate that crashes, hangs or eats memory is at fault itself; the board's very next call succeeds."""
    matrix = TensorSpec((candidates.SIZE, candidates.SIZE), "float32")
    limits = Limits(timeout_s=2.0, memory_bytes=256 << 20)

    def measure(library: bytes, name: str) -> Outcome:
        spec = MeasureSpec(arguments=(matrix,) * 3, entry=name, limits=limits)
        text, _ = ray.get(bench.parts.board.measure.remote(spec.to_json(), library), timeout=60)
        return Outcome.from_json(text)

    outcome = measure(bad, entry)
    assert outcome.status in statuses, outcome.message
    assert outcome.status.fault_side is FaultSide.CANDIDATE
    assert measure(matmul, "main").status is Status.OK


def test_wrong_code_is_seen(bench: Bench) -> None:
    """A candidate that computes something else than the reference is no match; one that computes the same is."""
    shape = (candidates.SIZE, candidates.SIZE)
    workload = types.SimpleNamespace(name="product", arguments=((shape, "float32"),) * 3)
    programs = [(product_module(factor), True) for factor in (1.0, 1.0, 1.01)]
    right, same, wrong = bench.parts.build_all(programs, bench.parts.target())
    verdict, reference_s = engine_verify._check(bench.parts, workload, right, same)
    assert verdict.matches
    assert reference_s > 0
    verdict, _ = engine_verify._check(bench.parts, workload, right, wrong)
    assert not verdict.matches
    assert "differs" in verdict.reason


def product_module(factor: float, times: int = 1) -> str:
    """`main(a, b, c)` with c = factor * a @ b, in TVM's JSON; summed up so many times over, and divided by it."""
    tvm = tvm_env.load()
    from tvm import te

    a, b = (te.placeholder((candidates.SIZE, candidates.SIZE), "float32", name=name) for name in "ab")
    k, again = te.reduce_axis((0, candidates.SIZE), name="k"), te.reduce_axis((0, times), name="again")
    scale = tvm.tirx.const(factor / times, "float32")
    c = te.compute(a.shape, lambda i, j: te.sum(scale * a[i, k] * b[k, j], axis=[k, again]), name="c")
    function = te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")
    return str(tvm.ir.save_json(tvm.IRModule({"main": function})))


def test_a_wrong_winner_never_becomes_a_record(bench: Bench) -> None:
    """Winners whose code is wrong, or is not to be had again, are rejected for good; the next best is taken."""
    shape = (candidates.SIZE, candidates.SIZE)
    workload = Workload(
        "a" * 16, "product", 2.0 * candidates.SIZE**3, 1, ((shape, "float32"),) * 3, product_module(1.0), {}, "graph/1"
    )
    traces = {"right": product_module(1.0), "wrong": product_module(1.01)}

    @ray.remote(num_cpus=0)
    class Replaying:
        """Answers like the search, from traces that lead to known code."""

        def replay(self, workload: str, trace_json: str) -> str:
            return traces[trace_json]

    number = bench.campaign()
    bench.store.save_workloads(number, [_row(workload)])
    for trace, latency_s in (("lost", 1e-9), ("wrong", 1e-8), ("right", 1e-7)):
        outcome = Outcome(Status.OK, latency_s=(latency_s,), board=bench.board.name)
        bench.store.add_trial(Trial(number, workload.hash, trace, DEFAULT_POINT, 1, outcome, trace_json=trace))
    bench.parts.target()  # asked for while the real search is there
    search, bench.parts.search = bench.parts.search, Replaying.remote()
    try:
        verify = functools.partial(
            engine_verify.verify_winners, bench.parts, bench.store, number, "local", [workload], lambda text: None
        )
        assert verify() == engine_verify.Verdict(records=1, unchanged=0, rejected=2)
        assert verify() == engine_verify.Verdict(records=0, unchanged=1, rejected=0)
    finally:
        ray.kill(bench.parts.search)
        bench.parts.search = search
    [record] = bench.store.fetch_records(workloads=[workload.hash])
    assert record.candidate == "right"


def test_a_winner_that_is_slower_than_untuned_code_is_not_taken(bench: Bench) -> None:
    """It computes the right thing in fifty times the time: no record, and no fault of the candidate."""
    shape = (candidates.SIZE, candidates.SIZE)
    workload = Workload(
        "b" * 16, "product", 2.0 * candidates.SIZE**3, 1, ((shape, "float32"),) * 3, product_module(1.0), {}, "graph/1"
    )
    traces = {"": product_module(1.0), "slow": product_module(1.0, 50)}

    @ray.remote(num_cpus=0)
    class Replaying:
        """Answers like the search; without a trace, what there is without a record."""

        def replay(self, workload: str, trace_json: str) -> str:
            return traces[trace_json]

    number = bench.campaign()
    bench.store.save_workloads(number, [_row(workload)])
    outcome = Outcome(Status.OK, latency_s=(1.0,), board=bench.board.name)
    bench.store.add_trial(Trial(number, workload.hash, "slow", DEFAULT_POINT, 1, outcome, trace_json="slow"))
    bench.parts.target()
    search, bench.parts.search = bench.parts.search, Replaying.remote()
    said: list[str] = []
    try:
        verdict = engine_verify.verify_winners(bench.parts, bench.store, number, "local", [workload], said.append)
    finally:
        ray.kill(bench.parts.search)
        bench.parts.search = search
    assert verdict == engine_verify.Verdict(records=0, unchanged=0, rejected=0, slower=1)
    assert "slower than untuned code" in said[-1]
    assert bench.store.fetch_records(workloads=[workload.hash]) == []


@pytest.mark.parametrize(
    ("status", "attempts"), [(Status.NOISY, 3), (Status.THROTTLED, 3), (Status.FARM_ERROR, 3), (Status.BOARD_LOST, 2)]
)
def test_what_is_never_a_candidates_fault_ends_the_run(bench: Bench, status: Status, attempts: int) -> None:
    """A board that never gives a usable answer ends the run after a bounded number of trials; each is kept."""

    @ray.remote(num_cpus=0)
    class UselessBoard:
        """Answers like a board's actor."""

        def measure(self, spec_json: str, library: bytes) -> tuple[str, float]:
            return Outcome(status, "as ever").to_json(), 0.0

    number = bench.campaign()
    board, bench.parts.board = bench.parts.board, UselessBoard.remote()
    try:
        with pytest.raises(UnavailableError, match=f"trials in a row .* {status}: as ever"):
            Engine(bench.parts, bench.store, number, bench.workloads, {}).tune(200, lambda progress: None)
    finally:
        ray.kill(bench.parts.board)
        bench.parts.board = board
    trials = bench.store.fetch_trials(number)
    assert len(trials) == MAX_FAULTS_IN_A_ROW
    assert {t["fault_side"] for t in trials} == {str(status.fault_side)}
    assert max(t["attempt"] for t in trials) == attempts


def test_a_full_store_ends_the_run_and_keeps_what_it_has(bench: Bench, tmp_path: pathlib.Path) -> None:
    """When the disk fills in the middle of a run it ends with a clear error; earlier trials can be read."""
    import sqlalchemy as sa

    with Store(tmp_path / "farm.db") as store:
        number = bench.campaign(store)
        pages = store._rows(sa.text("PRAGMA page_count"))[0]["page_count"]  # type: ignore[arg-type]
        sa.event.listen(
            store._engine, "begin", lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count={pages + 6}")
        )
        with pytest.raises(UnavailableError, match="full"):
            Engine(bench.parts, store, number, bench.workloads, {}).tune(200, lambda progress: None)
    with Store(tmp_path / "farm.db") as store:
        assert len(store.fetch_trials(number)) >= 1


def test_an_agent_that_cannot_start_ends_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the agent died and its program is broken, the run ends at once and says so."""

    def harm() -> None:
        monkeypatch.setattr("sys.executable", "/bin/false")
        kill(bench.local.farm.agent_pid)

    number = bench.campaign()
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="the agent ended at once"):
        Engine(bench.parts, bench.store, number, bench.workloads, {}).tune(BUDGET, once(harm, measuring))
    assert time.monotonic() - began < 60
    monkeypatch.undo()
    accounted(bench.tune(lambda progress: None))
