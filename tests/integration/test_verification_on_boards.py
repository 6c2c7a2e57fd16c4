"""Winners found for real: a search's candidates, compiled, checked and measured again on two virtual boards."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from device_agent.protocol import Limits, MeasureSpec, OperatingPoint, Outcome, Status, TensorSpec
from farm import emulation, settings
from farm.campaign.verify.programs import Replay
from farm.campaign.verify.verification import Verification
from farm.crew.held_board import Ended
from farm.inventory.board_types import load_board_types
from farm.measure.answers import AgentAddress
from farm.measure.blocking import BlockingSession
from farm.models import inputs as model_inputs
from farm.models import source
from farm.search import tvm_env, workloads
from farm.search.codegen import lowering
from farm.search.codegen.build_pool import BuildResult
from farm.search.graph import importer, pipelines
from farm.search.tuners.decisions import Candidate
from farm.selection.tie import TieRule
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, Order, WorkloadOrder
from farm.values import WINNER_TRIAL, Trial, Workload
from tests import together
from tests.integration.conftest import Agent
from tests.integration.one_search import OneSearch
from tests.unit.asked_work import AskedWork, BuildAsked, MeasureAsked, ReplayAsked, RunAsked
from tests.unit.campaign_orders import MEASURE, SEARCH, make_order, make_type

tvm = tvm_env.load()

from tvm import te  # noqa: E402

NANO = "jetson-nano"
# The text of the point in trials; what it holds on the board.
POINT, CLOCKS = "cpu_freq_hz=1428000000", OperatingPoint(cpu_freq_hz={"a57": 1_428_000_000})
# Short, to prove that the parts fit; tests/unit/test_tie.py covers the separation of noise from differences.
RULE = TieRule(looks=(4,))
THREADS = 1  # as campaigns use on virtual boards


class Boards:
    """Sessions with virtual boards, by the farm's names."""

    def __init__(self, agents: Mapping[str, Agent]) -> None:
        self.agents = agents
        self.sessions: dict[str, BlockingSession] = {}

    def answer(self, request: RunAsked | MeasureAsked) -> None:
        asked = self._session(request.board)
        asked.pin(request.point)
        if isinstance(request, RunAsked):
            outcome, outputs = asked.run_model(request.spec, request.program, request.inputs)
            request.answer.set_result(Ended(outcome, 0.1, outputs))
        else:
            request.answer.set_result(Ended(asked.measure(request.spec, request.library), 0.1))

    def measure(self, board: str, spec: MeasureSpec, library: bytes) -> Outcome:
        """Time a library at the test's point."""
        session = self._session(board)
        session.pin(CLOCKS)
        return session.measure(spec, library)

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()

    def _session(self, board: str) -> BlockingSession:
        if board not in self.sessions:
            agent = self.agents[board]
            key = f"{NANO}/{agent.key.partition('/')[2]}"
            self.sessions[board] = BlockingSession(AgentAddress("127.0.0.1", agent.port), key)
        return self.sessions[board]


@pytest.fixture(scope="module")
def agents(start_agent: Callable[..., Agent]) -> dict[str, Agent]:
    return {
        f"nano-{n}": start_agent("--virtual", NANO, "--seed", str(n), "--port", "9600", "--port-end", "9699")
        for n in (1, 2)
    }


@pytest.fixture
def boards(agents: dict[str, Agent]) -> Iterator[Boards]:
    boards = Boards(agents)
    yield boards
    boards.close()


@pytest.fixture(scope="module")
def host() -> dict[str, object]:
    return dict(tvm_env.host_target(THREADS))


@pytest.fixture(scope="module")
def workload(host: dict[str, object]) -> Workload:
    """The heaviest function of the zoo's tiny-cnn."""
    model = source.resolve_model("tiny-cnn").load()
    shapes = {spec.name: spec.static_shape for spec in model_inputs.read_inputs(model)}
    compile_target = tvm_env.make_target(host)
    module, used = pipelines.prepare(
        importer.import_onnx(model, shapes), compile_target, pipelines.require_pipeline("graph/2")
    )
    return workloads.extract(module, compile_target, host, used.name)[0]


@pytest.fixture(scope="module")
def search(workload: Workload) -> OneSearch:
    return OneSearch(workload)


@pytest.fixture(scope="module")
def candidates(search: OneSearch) -> list[Candidate]:
    return search.propose(4)[:3]


def submit(
    store: Store,
    boards: Boards,
    workload: Workload,
    candidates: list[Candidate],
    name: str,
    threads: int = THREADS,
    **asked: str,
) -> tuple[int, Order]:
    about = WorkloadOrder(
        hash=workload.hash,
        name=workload.name,
        kind=workload.kind,
        flop=workload.flop,
        weight=1.0,
        models=("tiny-cnn",),
        calls=(1,),
    )
    given = {"target": workload.target, "threads": threads, "pipeline": workload.pipeline, "points": {POINT: CLOCKS}}
    of_type = make_type(NANO, (about,), **given)
    changed = {"timeout_s": 20.0, "verify_top": 2}
    order = make_order(
        name,
        owner="ann@desk",
        models=(),
        types=(of_type,),
        budget=Budget(trials=3),
        search=SEARCH.model_copy(update={"warm_start": False, "seed": 1}),
        measure=MEASURE.model_copy(update=changed),
        **asked,
    )
    ours = dataclasses.replace(workload, board_type=NANO)
    campaign = store.campaigns.submit(order, "farm campaign run tiny.yaml", [ours])
    for candidate in candidates:
        arguments = tuple(TensorSpec(shape, dtype) for shape, dtype in candidate.arguments)
        spec = MeasureSpec(arguments, repeat=3, min_repeat_s=0.02, limits=Limits(timeout_s=20.0, threads=threads))
        outcome = boards.measure("nano-1", spec, lowering.build_candidate(candidate.module_json, workload.target))
        assert outcome.status is Status.OK, outcome.message
        trial = Trial(campaign, workload.hash, candidate.hash, POINT, 1, outcome, candidate.trace_json, board_type=NANO)
        assert store.trials.add(trial)
    return campaign, order


def drive(verification: Verification, work: AskedWork, boards: Boards, replay: Callable[[str], str]) -> None:
    waiting: list[Any] = []
    for _ in range(400):
        verification.step(0.0)
        waiting += work.take()
        if verification.done:
            return
        request = waiting.pop(0)
        if isinstance(request, ReplayAsked):
            request.answer.set_result(Replay(replay(request.trace_json)))
        elif isinstance(request, BuildAsked):
            library = lowering.build_candidate(request.module_json, request.target, standalone=request.standalone)
            address = lowering.content_address(library)
            request.answer.set_result(BuildResult(Status.OK, "", library, address, 1.0))
        elif request.board in boards.agents:
            boards.answer(request)
    pytest.fail("the verification does not end")


def open_verification(campaign: int, order: Order, store: Store) -> tuple[Verification, AskedWork]:
    work = AskedWork()
    verification = Verification(campaign, order, store, Settings(), work, RULE)
    for board in ("nano-1", "nano-2"):
        verification.give(board, NANO, True)
    return verification, work


def test_a_winner_is_checked_and_measured_on_both_boards(
    tmp_path: pathlib.Path, boards: Boards, workload: Workload, search: OneSearch, candidates: list[Candidate]
) -> None:
    """The record's candidate computes what the unscheduled function does, and was measured in turns on two boards.

    The best candidate's trace is answered with a function that computes something else: it is found out and is out.
    """
    with Store(tmp_path / "farm.sqlite") as store:
        campaign, order = submit(store, boards, workload, candidates, "first")
        known = store.trials.fetch_known_candidates(workload.hash, NANO, POINT, True)
        best = min(known, key=lambda row: float(row.median_s))

        def replay(trace_json: str) -> str:
            return spoil(workload.module_json) if trace_json == best.trace_json else search.replay(trace_json)

        verification, work = open_verification(campaign, order, store)
        drive(verification, work, boards, replay)
        assert verification.verdict["rejected"] == 1
        (record,) = store.records.fetch(board_type=NANO, operating_point=POINT, simulated=True)
        assert record.candidate != best.candidate
        assert len(record.evidence["boards"]) == 2
        assert record.evidence["rounds"] >= 4
        assert record.evidence["rivals"]
        assert 0 <= record.max_rel_error < 1e-4
        rows = [row for row in store.trials.fetch(campaign) if row["purpose"] == WINNER_TRIAL]
        assert [row["candidate"] for row in rows if row["status"] == Status.WRONG_RESULT] == [best.candidate]
        timed = [json.dumps(row["outcome"]["point"]) for row in rows if row["median_s"] is not None]
        assert set(timed) == {json.dumps(CLOCKS.to_dict())}


def spoil(module_json: str) -> str:
    text = tvm.ir.load_json(module_json).script()
    assert "T.max(" in text
    return str(tvm.ir.save_json(tvm.script.from_source(text.replace("T.max(", "T.min("))))


@pytest.fixture(scope="module")
def emulated(start_agent: Callable[..., Agent], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Agent]:
    """Two virtual Nanos that run code of their own."""
    home = tmp_path_factory.mktemp("home")
    together.share_what_is_built(home)
    folder = emulation.prepare(dataclasses.replace(settings.load(), home=str(home)))
    ports = ("--port", "9600", "--port-end", "9699", "--emulator-folder", str(folder))
    return {f"nano-{n}": start_agent("--virtual", NANO, "--seed", str(n), *ports) for n in (1, 2)}


@pytest.mark.parametrize(("objective", "taken"), [("latency", "fast"), ("energy", "frugal"), ("period", "frugal")])
def test_the_least_energy_is_not_the_fastest(
    tmp_path: pathlib.Path, emulated: dict[str, Agent], objective: str, taken: str
) -> None:
    """Four cores that compute everything three times are faster than one that does once, and use more energy.

    The record is the first by latency and the second by energy; its evidence has both figures.
    """
    nano = load_board_types()[NANO].target
    assert nano is not None
    about = nano.to_tvm()
    x = te.placeholder((1026, 64), name="x")
    y = te.compute(x.shape, lambda i, j: te.exp(te.exp(te.exp(x[i, j] * 0.1) * 0.1) * 0.1), name="y")
    z = te.compute((1024, 64), lambda i, j: y[i, j] + y[i + 1, j] + y[i + 2, j], name="z")
    plain = tvm.s_tir.Schedule(te.create_prim_func([x, z]))
    hasty = tvm.s_tir.Schedule(plain.mod)
    hasty.compute_inline("y")
    untuned = tvm.ir.save_json(hasty.mod)
    hasty.parallel(hasty.get_loops("z")[0])
    texts = {"frugal": tvm.ir.save_json(plain.mod), "fast": tvm.ir.save_json(hasty.mod)}
    arguments = (((1026, 64), "float32"), ((1024, 64), "float32"))
    traces = {name: json.dumps([name, [], [], [["TENSOR", t, list(s)] for s, t in arguments]]) for name in texts}
    known = Workload("0" * 16, "three_exp", 1.0, 1.0, arguments, untuned, about, "graph/2")
    found = [Candidate(known.hash, name, arguments, traces[name], texts[name]) for name in texts]
    boards = Boards(emulated)
    with Store(tmp_path / "farm.sqlite") as store:
        campaign, order = submit(store, boards, known, found, objective, threads=4, objective=objective)
        verification, work = open_verification(campaign, order, store)
        drive(verification, work, boards, lambda trace: texts[json.loads(trace)[0]] if trace else untuned)
        (record,) = store.records.fetch(board_type=NANO, operating_point=POINT, simulated=True)
    boards.close()
    assert (record.candidate, record.objective) == (taken, objective)
    if objective != "latency":
        low_j, high_j = record.evidence["energy_ci_j"]
        assert low_j < record.energy_j < high_j
