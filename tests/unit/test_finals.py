"""Finals of models on made-up boards and compilers: what is decided, and what faults and restarts do to it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from device_agent.protocol import Layer, Outcome, RunDetails, Status
from farm.artifacts.contenders import PREDICTED, RECORDED, BuiltContenders, Contender, RecordPart
from farm.campaign.plan_estimate import estimate_final_s
from farm.campaign.verify.coroutines import Loop, Running
from farm.campaign.verify.finals import Finals
from farm.campaign.verify.programs import Preparations
from farm.crew.held_board import Ended
from farm.errors import FarmError, UsageError
from farm.models.inputs import InputSpec
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Order, WorkloadOrder
from farm.values import name_workloads
from tests.unit.asked_work import AskedWork, ModelAsked, RunAsked
from tests.unit.campaign_orders import MEASURE, SEARCH, make_model, make_order, make_type

NANO = "jetson-nano"
W1 = WorkloadOrder(hash="w1", name="conv2d w1", kind="conv2d", flop=1e6, weight=1.0, models=("tiny-cnn",), calls=(1,))
ORDER = make_order(
    "vision",
    owner="ann@desk",
    models=(make_model("tiny-cnn"),),
    types=(make_type(NANO, (W1,), target={"kind": "llvm"}, threads=1, pipeline="graph/2"),),
    search=SEARCH.model_copy(update={"loss": "rank", "seed": 7}),
    measure=MEASURE.model_copy(update={"min_repeat_s": 0.0}),
)
PARTS = (RecordPart("w1", "conv2d w1", "c1", 1e-3, True), RecordPart("w2", "dense w2", "c2", 5e-4, True))


class Lab:
    """Answers what finals ask for: a program's latency is what its text says, in ms.

    `compiled` is what compiling gives or raises; `fault` may spoil a run: it gets the program and how many runs
    were answered before. `outputs` are what a program computes where that is not 1; `layers_ms` are its functions'.
    """

    def __init__(self, store: Store, latency_ms: dict[str, float], parts: tuple[RecordPart, ...] = PARTS[:1]) -> None:
        self.store, self.latency_ms, self.parts = store, latency_ms, parts
        self.error: FarmError | None = None
        self.fault: Callable[[str, int], Status] = lambda program, count: Status.OK
        self.outputs: dict[str, float] = {}
        self.layers_ms: dict[str, dict[str, float]] = {}
        self.asked: list[str] = []
        self.boards: list[str] = []
        self.compiles = 0
        self.now_s = 0.0
        self.random = np.random.default_rng(3)

    def open(self, campaign: int = 1, order: Order = ORDER) -> None:
        self.loop, self.work_asked = Loop(), AskedWork()
        may_begin = Preparations(lambda: True)
        self.finals = Finals(self.loop, self.work_asked, may_begin, campaign, order, self.store, Settings())
        self.finals.begin()

    def drive(self, board: str | None = "nano-1", most: int = 5000) -> None:
        """Go on until all is decided, or so many steps were made; `board`: None lends none."""
        work: Running | None = None
        for _ in range(most):
            self.finals.tick(self.now_s)
            self.loop.run()
            if self.finals.done:
                return
            if work is None or work.is_over:
                stage = self.finals.find(NANO) if board else None
                if stage is not None:
                    work = self.loop.start(self.finals.run(stage, str(board)))
                    self.work = work
            for request in self.work_asked.take():
                self.answer(request)
            if board is None:
                self.now_s += 1.0

    def answer(self, request: Any) -> None:
        if isinstance(request, ModelAsked):
            self.compiles += 1
            _, *more = request.job.args  # type: ignore[attr-defined]
            mixes = more[0] if len(more) == 1 else more[1](self.parts, 1.0)
            made = {name: Contender(name.encode()) for name in mixes}
            if self.error is not None:
                request.answer.set_exception(self.error)
                return
            if len(more) == 1:
                request.answer.set_result(made)
                return
            made |= {name: Contender(name.encode()) for name in (RECORDED, PREDICTED)}
            built = BuiltContenders(made, self.parts, (InputSpec("x", (1, 2), "float32"),), mixes)
            request.answer.set_result(built)
            return
        assert isinstance(request, RunAsked)
        program = request.program.decode()
        status = self.fault(program, len(self.asked))
        self.asked.append(program)
        self.boards.append(request.board)
        base_s = self.latency_ms[program] * 1e-3
        latency_s = tuple(base_s * (1 + 0.002 * self.random.standard_normal()) for _ in range(request.spec.runs))
        if status is Status.OK:
            seen = self.layers_ms[program].items() if request.spec.per_layer else ()
            layers = tuple(Layer(name, 1, 1e-3 * took * (1 + 0.002 * self.random.random())) for name, took in seen)
            details = RunDetails(2 * base_s, 1 << 20, layers)
            outcome = Outcome(status, latency_s=latency_s, board=request.board, details=details)
        else:
            outcome = Outcome(status, board=request.board)
        outputs = {"out": np.full(2, self.outputs.get(program, 1.0), np.float32)}
        request.answer.set_result(Ended(outcome, 0.1, outputs))

    @property
    def document(self) -> dict[str, Any]:
        (found,) = self.finals.documents
        return found

    def refused(self, *, simulated: bool = True) -> dict[str, str]:
        (found,) = self.store.decisions.fetch(model_sha256="ab" * 32, board_type=NANO, simulated=simulated)
        assert found.workloads == name_workloads(part.workload for part in self.parts)
        return dict(found.refused)


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[Store]:
    with Store(tmp_path / "farm.db") as store:
        yield store


def test_a_model_that_tuning_made_slower_is_compiled_as_predicted(store: Store) -> None:
    """What was measured is said, and the record that lost serves the model no more."""
    lab = Lab(store, {RECORDED: 7.73, PREDICTED: 7.51})
    lab.open()
    lab.drive()
    assert lab.refused() == {"w1": "c1"}
    assert lab.document["taken"] == PREDICTED
    assert lab.document["said"].startswith(
        "tuning found no speedup: with its records the model takes 1.03 times as long"
    )
    assert lab.document["latency_s"] == pytest.approx(7.51e-3, rel=0.01)
    assert (lab.document["board"], lab.document["threads"] > 0) == ("nano-1", True)


def test_a_model_that_tuning_made_faster_keeps_its_records(store: Store) -> None:
    """And the gain is over code without a trial."""
    lab = Lab(store, {RECORDED: 7.0, PREDICTED: 7.5})
    lab.open()
    lab.drive()
    assert lab.refused() == {}
    assert lab.document["said"] == "1.07 times as fast as the untuned prediction"


def test_a_record_that_loses_within_the_model_is_left_out_alone(store: Store) -> None:
    """Where the records of some functions lose, the mix without them is timed against both."""
    lab = Lab(store, {RECORDED: 7.5, PREDICTED: 7.5, "mixed 1": 8.0, "mixed 2": 7.0}, PARTS)
    lab.open()
    lab.drive()
    assert lab.document["taken"] == "mixed 2"
    assert lab.refused() == {"w2": "c2"}
    assert "without 1 of 2 records, which are slower within the model" in lab.document["said"]


def test_groups_that_lose_are_left_out_together(store: Store) -> None:
    """What remains is another program, which is timed against all before it is taken."""
    parts = (*PARTS, RecordPart("w3", "pool w3", "c3", 1e-4, True))
    latencies = {RECORDED: 8.0, PREDICTED: 7.9, "mixed 1": 7.7, "mixed 2": 7.6, "mixed 3": 8.6}
    lab = Lab(store, {**latencies, "mixed joined": 7.3}, parts)
    lab.open()
    lab.drive()
    assert (lab.document["taken"], lab.compiles) == ("mixed joined", 2)
    assert lab.refused() == {"w1": "c1", "w2": "c2"}
    assert "without 2 of 3 records" in lab.document["said"]


def test_on_a_real_board_functions_are_seen_within_the_model(store: Store) -> None:
    """Which records are left out is what each function takes there; the whole model, timed, has the last word."""
    parts = tuple(dataclasses.replace(part, function=f"f{part.workload}") for part in PARTS)
    lab = Lab(store, {RECORDED: 7.5, PREDICTED: 7.5, "mixed 1": 7.0}, parts)
    lab.layers_ms = {RECORDED: {"fw1_prepacked": 1.0, "fw2": 0.8}, PREDICTED: {"fw1": 1.5, "fw2": 0.6}}
    lab.open(order=ORDER.model_copy(update={"types": (ORDER.types[0].model_copy(update={"simulated": False}),)}))
    lab.drive()
    assert (lab.document["taken"], lab.refused(simulated=False)) == ("mixed 1", {"w2": "c2"})
    assert [(each["name"], round(each["value"], 2)) for each in lab.document["in_place"]] == [
        ("conv2d w1", 0.67),
        ("dense w2", 1.33),
    ]
    assert lab.compiles == 2


def test_records_that_are_what_was_predicted_gain_nothing(store: Store) -> None:
    """One code is timed once, and there is nothing to leave out."""
    lab = Lab(store, {RECORDED: 7.5, PREDICTED: 7.5}, (dataclasses.replace(PARTS[0], differs=False),))
    lab.open()
    lab.drive()
    assert lab.refused() == {}
    assert set(lab.asked) == {PREDICTED}
    assert "no schedule is known that is better than the predicted ones" in lab.document["said"]


def test_records_that_are_wrong_or_crash_are_not_taken(store: Store) -> None:
    """However fast: each alone was right on inputs of its own. The prediction is what runs."""
    lab = Lab(store, {RECORDED: 1.0, PREDICTED: 7.5})
    lab.outputs[RECORDED] = 1.5
    lab.open()
    lab.drive()
    assert lab.document["taken"] == PREDICTED
    assert lab.document["missing"][RECORDED].startswith("wrong_result")
    lab = Lab(store, {RECORDED: 1.0, PREDICTED: 7.5})
    lab.fault = lambda program, count: Status.CRASHED if program == RECORDED else Status.OK
    lab.open()
    lab.drive()
    assert (lab.document["taken"], lab.refused()) == (PREDICTED, {"w1": "c1"})


@pytest.mark.parametrize(("misses", "taken"), [(1, RECORDED), (99, PREDICTED)])
def test_a_program_may_miss_one_deadline(store: Store, misses: int, taken: str) -> None:
    """A run is made again after the first deadline that a program misses; at the second the program is out."""
    lab = Lab(store, {RECORDED: 1.0, PREDICTED: 7.5})
    left = iter(range(misses))
    lab.fault = lambda program, count: (
        Status.RUN_TIMEOUT if program == RECORDED and count > 2 and next(left, None) is not None else Status.OK
    )
    lab.open()
    lab.drive()
    assert lab.document["taken"] == taken


def test_what_is_a_boards_fault_is_tried_again_and_given_up_at_some_time(store: Store) -> None:
    """A fault that comes once changes nothing; one that stays ends the final, and nothing is decided."""
    lab = Lab(store, {RECORDED: 7.73, PREDICTED: 7.51})
    lab.fault = lambda program, count: Status.THROTTLED if count == 5 else Status.OK
    lab.open()
    lab.drive()
    assert lab.document["taken"] == PREDICTED
    lab.fault = lambda program, count: Status.THROTTLED
    lab.open(2)
    lab.drive()
    assert lab.document["taken"] is None
    assert "throttled" in lab.document["said"]
    assert store.decisions.fetch(campaign=2) == []


def test_a_board_that_is_taken_meanwhile_costs_nothing_but_time(store: Store) -> None:
    """Another one times it from the beginning."""
    lab = Lab(store, {RECORDED: 7.73, PREDICTED: 7.51})
    lab.open()
    lab.drive(most=12)
    assert lab.asked
    lab.work.close()
    lab.drive("nano-2")
    assert (lab.document["taken"], lab.document["board"]) == (PREDICTED, "nano-2")


def test_a_final_without_a_board_or_a_model_ends(store: Store) -> None:
    """After ten minutes, with the reason; the campaign's records are what is compiled."""
    lab = Lab(store, {})
    lab.open()
    lab.drive(None)
    assert lab.finals.done
    assert "no board was free for it within 600 s" in lab.document["said"]
    assert store.decisions.fetch() == []


def test_a_model_that_is_gone_is_not_timed(store: Store) -> None:
    """Its file was removed since it was ordered."""
    lab = Lab(store, {})
    lab.error = UsageError("the model that the campaign tuned is needed: no such file")
    lab.open()
    lab.drive()
    assert "no such file" in lab.document["said"]


def test_what_was_decided_before_a_restart_is_not_decided_again(store: Store) -> None:
    """The decision is in the store; a final that was under way begins anew."""
    lab = Lab(store, {RECORDED: 7.73, PREDICTED: 7.51})
    lab.open()
    lab.drive(most=12)
    lab.open()
    lab.drive()
    compiles, before = lab.compiles, lab.document
    assert compiles == 2
    lab.open()
    assert lab.finals.done
    assert lab.document == before
    lab.open(2)
    assert not lab.finals.done


def test_a_slow_model_runs_less_often(store: Store) -> None:
    """One that takes seconds is timed in every round, once."""
    lab = Lab(store, {RECORDED: 7730.0, PREDICTED: 7510.0})
    lab.open()
    lab.drive()
    predicted = lab.document["variants"][PREDICTED]
    assert (predicted["count"], predicted["first_s"], predicted["bytes"]) == (8, 15.02, len(PREDICTED))
    assert predicted["peak_memory_bytes"] == 1 << 20


def test_the_time_that_is_left_counts_down_and_is_never_nothing(store: Store) -> None:
    """Two models at one point: expected from their functions, then at the pace of the first, until both are timed."""
    models = (*ORDER.models, make_model("tiny-mlp"))
    of_type = ORDER.types[0]
    more = (
        *of_type.workloads,
        WorkloadOrder(hash="w2", name="dense w2", kind="dense", flop=1e6, weight=1.0, models=("tiny-mlp",), calls=(1,)),
    )
    order = ORDER.model_copy(update={"models": models, "types": (of_type.model_copy(update={"workloads": more}),)})
    lab = Lab(store, {RECORDED: 1.0, PREDICTED: 2.0})
    lab.open(order=order)
    assert lab.finals.count == (0, 2)
    first_s = lab.finals.left_s
    assert first_s == pytest.approx(2 * estimate_final_s(1))
    seen = [first_s]
    while not lab.finals.done:
        lab.now_s += 1.0
        lab.drive(most=1)
        seen.append(lab.finals.left_s)
    assert lab.finals.count == (2, 2)
    assert seen[1] < first_s
    assert min(seen[:-1]) > 0
    assert seen[-1] == 0
