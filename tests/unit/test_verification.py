"""Winners found on made-up boards: who gets a record, on what evidence, and what faults and restarts do to it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import shutil
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from device_agent.protocol import FaultSide, OperatingPoint, Outcome, Status
from farm.campaign.verify.programs import RecordKey, Replay
from farm.campaign.verify.verification import Verification
from farm.crew.held_board import Ended
from farm.errors import InternalError
from farm.measure.arrays import make_inputs
from farm.search.codegen.build_pool import BuildResult
from farm.search.families.family import MARK
from farm.selection.rounds import SECOND_BOARD_WAIT_S, Contest
from farm.selection.tie import TieRule
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Order, WorkloadOrder
from farm.values import DEFAULT_POINT, UNTUNED, WINNER_TRIAL, Record, Trial
from tests.stored_workloads import make_record, make_workload
from tests.unit import campaign_orders
from tests.unit.asked_work import AskedWork, BuildAsked, MeasureAsked, ReplayAsked, RunAsked

NANO = "jetson-nano"
KEY = RecordKey(NANO, "w1", DEFAULT_POINT)
MAXN = "power_mode=MAXN"
SAMPLES = 3
FOUR = {"a": 1.2e-3, "b": 1.0e-3, "c": 1.1e-3, "d": 2e-3}


def make_order(verify_top: int = 3, points: tuple[str, ...] = (DEFAULT_POINT,), repeat_alone: bool = True) -> Order:
    work = WorkloadOrder(hash="w1", name="conv2d w1", kind="conv2d", flop=1e6, weight=1, models=("mlp",), calls=(1,))
    of_type = campaign_orders.make_type(NANO, (work,), points={point: OperatingPoint(point) for point in points})
    changes = {"min_repeat_s": 0.0, "verify_top": verify_top, "repeat_alone": repeat_alone}
    return campaign_orders.make_order(
        models=(), types=(of_type,), measure=campaign_orders.MEASURE.model_copy(update=changes)
    )


def trace_of(candidate: str, planned: bool = False) -> str:
    """In the form of MetaSchedule's tuning records; `planned`: by a family."""
    return json.dumps([candidate, MARK if planned else None, None, [["TENSOR", "float32", [1, 2]]]])


@dataclasses.dataclass
class Rack:
    """Made-up boards and compilers that answer a verification, one measurement at a time per board.

    `latency_s` is what candidates really take; `boards` are factors to it. `fault` may spoil what a board measures,
    `run_fault` what it runs: they get board, candidate and how many answers came before.
    """

    store: Store
    latency_s: dict[str, float]
    order: Order = dataclasses.field(default_factory=make_order)
    boards: dict[str, float] = dataclasses.field(default_factory=lambda: {"nano-1": 1.0, "nano-2": 1.0})
    factor: Callable[[str, str], float] = lambda board, candidate: 1.0
    fault: Callable[[str, str, int], Status | None] = lambda board, candidate, count: None
    run_fault: Callable[[str, str, int], Status | None] = lambda board, candidate, count: None
    build_fault: Callable[[str], Status] = lambda candidate: Status.OK
    wrong: Container[str] = ()
    planned: bool = False  # whether candidates are a family's
    # What unscheduled code takes in its one run, and where it takes part.
    untuned_s: float = 1.0
    noise: float = 0.005

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(11)
        self.seen: list[Any] = []
        self.now_s = 0.0
        self.answers = 0
        self.queues: dict[str, deque[Any]] = {}
        self.work = AskedWork()
        self.campaign = 0

    def search(self, candidates: Iterable[str]) -> None:
        """Submit a campaign whose search found these at all points; it is the one that is verified from now on."""
        workload = make_workload("w1", module_json="reference", board_type=NANO)
        order = self.order.model_copy(update={"name": f"after-{self.campaign}"})
        self.campaign = self.store.campaigns.submit(order, "farm campaign run vision.yaml", [workload])
        for candidate, point in itertools.product(candidates, order.types[0].points):
            self.add_trial(candidate, trace_of(candidate, self.planned), point=point)

    def add_trial(self, candidate: str, trace_json: str, *, board: str = "nano-1", point: str = DEFAULT_POINT) -> None:
        outcome = Outcome(Status.OK, latency_s=(self.latency_s[candidate],), board=board, simulated=True)
        self.store.trials.add(Trial(self.campaign, "w1", candidate, point, 1, outcome, trace_json, board_type=NANO))

    def open(self, **given: Any) -> Verification:
        self.work = AskedWork()
        verification = Verification(self.campaign, self.order, self.store, Settings(), self.work, **given)
        verification.expect({NANO: len(self.boards)})
        self.queues = {}
        return verification

    def settle(self, candidates: Iterable[str], **given: Any) -> Verification:
        """Search, and verify to the end."""
        self.search(candidates)
        verification = self.open(**given)
        assert self.drive(verification)
        return verification

    def drive(self, verification: Verification, stop_after: float = math.inf) -> bool:
        """Answer until it is done, or so many answers were given; whether it is done."""
        for _ in range(2000):
            for board in self.boards:
                if board not in self.queues and verification.wants().get(NANO, 0) > len(self.queues.keys() - {""}):
                    verification.give(board, NANO, True)
                    self.queues[board] = deque()
            for request in self.step(verification):
                self.seen.append(request)
                board = request.board if isinstance(request, RunAsked | MeasureAsked) else ""
                self.queues.setdefault(board, deque()).append(request)
            if verification.done:
                return True
            busy = [queue for queue in self.queues.values() if queue]
            if not busy:
                self.now_s += 10.0
            for queue in busy:
                if self.answers >= stop_after:
                    return False
                self.answers += 1
                self.answer(verification, queue.popleft())
        pytest.fail("the verification does not end")

    def step(self, verification: Verification) -> list[Any]:
        """Have it go on, and return what it asks for."""
        verification.step(self.now_s)
        return self.work.take()

    def take(self, verification: Verification, board: str) -> None:
        """Take a board back: it answers no more."""
        verification.take(board)
        self.work.new = [each for each in self.work.new if getattr(each, "board", "") != board]

    def answer(self, verification: Verification, request: Any) -> None:
        if isinstance(request, ReplayAsked):
            request.answer.set_result(Replay(json.loads(request.trace_json)[0] if request.trace_json else UNTUNED))
        elif isinstance(request, BuildAsked):
            status = self.build_fault(request.module_json)
            library = request.module_json.encode() if status is Status.OK else None
            request.answer.set_result(BuildResult(status, "", library, request.module_json))
        else:
            candidate = (request.program if isinstance(request, RunAsked) else request.library).decode()
            fault = self.run_fault if isinstance(request, RunAsked) else self.fault
            status = fault(request.board, candidate, self.answers) or Status.OK
            good = status is Status.OK
            if isinstance(request, RunAsked):
                outputs = {"out": np.array([1.0 if candidate in self.wrong else 0.0])} if good else {}
                outcome = Outcome(status, latency_s=(self.untuned_s,) if good else (), simulated=True)
                request.answer.set_result(Ended(outcome, 0.1, outputs))
                return
            taken_s = self.untuned_s if candidate == UNTUNED else self.latency_s[candidate]
            latency_s = taken_s * self.boards[request.board] * self.factor(request.board, candidate)
            samples = tuple(latency_s * math.exp(self.rng.normal(0, self.noise)) for _ in range(SAMPLES))
            outcome = Outcome(status, latency_s=samples if good else (), board=request.board, simulated=True)
            request.answer.set_result(Ended(outcome, 0.1))

    def record(self, point: str = DEFAULT_POINT) -> Record | None:
        found = self.store.records.fetch(board_type=NANO, operating_point=point, simulated=None)
        return found[0] if found else None

    def evidence(self) -> dict[str, Any]:
        return dict(self.record().evidence)

    def winner_trials(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.store.trials.fetch(self.campaign, purpose=WINNER_TRIAL)]

    def events(self) -> Counter[str]:
        return Counter(event.kind for event in self.store.events.fetch())


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("store") / "farm.sqlite"
    Store(path).close()
    return path


@pytest.fixture
def store(empty: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Store]:
    with Store(pathlib.Path(shutil.copy(empty, tmp_path / "farm.sqlite"))) as store:
        yield store


@pytest.fixture
def rack(store: Store) -> Rack:
    return Rack(store, dict(FOUR))


def find_reason(verification: Verification, key: RecordKey) -> str:
    """Return why a task has no record."""
    [found] = [each for each in verification.verdict["undecided"] if {**each, **key._asdict()} == each]
    return str(found["reason"])


def test_the_fastest_becomes_a_record_with_evidence(rack: Rack) -> None:
    """The best three are checked and measured in turns on two boards; the record says by how much it won, and where."""
    verification = rack.settle(FOUR)
    record = rack.record()
    assert (record.candidate, record.max_abs_error) == ("b", 0.0)
    assert record.median_s == pytest.approx(1e-3, rel=0.01)
    evidence = rack.evidence()
    assert (evidence["campaign"], evidence["decided"]) == (rack.campaign, "parted")
    assert set(evidence["boards"]) == {"nano-1", "nano-2"}
    assert [rival["candidate"] for rival in evidence["rivals"]] == ["c", "a"]
    for rival, truth in zip(evidence["rivals"], (1.1, 1.2), strict=True):
        assert 1.0 < rival["low"] < truth < rival["high"]
    verdict = verification.verdict
    assert [verdict[name] for name in ("tasks", "over", "records", "ties")] == [1, 1, 1, 0]
    json.dumps(verdict)
    assert {row["candidate"] for row in rack.winner_trials()} == {"a", "b", "c"}


@pytest.mark.parametrize("trials", [1, 8, 40, 64])
def test_winners_take_a_share_of_the_budget(store: Store, trials: int) -> None:
    """Half of what the search had, and four measurements where that is less; what is left is known at all times, and
    never less than what comes.
    """
    world = Rack(store, FOUR, noise=0.05)
    world.search(FOUR)
    verification = world.open(trials=trials)
    _, most = verification.left
    assert most <= max(trials / 2, 4)
    while not world.drive(verification, stop_after=world.answers + 1):
        _, left = verification.left
        assert verification.measured + left <= most
    assert len(world.winner_trials()) == verification.measured <= most
    assert verification.left == (0, 0)
    assert world.record() is not None


def test_a_winner_that_is_slower_than_untuned_code_is_not_taken(store: Store) -> None:
    """Untuned code that may be as fast is measured beside the candidates; where it leads there is no record."""
    rack = Rack(store, FOUR, untuned_s=0.9e-3)
    verification = rack.settle(FOUR)
    assert rack.record() is None
    [undecided] = verification.verdict["undecided"]
    assert "untuned code is at least as fast" in undecided["reason"]
    assert UNTUNED in {row["candidate"] for row in rack.winner_trials()}
    # It is no candidate of a later search.
    assert UNTUNED not in {
        row.candidate for row in store.trials.fetch_known_candidates("w1", NANO, DEFAULT_POINT, True)
    }


def test_untuned_code_that_is_slower_is_a_rival_as_others(store: Store) -> None:
    """Twice as slow: it takes part and loses, and the record says by how much."""
    rack = Rack(store, FOUR, untuned_s=2e-3)
    rack.settle(FOUR)
    rivals = {rival["candidate"]: rival for rival in rack.evidence()["rivals"]}
    assert rack.evidence()["decided"] == "parted"
    assert rivals[UNTUNED]["ratio"] == pytest.approx(2.0, rel=0.05)


def test_the_best_alone_is_checked_and_believed(store: Store) -> None:
    """Where an order says so, one candidate without a rival is not measured again: its trial is the evidence."""
    rack = Rack(store, FOUR, make_order(verify_top=1, repeat_alone=False))
    rack.settle("bacd")
    record = rack.record()
    assert (record.candidate, record.median_s) == ("b", 1e-3)
    assert rack.winner_trials() == []
    assert sum(isinstance(request, RunAsked) for request in rack.seen) == 2
    evidence = rack.evidence()
    assert (evidence["decided"], evidence["rounds"]) == ("alone", 0)
    assert evidence["boards"] == {"nano-1": {"median_s": 1e-3, "latency_s": [1e-3]}}


def test_a_plan_that_no_trial_beats_is_checked_only(store: Store) -> None:
    """Its trial counts where the best one's is faster by less than the advantage: no contest would change it."""
    rack = Rack(store, FOUR | {"c": 1.04e-3}, make_order(verify_top=1, repeat_alone=False), planned=True)
    rack.settle("cbad")
    assert (rack.record().candidate, rack.evidence()["decided"]) == ("c", "alone")
    assert rack.winner_trials() == []


def test_the_best_alone_has_to_beat_what_was_tried_first(store: Store) -> None:
    """What a workload is compiled to without a record is tried first: where its trial was unlucky, it wins later."""
    rack = Rack(store, FOUR | {"a": 4e-3}, make_order(verify_top=1, repeat_alone=False), planned=True)
    rack.search(FOUR)
    rack.latency_s["a"] = 0.9e-3
    assert rack.drive(rack.open())
    assert rack.record().candidate == "a"
    assert {row["candidate"] for row in rack.winner_trials()} == {"a", "b"}


@pytest.mark.parametrize("repeat_alone", [True, False])
@pytest.mark.parametrize(
    ("verify_top", "first_s", "expected"), [(1, 1.03e-3, "c"), (3, 1.03e-3, "c"), (3, 1.08e-3, "b")]
)
def test_a_plan_that_was_tried_first_is_kept_unless_another_is_faster_by_a_twentieth(
    store: Store, verify_top: int, first_s: float, expected: str, repeat_alone: bool
) -> None:
    """However clearly the other one leads: alone it differs from what it is in its model by as much."""
    rack = Rack(store, {"c": 1.2e-3, "b": 1.0e-3}, make_order(verify_top=verify_top, repeat_alone=repeat_alone))
    rack.planned = True
    rack.search("cb")
    rack.latency_s["c"], rack.noise = first_s, 0.001
    assert rack.drive(verification := rack.open())
    record, evidence = rack.record(), rack.evidence()
    assert record.candidate == expected
    assert record.median_s == pytest.approx(rack.latency_s[expected], rel=0.01)
    assert evidence["leader"] == "b"
    assert verification.verdict["ties"] == 0
    (rival,) = evidence["rivals"]
    if expected == "c":
        assert (evidence["decided"], evidence["advantage"]) == ("kept", 0.05)
        assert (rival["candidate"], rival["verdict"]) == ("b", "faster")
        assert rival["ratio"] == pytest.approx(1 / 1.03, abs=0.01)
    else:
        assert (evidence["decided"], rival["candidate"], rival["verdict"]) == ("parted", "c", "slower")


def test_what_no_family_planned_has_no_advantage(store: Store) -> None:
    """The first of drawn schedules is no more than the others: without a record the workload runs untuned code."""
    rack = Rack(store, {"c": 1.2e-3, "b": 1.0e-3})
    rack.search("cb")
    rack.latency_s["c"], rack.noise = 1.03e-3, 0.001
    assert rack.drive(rack.open())
    assert (rack.evidence()["leader"], rack.evidence()["decided"]) == ("b", "parted")


def test_the_first_is_kept_beside_those_that_are_slower_still(store: Store) -> None:
    """Ratios are to what has the record, also of those that lost to the leader, and the leader is named with it."""
    latency_s = {"a": 1.03e-3, "b": 1.0e-3, "c": 1.0005e-3, "d": 1.2e-3}
    rack = Rack(store, latency_s, make_order(verify_top=4), planned=True, noise=0.001)
    verification = rack.settle("abcd")
    evidence = rack.evidence()
    assert (evidence["decided"], verification.verdict["ties"]) == ("kept", 0)
    verdicts = {rival["candidate"]: (rival["verdict"], rival["ratio"]) for rival in evidence["rivals"]}
    for name, verdict in (("b", "faster"), ("c", "faster"), ("d", "slower")):
        assert verdicts[name] == (verdict, pytest.approx(latency_s[name] / latency_s["a"], rel=0.01))


def test_a_first_that_lost_before_others_failed_is_not_compared_with_who_came_later(store: Store) -> None:
    """It lost; then those who beat it turn out to crash, and a spare, never measured beside it, takes the field."""
    rack = Rack(store, {"a": 1.05e-3, "b": 1.0e-3, "c": 1.01e-3, "d": 1.06e-3}, planned=True, noise=0.08)
    rack.search("abcd")
    rack.latency_s["a"] = 2e-3
    asked = Counter[str]()

    def crash_late(board: str, candidate: str, count: int) -> Status | None:
        asked[candidate] += 1
        return Status.CRASHED if candidate in "bc" and asked[candidate] > 5 else None

    rack.fault = crash_late
    assert rack.drive(rack.open())
    assert rack.record().candidate == "d"
    assert {row["candidate"] for row in rack.winner_trials()} == set("abcd")
    assert rack.evidence()["decided"] == "parted"


@pytest.mark.parametrize("stop_after", range(8, 16))
def test_a_restart_changes_nobodys_rival(store: Store, stop_after: int) -> None:
    """Who was measured beside what was tried first goes on; a candidate that now seems faster does not join."""
    rack = Rack(store, dict(FOUR), make_order(verify_top=1, repeat_alone=False), planned=True)
    rack.search(FOUR)
    rack.latency_s["b"] = 1.3e-3
    rack.drive(rack.open(), stop_after)
    assert rack.drive(rack.open())
    assert rack.record().candidate == "a"
    assert {row["candidate"] for row in rack.winner_trials()} == {"a", "b"}


def test_the_best_alone_is_measured_beside_what_may_be_as_fast(store: Store) -> None:
    """Untuned code that may be as fast, and the record that a candidate seems to beat, are rivals all the same."""
    rack = Rack(store, FOUR | {"e": 0.5e-3, "f": 1.5e-3}, make_order(verify_top=1, repeat_alone=False))
    rack.untuned_s = 0.9e-3
    verification = rack.settle(FOUR)
    assert rack.record() is None
    assert verification.verdict["untuned"] == 1
    assert {row["candidate"] for row in rack.winner_trials()} == {"b", UNTUNED}

    rack.untuned_s = 1.0
    rack.settle(FOUR)
    rack.settle("ef")
    assert rack.record().candidate == "e"
    assert {row["candidate"] for row in rack.winner_trials()} == {"b", "e"}


def test_a_record_that_nothing_beats_costs_the_best_alone_nothing(store: Store) -> None:
    """Slower candidates are neither built nor run where a single one would take part."""
    rack = Rack(store, FOUR, make_order(verify_top=1, repeat_alone=False))
    rack.settle("b")
    rack.seen.clear()
    verification = rack.settle("acd")
    assert (rack.seen, verification.verdict["held"]) == ([], 1)


def test_a_host_that_is_the_board_prepares_or_measures(store: Store) -> None:
    """Nothing is replayed or built while anything runs on it, and the same record comes of it."""
    rack = Rack(store, FOUR, make_order(points=(DEFAULT_POINT, MAXN)), {"here": 1.0}, untuned_s=2e-3)
    rack.search(FOUR)
    verification = rack.open(rests=True)
    while not rack.drive(verification, stop_after=rack.answers + 1):
        open_ = {isinstance(each, ReplayAsked | BuildAsked) for queue in rack.queues.values() for each in queue}
        assert len(open_) < 2
    assert rack.record().candidate == "b"


def test_rounds_alternate_and_rotate(store: Store) -> None:
    """In a round each candidate is measured once on one board, and each is first, second and third equally often."""
    rack = Rack(store, dict.fromkeys("abc", 1e-3), noise=0.05)
    rack.settle("abc")
    orders: dict[int, list[str]] = {}
    for row in rack.winner_trials():
        orders.setdefault(row["attempt"], []).append(row["candidate"])
    assert sorted(orders) == list(range(1, 17))
    assert all(sorted(order) == ["a", "b", "c"] for order in orders.values())
    first = Counter(order[0] for order in orders.values())
    assert max(first.values()) - min(first.values()) <= 1
    boards = Counter(row["board"] for row in rack.winner_trials())
    assert set(boards.values()) == {24}


def test_a_wrong_candidate_is_rejected_and_the_next_one_tried(store: Store) -> None:
    """A schedule that computes something else is written down as wrong and takes part no more; it is not timed."""
    rack = Rack(store, FOUR, wrong={"b"})
    verification = rack.settle(FOUR)
    assert rack.record().candidate == "c"
    (wrong,) = [row for row in rack.winner_trials() if row["status"] == Status.WRONG_RESULT]
    assert (wrong["candidate"], wrong["fault_side"]) == ("b", "candidate")
    assert verification.verdict["rejected"] == 1
    assert rack.events()["wrong_result"] == 1
    assert {"d", "c", "a"} == {row["candidate"] for row in rack.winner_trials()} - {"b"}
    known = store.trials.fetch_known_candidates("w1", NANO, DEFAULT_POINT, True)
    assert [row.median_s for row in known if row.candidate == "b"] == [None]


def test_a_tie_goes_to_the_least_and_says_so(store: Store) -> None:
    """Candidates within the band are a tie, and the record names who it tied with."""
    rack = Rack(store, {"a": 1.002e-3, "b": 1.0e-3}, noise=0.002)
    verification = rack.settle("ab")
    evidence = rack.evidence()
    assert evidence["decided"] == "tie"
    assert evidence["rivals"][0]["verdict"] == "tied"
    assert verification.verdict["ties"] == 1


def test_a_record_stays_unless_it_is_beaten(store: Store) -> None:
    """The holder of a record takes part: what only seems faster does not replace it, what is faster does."""
    rack = Rack(store, {"old": 1e-3, "x": 0.999e-3, "y": 0.9e-3}, noise=0.002)
    rack.settle(["old"])
    assert rack.evidence()["decided"] == "alone"
    again = rack.settle(["x"])
    record = rack.record()
    assert (record.candidate, rack.evidence()["held"]) == ("old", True)
    (rival,) = rack.evidence()["rivals"]
    assert (rival["candidate"], rival["verdict"]) == ("x", "tied")
    assert rival["low"] < 0.999 < rival["high"]
    assert [again.verdict[name] for name in ("records", "held", "ties")] == [0, 1, 1]
    rack.settle(["y"])
    assert rack.record().candidate == "y"
    assert rack.evidence()["replaced"]["candidate"] == "old"


def test_nothing_new_costs_nothing(rack: Rack) -> None:
    """A campaign that found nothing that the holder was not compared with measures nothing, and the record stays."""
    rack.settle(FOUR)
    rack.settle(["d"])
    rack.seen.clear()
    third = rack.settle([])
    assert rack.seen == []
    assert third.verdict["held"] == 1


def test_what_only_a_liar_measured_takes_part_if_it_could_be_the_best(store: Store) -> None:
    """A candidate that a drifting board made look too slow for the best three is measured again, and wins."""
    seemed = {"a": 1.2e-3, "b": 1.0e-3, "c": 1.1e-3, "d": 1.3e-3, "e": 9e-3}
    rack = Rack(store, seemed)
    rack.search(("d", "e"))
    store.trials.add_doubt("nano-1", 0, "it was slow")
    for name in "abc":
        rack.add_trial(name, trace_of(name), board="nano-2")
    rack.latency_s = {**seemed, "d": 0.9e-3}
    assert rack.drive(rack.open())
    assert rack.record().candidate == "d"
    assert {row["candidate"] for row in rack.winner_trials()} == {"a", "b", "c", "d"}


def test_boards_that_contradict_each_other_are_named(store: Store) -> None:
    """What is clearly faster on one board and clearly slower on the other is said in the evidence and in an event."""
    rack = Rack(store, {"a": 1e-3, "b": 1e-3})
    rack.factor = lambda board, candidate: 1.1 if (board == "nano-1") == (candidate == "a") else 1.0
    verification = rack.settle("ab")
    (said,) = rack.evidence()["contradictions"]
    assert "nano-1" in said
    assert "nano-2" in said
    assert rack.events()["boards_disagree"] == 1
    assert len(verification.verdict["contradictions"]) == 1


@pytest.mark.parametrize(("expected", "waits"), [(1, False), (2, True)])
def test_one_board_does(store: Store, expected: int, waits: bool) -> None:
    """Where a type has one board alone, that one decides, and the evidence names no other. Half of the rounds are kept
    for a board that is expected; where it does not come in ten minutes the first one does them too.
    """
    rack = Rack(store, FOUR, boards={"nano-1": 1.0})
    rack.search(FOUR)
    verification = rack.open()
    verification.expect({NANO: expected})
    assert rack.drive(verification)
    assert (rack.now_s >= SECOND_BOARD_WAIT_S) == waits
    assert list(rack.evidence()["boards"]) == ["nano-1"]


def test_a_board_that_goes_is_replaced(store: Store) -> None:
    """A round whose board is taken away is measured anew elsewhere, and late answers of that board change nothing."""
    rack = Rack(store, FOUR, boards={"nano-1": 1.0, "nano-2": 1.0, "nano-3": 1.0})
    rack.search(FOUR)
    verification = rack.open()
    late: list[Any] = []
    for stop_after in (22, 26, 30, 34):
        if rack.drive(verification, stop_after):
            break
        gone = next((name for name, queue in rack.queues.items() if name and queue), None)
        if gone is not None:
            late += (queue := rack.queues.pop(gone))
            rack.take(verification, gone)
            rows = len(rack.winner_trials())
            for request in queue:
                rack.answer(verification, request)
            assert len(rack.winner_trials()) == rows
    assert late
    assert rack.drive(verification)
    assert rack.evidence()["decided"] == "parted"
    assert rack.record().candidate == "b"


def test_what_a_board_answered_before_it_went_counts(rack: Rack) -> None:
    """Also where both are heard of at once; what it was doing then is wanted of no board."""
    rack.search(FOUR)
    verification = rack.open()
    while not any(isinstance(each, MeasureAsked) for each in rack.queues.get("nano-1", ())):
        rack.drive(verification, rack.answers + 1)
        rack.drive(verification, rack.answers)  # what is wanted after that answer, and nothing answered
    before = len(rack.winner_trials())
    for request in rack.queues.pop("nano-1"):
        rack.answer(verification, request)
    rack.take(verification, "nano-1")
    assert len(rack.winner_trials()) > before
    assert "nano-1" not in {getattr(each, "board", "") for each in rack.step(verification)}


def test_boards_that_go_together_get_nothing_more(rack: Rack) -> None:
    """None of them is asked for anything while it is still taken for one that is here."""
    rack.search(FOUR)
    verification = rack.open()
    while {type(queue[0]) for queue in rack.queues.values() if queue} != {MeasureAsked}:
        rack.drive(verification, rack.answers + 1)
    for request in [*rack.queues["nano-1"], *rack.queues["nano-2"]]:
        rack.answer(verification, request)
    measure, lent = rack.work.measure, []
    rack.work.measure = lambda board, *about: (lent.append(board in verification.boards), measure(board, *about))[1]
    verification.take("nano-1", "nano-2")
    assert lent
    assert not any(lent)


@pytest.mark.parametrize("status", [Status.THROTTLED, Status.BOARD_LOST, Status.FARM_ERROR])
def test_faults_that_are_no_candidates_repeat_the_round(rack: Rack, status: Status) -> None:
    """Every fifth answer of one board is a fault: its rounds are repeated, and the winner is the same."""
    rack.fault = lambda board, candidate, count: status if board == "nano-1" and count % 5 == 0 else None
    rack.run_fault = lambda board, candidate, count: status if board == "nano-1" and count % 3 == 0 else None
    rack.settle(FOUR)
    assert rack.record().candidate == "b"
    assert any(row["status"] == status for row in rack.winner_trials())


def test_a_task_whose_boards_only_fail_ends_without_a_winner(store: Store) -> None:
    """Where every measurement is spoilt it ends after a bounded number of rounds, says why, and writes no record."""
    rack = Rack(store, FOUR, fault=lambda board, candidate, count: Status.THROTTLED)
    verification = rack.settle(FOUR)
    assert rack.record() is None
    assert "spoilt" in find_reason(verification, KEY)
    assert rack.events()["no_winner"] == 1
    assert len(rack.winner_trials()) <= 20


@pytest.mark.parametrize(
    ("status", "said"), [(Status.CRASHED, ""), (Status.BOARD_LOST, "3 boards went down")], ids=["crashes", "board_lost"]
)
def test_a_candidate_that_fails_is_out(rack: Rack, status: Status, said: str) -> None:
    """A fault of the candidate's own while it is measured again, or the third board that is lost under it, leaves
    the others to decide: what waited behind it is not blamed, and the evidence names it.
    """
    rack.fault = lambda board, candidate, count: status if candidate == "b" else None
    rack.settle(FOUR)
    assert rack.record().candidate == "c"
    (failed,) = rack.evidence()["failed"]
    assert failed["candidate"] == "b"
    assert said in failed["reason"]


@pytest.mark.parametrize(("misses", "winner"), [(1, "b"), (99, "c")])
def test_a_candidate_may_miss_one_deadline(rack: Rack, misses: int, winner: str) -> None:
    """One missed deadline spoils its round, which is measured again; the second puts the candidate out."""
    left = iter(range(misses))
    rack.fault = lambda board, candidate, count: (
        Status.RUN_TIMEOUT if candidate == "b" and next(left, None) is not None else None
    )
    rack.run_fault = lambda board, candidate, count: None
    rack.search(FOUR)
    # A restart in the middle changes nothing.
    assert not rack.drive(rack.open(), 20)
    assert rack.drive(rack.open())
    assert rack.record().candidate == winner


def test_without_a_reference_there_is_no_winner(store: Store) -> None:
    """Where the unscheduled function does not run, nothing can be checked, and the task says so."""
    rack = Rack(store, FOUR, run_fault=lambda board, candidate, count: Status.RUN_TIMEOUT)
    verification = rack.settle(FOUR)
    assert rack.record() is None
    assert "unscheduled" in find_reason(verification, KEY)


@pytest.mark.parametrize("slow", ["reference", "b"])
def test_a_slow_host_costs_no_winner(rack: Rack, slow: str) -> None:
    """One missed deadline of a build and one of a run are farm faults: they are counted, and the winner is the same."""
    faults: Counter[FaultSide] = Counter()
    missed = {Status.BUILD_TIMEOUT, Status.RUN_TIMEOUT}

    def miss_once(status: Status, candidate: str) -> Status:
        if candidate != slow or status not in missed:
            return Status.OK
        missed.discard(status)
        return status

    rack.build_fault = lambda candidate: miss_once(Status.BUILD_TIMEOUT, candidate)
    rack.run_fault = lambda board, candidate, count: miss_once(Status.RUN_TIMEOUT, candidate)
    rack.settle(FOUR, count_fault=lambda side: faults.update([side]))
    assert rack.record().candidate == "b"
    assert faults == {FaultSide.FARM: 2}
    assert rack.events()["winner_retried"] == 2


def test_points_share_programs(store: Store) -> None:
    """A candidate that is good at two operating points is built and checked once, and measured at each."""
    rack = Rack(store, FOUR, make_order(points=(DEFAULT_POINT, MAXN)))
    rack.settle(FOUR)
    assert sum(isinstance(request, RunAsked) for request in rack.seen) == 4
    assert sum(isinstance(request, BuildAsked) for request in rack.seen) == 7
    assert [rack.record(point).candidate for point in (DEFAULT_POINT, MAXN)] == ["b", "b"]


def test_clocks_are_changed_as_seldom_as_can_be(store: Store) -> None:
    """A board goes on with tasks at the point that it holds, as long as there are any."""
    rack = Rack(
        store, dict.fromkeys("abc", 1e-3), make_order(points=(DEFAULT_POINT, MAXN, "power_mode=5W")), noise=0.05
    )
    rack.settle("abc")
    for board in rack.boards:
        points = [each.point for each in rack.seen if isinstance(each, MeasureAsked) and each.board == board]
        assert len(points) == 3 * 8 * 3
        assert sum(one != other for one, other in itertools.pairwise(points)) <= 6


@pytest.mark.parametrize("stop_after", range(1, 80, 9))
def test_a_restart_measures_nothing_again(store: Store, stop_after: int) -> None:
    """Whenever the engine is killed, the next one goes on with the rounds that are in the store, to the same end."""
    rack = Rack(store, FOUR, make_order(points=(DEFAULT_POINT, MAXN)), wrong={"c"})
    rack.search(FOUR)
    first = rack.open()
    was_done = rack.drive(first, stop_after)
    before = {row["id"] for row in rack.winner_trials()}
    rack.seen.clear()
    second = rack.open()
    assert rack.drive(second)
    assert [rack.record(point).candidate for point in (DEFAULT_POINT, MAXN)] == ["b", "b"]
    rows = rack.winner_trials()
    assert before <= {row["id"] for row in rows}
    assert len({(row["operating_point"], row["candidate"], row["attempt"]) for row in rows}) == len(rows)
    # Four rounds of three at each point would do; a restart may cost each board the round that it was in.
    timed = [row for row in rows if row["median_s"] is not None]
    assert len(timed) <= 2 * 4 * 3 + 2 * 2 * 3
    assert second.verdict["rejected"] == 1
    if was_done:
        assert rack.seen == []


def test_a_search_that_dies_is_asked_again(store: Store) -> None:
    """What could not be asked is asked again, and given up in the end, by no one's fault."""
    rack = Rack(store, {"a": 1e-3})
    rack.search("a")
    verification = rack.open()
    for _ in range(10):
        for request in rack.step(verification):
            if isinstance(request, ReplayAsked):
                request.answer.set_result(Replay(None, "the search was restarted", lost=True))
            elif isinstance(request, BuildAsked):
                rack.answer(verification, request)
    assert verification.done
    assert "failed 4 times" in find_reason(verification, KEY)


def test_a_real_board_cannot_join_simulated_ones(rack: Rack) -> None:
    """Simulated and real measurements never meet in one decision."""
    rack.search(FOUR)
    verification = rack.open()
    with pytest.raises(InternalError, match="real"):
        verification.give("nano-9", NANO, False)


def test_a_board_that_spoils_rounds_is_left_out(store: Store) -> None:
    """A board on which every measurement is throttled gets two rounds, another one does the rest."""
    rack = Rack(store, FOUR, boards={"nano-1": 1.0, "nano-2": 1.0, "nano-3": 1.0})
    rack.fault = lambda board, candidate, count: Status.THROTTLED if board == "nano-2" else None
    rack.settle(FOUR)
    assert set(rack.evidence()["boards"]) == {"nano-1", "nano-3"}
    spoilt = [row for row in rack.winner_trials() if row["board"] == "nano-2"]
    assert len({row["attempt"] for row in spoilt}) == 2


def test_boards_that_all_spoil_rounds_end_it(store: Store) -> None:
    """Where a third board is expected and never comes, two that spoil every round are given up in bounded time."""
    rack = Rack(store, FOUR, fault=lambda board, candidate, count: Status.THROTTLED)
    rack.search(FOUR)
    verification = rack.open()
    verification.expect({NANO: 3})
    assert rack.drive(verification)
    assert "spoilt" in find_reason(verification, KEY)
    assert rack.now_s <= 2 * SECOND_BOARD_WAIT_S


def test_a_trace_that_cannot_be_read_puts_its_candidate_out(store: Store) -> None:
    """What an older farm wrote differently ends no engine: the next best is tried."""
    rack = Rack(store, FOUR, make_order(verify_top=1))
    rack.search("ac")
    rack.add_trial("b", '["b"]')
    assert rack.drive(rack.open())
    assert rack.record().candidate == "c"


def test_a_round_ends_with_the_last_of_its_candidates(store: Store) -> None:
    """Where the only one that is left of a round goes out elsewhere, the round is over and its board free."""
    rack = Rack(store, dict.fromkeys("abc", 1e-3))
    rack.search("abc")
    verification = rack.open()
    while {type(queue[0]) for queue in rack.queues.values() if queue} != {MeasureAsked}:
        rack.drive(verification, rack.answers + 1)
        rack.drive(verification, rack.answers)  # what is wanted after that answer, and nothing answered
    one, other = rack.queues.pop("nano-1"), rack.queues.pop("nano-2")
    (last,) = set("abc") - {request.library.decode() for request in one if isinstance(request, MeasureAsked)}
    rack.fault = lambda board, candidate, count: Status.CRASHED if candidate == last else None
    after: list[Any] = []
    for request in (*other, *one):
        rack.answer(verification, request)
        after += rack.step(verification)
    measured = [(each.board, each.library.decode()) for each in after if isinstance(each, MeasureAsked)]
    assert {board for board, _ in measured} == {"nano-1", "nano-2"}
    assert last not in {candidate for _, candidate in measured}


def test_a_round_that_ended_early_counts_for_those_it_has() -> None:
    """What was measured before the last candidate went out is a round of the others."""
    contest = Contest(0, TieRule())
    contest.enter(["a", "b", "c"])
    one, other = (contest.begin(board, 0.0, {"nano-1", "nano-2"}, 2) for board in ("nano-1", "nano-2"))
    assert other is not None
    for candidate in (one.left.pop(0), one.left.pop(0)):
        contest.on_measured(one, candidate, Status.OK, "", 1e-3)
    contest.on_measured(other, one.left[0], Status.CRASHED, "signal", None)
    assert one.left == []
    contest.end(one)
    assert contest.missing == 2


def test_a_board_that_did_its_share_is_not_waited_with() -> None:
    """Where the second board has left, a third one is wanted beside the first, which could only wait for it."""
    contest = Contest(0, TieRule())
    contest.enter(["a", "b"])
    for board in ("nano-1", "nano-1", "nano-2"):
        run = contest.begin(board, 0.0, {"nano-1", "nano-2"}, 5)
        assert run is not None
        for candidate in run.left:
            contest.on_measured(run, candidate, Status.OK, "", 1e-3)
        contest.end(run)
    assert contest.missing == 1
    assert contest.begin("nano-1", 0.0, {"nano-1"}, 5) is None
    assert contest.count_wanted({"nano-1"}, 5) == 2
    assert contest.begin("nano-3", 0.0, {"nano-1", "nano-3"}, 5) is not None


def test_a_record_from_elsewhere_only_gives_way_to_what_is_faster(rack: Rack) -> None:
    """A record that another process wrote meanwhile, with a candidate that did not take part, is not overwritten."""
    rack.search(FOUR)
    verification = rack.open()
    assert not rack.drive(verification, 25)
    theirs = make_record(0.5e-3, "z", simulated=True, trace_json=trace_of("z"))
    assert rack.store.records.save(theirs)
    assert rack.drive(verification)
    assert rack.record().candidate == "z"
    assert verification.verdict["held"] == 1


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_it_ends_and_every_trial_is_written_once(store: Store, seed: int) -> None:
    """Under random faults, boards that come and go, and restarts, a verification ends with a true winner or none."""
    rng = np.random.default_rng(seed)
    rack = Rack(store, FOUR, make_order(points=(DEFAULT_POINT, MAXN)), {f"nano-{n}": 1 + 0.1 * n for n in range(4)})
    faults = (Status.THROTTLED, Status.BOARD_LOST, Status.FARM_ERROR)

    def fault(board: str, candidate: str, count: int) -> Status | None:
        if candidate in "acd" and rng.random() < 0.03:
            return Status.CRASHED
        return faults[int(rng.integers(3))] if rng.random() < 0.08 else None

    rack.fault = rack.run_fault = fault
    rack.search(FOUR)
    verification = rack.open()
    while not rack.drive(verification, rack.answers + int(rng.integers(1, 15))):
        held = sorted(rack.queues.keys() - {""})
        if rng.random() < 0.2:
            verification = rack.open()
        elif held:
            gone = held[int(rng.integers(len(held)))]
            del rack.queues[gone]
            rack.take(verification, gone)
    rows = rack.winner_trials()
    assert len({(row["operating_point"], row["candidate"], row["attempt"]) for row in rows}) == len(rows)
    verdict = verification.verdict
    assert verdict["over"] == verdict["tasks"] == 2
    for point in (DEFAULT_POINT, MAXN):
        record = rack.record(point)
        if record is None:
            assert find_reason(verification, RecordKey(NANO, "w1", point))
        elif not {each["candidate"] for each in (record.evidence or {})["failed"]} & {"b"}:
            assert record.candidate == "b"


def test_values_that_may_be_indices_stay_within_what_they_index() -> None:
    """A table of three rows and a number without dimensions that says which: never beyond the third."""
    for seed in range(8):
        table, index, _ = make_inputs([((3, 8), "float32"), ((), "int64"), ((8,), "float32")], seed).values()
        assert table.shape == (3, 8)
        assert index.shape == ()
        assert 0 <= int(index) < 3
