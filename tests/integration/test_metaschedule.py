"""What a stock script's builder, runner and database stand on: warm compilers, boards held apart, and the store."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import pytest

from device_agent.protocol import Limits, MeasureSpec, Outcome, Status, TensorSpec
from farm.connectivity.tracker import Tracker
from farm.crew.crew import BoardPool, Crew, Tried, wait_for
from farm.crew.driven_board import DrivenBoard
from farm.crew.health import HealthLimits as HealthLimits
from farm.crew.health import Kind, Observation, decide_by
from farm.crew.leased_site import FleetSite
from farm.errors import UnavailableError, UsageError
from farm.metaschedule.builder import Compilers
from farm.metaschedule.runner import MeasuredLately, recent
from farm.search import tvm_env
from farm.search.codegen.build_pool import ChildCompiler
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT, Board, Trial
from tests.integration import candidates
from tests.integration.conftest import Agent, wait_until

TYPE = "jetson-nano"
TARGET = {"kind": "llvm", "num-cores": 2}
MATRIX = TensorSpec((candidates.SIZE, candidates.SIZE), "float32")
SPEC = MeasureSpec(arguments=(MATRIX,) * 3, limits=Limits(timeout_s=10.0))
PATIENCE_S = 110.0


@dataclasses.dataclass
class Boards:
    """A crew's boards, and candidates for them."""

    crew: Crew
    pool: BoardPool

    def submit(self, spec: MeasureSpec, library: bytes) -> Future[Tried]:
        return self.crew.start(self.pool.run(functools.partial(DrivenBoard.measure, spec=spec, library=library)))


class Bench:
    """Two virtual boards behind a tracker, in a store, and their holder for a script."""

    def __init__(self, home: pathlib.Path, store: Store, tracker: Any, agents: dict[str, Agent]) -> None:
        self.home, self.store, self.tracker, self.agents = home, store, tracker, agents
        self.notes: list[str] = []

    @contextlib.contextmanager
    def boards(self, count: int = 2, wait_s: float = PATIENCE_S) -> Iterator[Boards]:
        here = types.SimpleNamespace(tracker=Tracker(self.tracker.host, self.tracker.port))

        def open_site(own: Store) -> FleetSite:
            return FleetSite(here, own, TYPE, None, "script test", wait_s, self.notes.append)

        with Crew(Settings(home=str(self.home)), self.notes.append) as crew:
            yield Boards(crew, BoardPool(crew, open_site, count, self.notes.append))
        held = [board.lease for board in self.store.boards.fetch() if board.lease is not None]
        assert all(lease.purpose != "script test" for lease in held)

    def heal(self) -> None:
        for name in self.agents:
            decide = decide_by(Observation(Kind.PROBE_PASSED), HealthLimits())
            self.store.boards.observe(name, Kind.PROBE_PASSED, "test", decide)


def probe_module() -> str:
    """A matrix product, not scheduled, as `main(a, b, product)` in TVM's JSON."""
    tvm = tvm_env.load()
    from tvm import te

    size = 64
    a = te.placeholder((size, size), "float32", name="a")
    b = te.placeholder((size, size), "float32", name="b")
    k = te.reduce_axis((0, size), name="k")
    product = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")
    function = te.create_prim_func([a, b, product]).with_attr("global_symbol", "main")
    return str(tvm.ir.save_json(tvm.IRModule({"main": function})))


@pytest.fixture(scope="module")
def bench(tracker: Any, start_agent: Callable[..., Agent], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The boards of this module's tests."""
    home = tmp_path_factory.mktemp("home")
    with Store(home / "farm.db") as store:
        agents = {}
        for _ in range(2):
            where = f"{tracker.host}:{tracker.port}"
            agent = start_agent("--virtual", TYPE, "--tracker", where, "--port", "9800", "--port-end", "9899")
            name = agent.key.partition("/")[2]
            agents[name] = agent
            store.boards.save(Board(name, TYPE, simulated=True))
        yield Bench(home, store, tracker, agents)


def test_a_crash_is_the_candidates_and_its_board_goes_on(bench: Bench, matmul: bytes, bad: bytes) -> None:
    """A candidate that crashes is tried once and blamed; what comes after it is measured on the same boards."""
    with bench.boards() as boards:
        crash = MeasureSpec(arguments=(), entry="segfault", limits=SPEC.limits)
        works = [boards.submit(crash, bad) for _ in range(2)] + [boards.submit(SPEC, matmul) for _ in range(4)]
        found = [wait_for(work) for work in works]
        assert [each.outcome.status for each in found] == [Status.CRASHED] * 2 + [Status.OK] * 4
        assert {each.outcome.board for each in found} <= set(bench.agents)
        assert all(not each.tried and each.board_s > 0 for each in found)


def test_what_a_lost_board_was_doing_is_done_elsewhere(bench: Bench, matmul: bytes) -> None:
    """Kill -9 of a board in mid-measurement: its candidate is measured on the other one, and gets a real time."""
    slow = MeasureSpec(arguments=(MATRIX,) * 3, min_repeat_s=0.4, limits=Limits(timeout_s=90.0))
    with bench.boards() as boards:
        wait_until(
            lambda: [each.description is None for each in boards.crew.boards] == [False] * 2,
            f"both boards; {bench.notes}",
            PATIENCE_S,
        )
        name, agent = next(iter(bench.agents.items()))
        before = agent.descendants()
        works = [boards.submit(slow, matmul) for _ in range(2)]
        [worker, *_] = wait_until(lambda: [p for p in agent.descendants() if p not in before], "a worker there")
        session = worker.parent()
        assert session in before
        session.kill()
        found = [wait_for(work) for work in works]
        assert [each.outcome.status for each in found] == [Status.OK] * 2
        assert [each.tried for each in found if each.tried] == [(name,)]
    bench.heal()


def test_without_boards_a_script_is_told_why(bench: Bench) -> None:
    """Boards that others have all the while: work ends with an error that names them, after the time that was set."""
    leases = [bench.store.leases.acquire(name, "bob", "other work") for name in bench.agents]
    try:
        with bench.boards(wait_s=4.0) as boards:
            with pytest.raises(UnavailableError, match="other work"):
                wait_for(boards.submit(SPEC, b""))
            with pytest.raises(UnavailableError):
                boards.crew.call(boards.pool.describe())
    finally:
        for lease in leases:
            bench.store.leases.release(lease)


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compilers]:
    log = tmp_path_factory.mktemp("compilers") / "log"
    settings = Settings(build_timeout_s=20.0)
    compilers = Compilers(1, settings, lambda: ChildCompiler(log, os.environ))
    yield compilers
    pids = compilers.pids()
    compilers.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_dead_compiler_is_replaced(compilers: Compilers) -> None:
    """A build whose process is killed is done by the next one; what the compiler refuses fails, with the reason."""
    module = probe_module()
    [first, refused] = compilers.build([(module, TARGET), ("no module", TARGET)])
    assert first.library[:4] == b"\x7fELF"
    assert (refused.library, "Error" in refused.message) == (None, True)
    [pid] = compilers.pids()
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    built = compilers.build([(module, TARGET), (module, TARGET)])
    assert [each.library for each in built] == [first.library] * 2
    assert compilers.pids() != [pid]


def test_an_interrupted_batch_leaves_the_next_one_alone(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way when a script was interrupted is not taken for an answer to what it asks next."""
    module = probe_module()
    compilers.build([(module, TARGET)])

    def interrupt() -> list[Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compilers, "poll", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compilers.build([(module, TARGET)])
    [refused] = compilers.build([("no module", TARGET)])
    assert refused.library is None


@pytest.fixture
def record(tmp_path: pathlib.Path) -> Iterator[tuple[Store, Any, Callable[[float], Any]]]:
    """A store with one virtual board, a workload, and how to make a record of it that took so long."""
    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms

    module = tvm.ir.load_json(probe_module())
    target = tvm.target.Target(TARGET)
    entry = ms.database.MemoryDatabase().commit_workload(module)
    context = ms.TuneContext(module, target=target, space_generator="post-order-apply", num_threads=1, rand_state=1)
    spaces = context.generate_design_space()

    def make(seconds: float) -> Any:
        schedule = tvm.s_tir.Schedule(module)
        spaces[0].trace.apply_to_schedule(schedule, remove_postproc=True)
        arguments = ms.arg_info.ArgInfo.from_entry_func(module, remove_preproc=True)
        return ms.database.TuningRecord(schedule.trace, entry, [seconds], target, arguments)

    with Store(tmp_path / "farm.db") as store:
        store.boards.save(Board("nano-01", TYPE, simulated=True))
        yield store, module, make


def test_records_outlive_the_script(record: tuple[Store, Any, Callable[[float], Any]]) -> None:
    """What a FarmRunner measured is found by the next database of the type, as a record that can be applied."""
    from farm.search import FarmDatabase

    store, module, make = record
    outcome = Outcome(Status.OK, latency_s=(1.25e-3,), board="nano-01", simulated=True)
    recent.add(MeasuredLately(outcome, 0.5, TYPE))
    first = FarmDatabase(store.location, board_type=TYPE)
    assert not first.has_workload(module)
    first.commit_tuning_record(make(1.25e-3))
    first.commit_tuning_record(make(1e10))
    assert len(first) == 2
    first.close()
    [trial] = store.trials.fetch()
    assert (trial["board"], trial["simulated"], trial["median_s"], trial["held_s"]) == ("nano-01", True, 1.25e-3, 0.5)
    assert [row.state for row in store.campaigns.fetch_searches()] == ["finished"]

    second = FarmDatabase(f"sqlite:////{str(store.location).lstrip('/')}", board_type=TYPE)
    assert second.has_workload(module)
    [best] = second.get_top_k(second.commit_workload(module), 5)
    assert [float(sample) for sample in best.run_secs] == [1.25e-3]
    assert second.query_schedule(module, best.target, "main") is not None
    second.close()


def test_a_model_is_compiled_from_the_database(tmp_path: pathlib.Path) -> None:
    """`compile_relax` applies what is known of a model's functions, and the model computes what it did."""
    import numpy as np

    tvm = tvm_env.load()
    import tvm.s_tir.meta_schedule as ms
    from tvm import relax
    from tvm.script import relax as script

    from farm.search import FarmDatabase

    builder = relax.BlockBuilder()
    x = relax.Var("x", script.Tensor((4, 8), "float32"))
    weights = np.arange(24, dtype="float32").reshape(8, 3)
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.nn.relu(builder.emit(relax.op.matmul(x, relax.const(weights)))))
        builder.emit_func_output(result)
    module, target = relax.get_pipeline("zero")(builder.get()), tvm.target.Target(TARGET)
    database = FarmDatabase(tmp_path / "farm.db", board_type=TYPE)
    [task] = ms.relax_integration.extract_tasks(module, target)
    function = task.dispatched[0]
    schedule = tvm.s_tir.Schedule(function)
    schedule.parallel(schedule.get_loops(schedule.get_sblock("matmul"))[0])
    entry = database.commit_workload(function)
    arguments = ms.arg_info.ArgInfo.from_entry_func(function, remove_preproc=True)
    database.commit_tuning_record(ms.database.TuningRecord(schedule.trace, entry, [1e-6], target, arguments))
    with target, database, tvm.transform.PassContext(opt_level=3):
        annotated = relax.transform.AnnotateTIROpPattern()(module)
        applied = relax.transform.MetaScheduleApplyDatabase()(annotated)
    assert "T.parallel" in applied.script()
    machine = relax.VirtualMachine(ms.relax_integration.compile_relax(database, module, target, params=None), tvm.cpu())
    value = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)
    computed = machine["main"](tvm.runtime.tensor(value)).numpy()
    np.testing.assert_allclose(computed, np.maximum(value @ weights, 0), rtol=1e-5)
    database.close()


def test_a_whole_model_is_compiled_from_what_farm_tune_found(tmp_path: pathlib.Path) -> None:
    """In a plain script every function of a model is found, in the flow that Relax's own pipelines have."""
    import numpy as np

    tvm = tvm_env.load()
    from farm.models import inputs, source
    from farm.search import FarmDatabase, farm_pipeline, import_model
    from farm.search.tuners.schedule_space import ScheduleSpace
    from farm.search.workloads import prepare_model

    config = tvm_env.host_target(1)
    model = source.resolve_model("tiny-cnn").load()
    [spec] = inputs.read_inputs(model)
    found = prepare_model(model, {spec.name: spec.static_shape}, config, "graph/2").workloads
    with Store(tmp_path / "farm.db") as store:
        campaign = store.campaigns.start("tune", "tiny-cnn", "", TYPE, 0, {"target": config})
        store.workloads.save(campaign, found)
        for workload in found:
            space = ScheduleSpace(workload)
            [schedule] = space.evaluate([(space.undecided(0), 3)])
            assert schedule is not None
            candidate = space.describe(schedule)
            outcome = Outcome(Status.OK, latency_s=(1e-4,), board="nano-01")
            store.trials.add(
                Trial(
                    campaign, workload.hash, candidate.hash, DEFAULT_POINT, 1, outcome, candidate.trace_json,
                    board_type=TYPE,
                )
            )  # fmt: skip

    module = import_model("tiny-cnn")
    with contextlib.closing(FarmDatabase(tmp_path / "farm.db", board_type=TYPE, pipeline="graph/2")) as database:
        with database.target, database:
            tuned = farm_pipeline("graph/2")(module)
        with database.target:
            untuned = farm_pipeline("graph/2")(module)
        scheduled = [f for _, f in tuned.functions_items() if "tirx.is_scheduled" in (f.attrs or {})]
        assert len(scheduled) >= len(found)
        value = np.random.default_rng(1).standard_normal(spec.static_shape).astype("float32")
        results = []
        for each in (tuned, untuned):
            machine = tvm.relax.VirtualMachine(tvm.compile(each, target=database.target), tvm.cpu())
            results.append(machine["main"](tvm.runtime.tensor(value)).numpy())
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


def test_foreign_results_stay_out_of_the_store(record: tuple[Store, Any, Callable[[float], Any]]) -> None:
    """A result that no FarmRunner measured is kept for the script alone, since its board is unknown."""
    from farm.search import FarmDatabase

    store, module, make = record
    database = FarmDatabase(store.location, board_type=TYPE)
    database.commit_tuning_record(make(2.5e-3))
    assert len(database) == 1
    assert not store.trials.fetch()
    assert not FarmDatabase(store.location, board_type=TYPE).has_workload(module)
    database.close()


@pytest.mark.parametrize("url", ["mysql://farm/farm", "sqlite://", "/"])
def test_a_url_that_names_no_file_is_refused(url: str) -> None:
    """A database of another kind, or no file at all, is wrong usage."""
    from farm.metaschedule.database import find_store

    with pytest.raises(UsageError):
        find_store(url)


def test_impossible_orders_are_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that cannot be are wrong usage before anything is started."""
    from farm.search import FarmBuilder, FarmRunner

    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="max_workers"):
        FarmBuilder(max_workers=0)
    with pytest.raises(UsageError, match="not a duration"):
        FarmRunner(TYPE, wait="soon")
    with pytest.raises(UsageError, match="no boards named"):
        FarmRunner()
    with pytest.raises(UsageError, match="no board of type"):
        FarmRunner(TYPE)
    with pytest.raises(UsageError, match="no board 'nano-07'"):
        FarmRunner(board="nano-07")


def test_code_for_other_processors_is_refused(matmul: bytes) -> None:
    """A script that tunes for another architecture than its boards' gets that error, not failed candidates."""
    from farm.metaschedule.runner import require_runnable

    machine = {62: "x86_64", 183: "aarch64"}[int.from_bytes(matmul[18:20], "little")]
    require_runnable(matmul, {"name": "nano-01", "architecture": machine})
    with pytest.raises(UsageError, match="FarmRunner's `target`"):
        require_runnable(matmul, {"name": "nano-01", "architecture": "riscv64"})
