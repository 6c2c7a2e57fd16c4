"""A campaign from its order and rows of the store to the scheduler and commands: pure parts of the engine."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from device_agent.protocol import OperatingPoint
from farm.campaign.engine.active import Active, to_measure_spec
from farm.campaign.engine.orders import to_search_budget
from farm.campaign.engine.progress import fill_in, find_latencies, sum_latencies, to_campaign, to_progress, to_rows
from farm.campaign.plan_estimate import CHECK_S, leave_search_s, list_final_s
from farm.campaign.scheduler import events
from farm.campaign.scheduler.fleet import ON_BOARD, READY, FleetState
from farm.campaign.scheduler.state import Job
from farm.report import campaign_rows
from farm.search.tuners.decisions import Candidate
from farm.store.campaign_rows import CandidateKey
from farm.store.totals import CountedTrial
from farm.types.campaigns import Budget, Order, WorkloadOrder
from tests.unit.campaign_orders import MEASURE, SEARCH, make_model, make_type
from tests.unit.campaign_orders import make_order as make_campaign_order
from tests.unit.fleet_campaigns import Hands, name_candidates

CONV = WorkloadOrder(hash="c1", name="conv2d 3x3", kind="conv2d", flop=2e6, weight=5.0, models=("a", "b"), calls=(2, 3))
DENSE = WorkloadOrder(hash="d1", name="matmul 8>8", kind="dense", flop=1e3, weight=1.0, models=("b",), calls=(1,))
CANDIDATE = Candidate("c1", "x", (((1, 8), "float32"),), "{}", "{}")
SLOW = OperatingPoint(cpu_freq_hz={"*": 102_000_000})


def make_order(**changes: object) -> Order:
    points = {"default": OperatingPoint(), "*=102MHz": SLOW}
    fields: dict[str, object] = {
        "owner": "me",
        "models": (make_model("a"), make_model("b", 4)),
        "types": (
            make_type("nano", (CONV, DENSE), threads=4, pipeline="nhwc", points=points),
            make_type("tx2", (CONV,), pipeline="nhwc"),
        ),
        "budget": Budget(trials=10),
        "search": SEARCH.model_copy(update={"early_stopping": 7, "seed": 3}),
        "measure": MEASURE.model_copy(update={"verify_top": 2}),
        "labels": {"rack": "a"},
    }
    return make_campaign_order("vision", **(fields | changes))


def row(median_s: float | None, workload: str = "c1", board_type: str = "nano", point: str = "default") -> CountedTrial:
    return CountedTrial(board_type, workload, point, median_s)


def begin(rows: list[CountedTrial] | None = None, order: Order | None = None) -> tuple[Active, FleetState]:
    order = order or make_order()
    campaign, fleet = to_campaign(order, order.budget, rows or [], 12.0), Hands().state
    fleet.now_s = 100.0
    events.add_campaign(fleet, campaign, 30.0)
    return Active(1, campaign), fleet


def test_orders_and_tasks_are_kept() -> None:
    """What comes back from the store's JSON equals what was put there. Tasks are workloads x types x points, as far as
    types have them; the scheduler opens the same.
    """
    order = make_order()
    assert Order.model_validate_json(order.model_dump_json()) == order
    active, _ = begin()
    keys = [task.key[1:] for task in active.campaign.tasks]
    points = ("default", "*=102MHz")
    assert keys == [*((w, "nano", point) for point in points for w in ("c1", "d1")), ("c1", "tx2", "default")]


def test_a_campaign_goes_on_from_its_counted_trials() -> None:
    """Counts, bests and trials since the best come from the rows in their order; used budgets are carried over."""
    active, _ = begin([row(0.5), row(None), row(0.25), row(0.3), row(None, "d1")])
    campaign = active.campaign
    conv, dense, *_ = campaign.tasks
    assert (conv.counted, conv.best_s, conv.since_best) == (4, 0.25, 1)
    assert (dense.counted, dense.best_s, dense.since_best) == (1, None, 1)
    assert (campaign.counted, campaign.board_s, campaign.began_s) == (5, 12.0, 70.0)


def test_progress_tells_models_apart() -> None:
    """A model's latency is the sum over its own calls; it is not known while one of its workloads has no good trial."""
    active, _ = begin([row(0.5), row(0.1, "d1"), row(0.2, board_type="tx2")])
    progress = to_progress(active, [], "running", 130.0)
    latencies = {(each["name"], each["board_type"], each["point"]): each["latency_s"] for each in progress["models"]}
    assert latencies["a", "nano", "default"] == pytest.approx(1.0)
    assert latencies["b", "nano", "default"] == pytest.approx(1.6)
    assert latencies["b", "nano", "*=102MHz"] is None  # predictions hold where no clocks are set
    assert latencies["a", "tx2", "default"] == pytest.approx(0.4)
    assert find_latencies(active.order, progress["tasks"]) == progress["models"]
    assert sum_latencies(progress["tasks"]) == pytest.approx({"nano@default": 2.6, "tx2@default": 1.0})
    assert progress["wall_clock_s"] == pytest.approx(60.0)


def test_a_model_is_told_before_its_trials_are_made() -> None:
    """What has no good trial counts by its prediction, and so many are marked; nothing is known of other clocks."""
    order = make_order()
    workloads = tuple(each.model_copy(update={"predicted_s": 0.5}) for each in order.types[0].workloads)
    known = order.types[0].model_copy(update={"workloads": workloads})
    order = make_order(types=(known, *order.types[1:]))
    active, _ = begin([row(0.1, "d1")], order=order)
    progress = to_progress(active, [], "running", 130.0)
    found = {(each["name"], each["board_type"], each["point"]): each for each in progress["models"]}
    assert found["b", "nano", "default"]["latency_s"] == pytest.approx(3 * 0.5 + 0.1)
    assert (found["b", "nano", "default"]["predicted"], found["b", "nano", "default"]["workloads"]) == (1, 2)
    assert found["b", "nano", "*=102MHz"]["latency_s"] is None
    lines = list(campaign_rows.summary(progress, Budget()))
    assert any("b ~1.6e+03 ms on nano @ default (sum of its workloads, 1 of 2 predicted)" in line for line in lines)
    drawn = io.StringIO()
    Console(file=drawn, width=120).print(campaign_rows.draw("vision", "running", "", Budget(), progress))
    assert "sum ~2,600,000.0" in drawn.getvalue()


def test_what_flop_count_is_said_where_it_is_not_what_is_computed() -> None:
    """Winograd's GFLOPS may exceed a core's peak, padded channels count: the table of a campaign says so, no other."""
    for name, said in (
        ("winograd4_conv2d 3x3 14x14x64>64", "FLOP are those of the direct algorithm"),
        ("conv2d_strided_slice 1x1 16x16x40>24", "include what it cuts off"),
        ("conv2d 3x3", ""),
    ):
        order = make_order()
        workloads = (CONV.model_copy(update={"name": name}),)
        kinds = [each.model_copy(update={"workloads": workloads}) for each in order.types]
        active, _ = begin([], order=make_order(types=tuple(kinds)))
        drawn = io.StringIO()
        progress = to_progress(active, [], "running", 130.0)
        Console(file=drawn, width=300).print(campaign_rows.draw("vision", "finished", "", Budget(), progress))
        assert said in drawn.getvalue()
        assert bool(said) is bool(re.search("FLOP (are|of)", drawn.getvalue()))


def test_measuring_winners_is_part_of_the_time_that_is_left() -> None:
    """Before the search is over, by what its trials took, with checks and finals; then as the verification says."""
    active, _ = begin([row(0.5)] * 5)
    # Five of ten trials in 60 s; then five tasks take four measurements each, of 2.4 s, on two boards.
    boards = [{"board": "n-1"}, {"board": "n-2"}]
    finals_s = sum(list_final_s(active.order))
    assert len(list(list_final_s(active.order))) == 6  # two models at two points of a nano and one of a TX2
    expected_s = 60 + 5 * 4 * 2.4 / 2 + 5 * CHECK_S + finals_s
    assert to_progress(active, boards, "running", 130.0)["eta_s"] == pytest.approx(expected_s)
    assert active.trial_s == pytest.approx(2.4)
    winners = {"measured": 3, "at_most": 20, "eta_s": 99.0, "timed": 1, "models": 6, "timing": True}
    progress = to_progress(active, boards, "verifying", 130.0, winners)
    assert progress["eta_s"] == 99.0
    line = campaign_rows.summary_line("vision", "verifying", "", Budget(), progress)
    assert "winners measured 3 times, at most 20 | models compiled and timed 1/6 |" in line


def test_starting_up_is_no_part_of_the_pace() -> None:
    """One trial after 40 s and five more in the next 20 s: the four that are left take 16 s."""
    active, _ = begin([row(0.5)])
    to_progress(active, [], "running", 110.0)
    active.campaign = begin([row(0.5)] * 6)[0].campaign
    winners_s = 5 * 4 * 2.0  # five tasks, four measurements of each, 12 s for six trials
    after_s = 5 * CHECK_S + sum(list_final_s(active.order))
    assert to_progress(active, [], "running", 130.0)["eta_s"] == pytest.approx(16 + winners_s + after_s)


@pytest.mark.parametrize("limit_s", [320.0, 480.0, 7200.0])
def test_a_wall_clock_leaves_time_for_winners_and_models(limit_s: float) -> None:
    """The search ends so early that what follows is expected to end within the limit, and so does the time left say."""
    order = make_order(budget=Budget(wall_clock_s=limit_s))
    search_s = leave_search_s(order, limit_s)
    assert search_s is not None
    after_s = 5 * CHECK_S + sum(list_final_s(order))
    assert search_s + max(search_s / 2, 5 * 4 * 0.56) + after_s == pytest.approx(limit_s)
    budget = to_search_budget(order.budget, order)
    progress = to_progress(begin(order=make_order(budget=budget))[0], [], "running", 80.0)
    assert after_s < progress["eta_s"] <= limit_s - progress["wall_clock_s"]
    line = campaign_rows.summary_line("v", "running", "", order.budget, progress)
    assert f"/{campaign_rows.format_clock(limit_s)}, trials end at {campaign_rows.format_clock(search_s)} |" in line


def test_winners_keep_their_part_of_time_and_boards() -> None:
    """A limit too short for winners and models is passed, and the line says by how much and why. Of limited board-hours
    the search gets what measuring its winners leaves.
    """
    assert leave_search_s(make_order(), 60.0) == pytest.approx(20.0)
    line = campaign_rows.summary_line("v", "verifying", "", Budget(wall_clock_s=60.0), {"wall_clock_s": 95.0})
    assert "| time 1:35/1:00, 0:35 over: winners and models are measured to their end |" in line
    whole = to_search_budget(Budget(trials=9, board_s=3600.0), make_order())
    assert (whole.trials, whole.board_s) == (9, 2400.0)


def test_progress_outlives_the_search() -> None:
    """Once a campaign is over for the scheduler, its tasks are still told, with what came after the last telling."""
    active, fleet = begin([row(0.5)])
    to_progress(active, [], "running", 130.0)
    conv = active.campaign.tasks[0]
    for number, latency_s in enumerate((0.25, None)):
        fleet.jobs[number] = Job(number, conv, CANDIDATE, ON_BOARD, 0.0)
        fleet.count(fleet.jobs[number], latency_s)
    fleet.end_search(conv, "its budget is spent")
    events.cancel(fleet, "vision")
    progress = to_progress(active, [], "done", 150.0)
    assert [task["counted"] for task in progress["tasks"]] == [3, 0, 0, 0, 0]
    assert (progress["tasks"][0]["best_s"], progress["tasks"][0]["ended"]) == (0.25, "its budget is spent")


def test_progress_of_a_campaign_that_had_ended_before_a_restart() -> None:
    """An engine that has only winners left to find tells tasks as the store has them."""
    order = make_order()
    rows = to_rows(to_campaign(order, order.budget, [row(0.5), row(None)]))
    assert [(task["counted"], task["best_s"]) for task in rows[:2]] == [(2, 0.5), (0, None)]


def test_what_took_boards_down_stays_banned() -> None:
    """A candidate that an engine had banned is measured no more by the next one, however often it is proposed."""
    order = make_order(labels={}, types=make_order().types[1:])
    breakers = [CandidateKey("tx2", "c1", "default", "breaker")]
    hands = Hands()
    hands.tell(events.add_campaign, to_campaign(order, order.budget, [], breakers=breakers))
    hands.boards("n", board_type="tx2")
    acts = hands.tell(events.proposed, hands.searches.popitem()[0], name_candidates("breaker", "other"))
    assert [act.candidate for act in acts if act.kind == "drop"] == ["breaker"]
    assert [act.candidate for act in acts if act.kind == "build"] == ["other"]


def test_history_is_bounded() -> None:
    """The curve keeps its ends and its order, and no more than a few hundred points of any number of trials."""
    active, _ = begin()
    for counted in range(1, 5000):
        active.note_history(counted, {"nano@default": 1.0 / counted})
    numbers = [number for number, _ in active.history]
    assert numbers == sorted(numbers)
    assert len(numbers) <= 200
    assert numbers[-1] > 4900


def test_the_time_out_follows_the_best() -> None:
    """A task with a fast best gives its candidates less than the campaign's limit, and never more."""
    job = Job(1, begin()[0].campaign.tasks[0], CANDIDATE, READY, 0.0)
    first, later = to_measure_spec(job, None), to_measure_spec(job, 1e-4)
    assert first.limits.timeout_s == 10.0
    assert later.limits.timeout_s < 10.0
    assert (first.limits.threads, first.repeat, first.arguments[0].shape) == (4, 3, (1, 8))


def test_a_task_without_a_trial_has_the_time_of_its_record() -> None:
    """A model's total needs every task; once winners were measured again their records say more than the best trial."""
    key = ("jetson-nano", "default", "w1")

    def fill(best_s: float | None, recorded: dict[tuple[str, str, str], float], decided: bool) -> tuple[object, str]:
        row = {"board_type": "jetson-nano", "point": "default", "workload": "w1", "best_s": best_s}
        fill_in([row], recorded, decided=decided)
        return row["best_s"], str(row["from"])

    assert fill(None, {key: 2e-3}, False) == (2e-3, "record")
    assert fill(1e-3, {key: 2e-3}, False) == (1e-3, "trial")
    assert fill(1e-3, {key: 2e-3}, True) == (2e-3, "record")
    assert fill(None, {}, True) == (None, "trial")
