"""What the fleet's scheduler decides: one fact after another, over fleets whose answers are given by hand."""

from __future__ import annotations

import itertools

import pytest

from device_agent.protocol import FaultSide, OperatingPoint
from farm.campaign.engine import progress
from farm.campaign.scheduler import events
from farm.campaign.scheduler.state import Status
from farm.errors import UsageError
from farm.store.totals import CountedTrial
from farm.types.campaigns import Budget
from tests.unit.campaign_orders import make_type
from tests.unit.fleet_campaigns import Hands, campaign, name_candidates, workload


def fleet(*boards: str, **settings: object) -> Hands:
    hands = Hands(*boards, **settings).add()
    hands.supply()
    return hands


# From search to board


def test_work_reaches_every_board_and_no_more_than_it_can_take() -> None:
    """Each board gets one candidate to run and one that waits, and no more. However long boards take, no more is
    searched and built than they can have before long. Never more builds at once than there are builders.
    """
    hands = fleet("a", "b")
    assert [(m.board, m.waits) for m in hands.of("measure")] == [("a", False), ("b", False), ("a", True), ("b", True)]
    hands = fleet("a", batch=4, max_ahead=3.0)
    lane = hands.state.lanes[0]
    assert 1 <= lane.ahead <= 2 * 4
    assert not hands.searches
    hands = Hands(*"abcdef", builders=2).add()
    while hands.searches and len(hands.state.jobs) < 4:
        hands.propose(next(iter(hands.searches)))
    assert len(hands.builds) == 2
    hands.build(next(iter(hands.builds)))
    assert len(hands.builds) == 2


def test_a_campaign_ends_with_its_trials() -> None:
    """Exactly as many trials count as the budget says, and then the campaign says why it ended."""
    hands = fleet("a", "b", "c")
    assert hands.finish() == 100
    assert hands.status() is Status.FINISHED
    assert "100 trials" in hands.state.campaigns["vision"].reason
    assert not hands.measures


def test_a_type_of_few_boards_gets_its_first_trials() -> None:
    """However much quicker the boards of another type are, each workload of each type has one of a small budget."""
    hands = Hands(*"abcdef")
    hands.boards("slow", board_type="tx2")
    hands.add(workloads=6, board_types=("nano", "tx2"), budget=Budget(trials=16))
    hands.supply()
    while quick := [each for each in hands.running() if each.board != "slow"]:
        hands.measure(quick[0].assignment)
        hands.supply()
    hands.finish()
    counts = [(count.task.board_type, count.task.workload) for count in hands.of("count")]
    assert len(counts) == 16
    assert len(set(counts)) == 12


def test_no_trial_is_kept_for_boards_that_are_gone() -> None:
    """A type without boards does not delay the campaign's other trials."""
    hands = Hands("a")
    hands.add(workloads=6, board_types=("nano", "tx2"), budget=Budget(trials=16))
    assert hands.finish() == 16


def test_what_promises_more_is_searched_more() -> None:
    """Of two workloads of which one weighs a hundred times the other, the heavy one gets most trials."""
    hands = Hands("a")
    workloads = (workload("light", "dense"), workload("heavy", weight=100.0))
    hands.add(types=(make_type("nano", workloads),), budget=Budget(trials=60))
    hands.finish()
    counts = [count.task.workload for count in hands.of("count")]
    assert counts.count("heavy") > 2 * counts.count("light") > 0


def test_a_workload_has_a_budget_of_its_own() -> None:
    """No workload counts more trials than `per_workload`, and the campaign ends when all have them."""
    hands = Hands("a", "b").add(budget=Budget(per_workload=6))
    hands.finish()
    assert [count.task.workload for count in hands.of("count")].count("vision-w0") == 6
    assert len(hands.of("count")) == 12
    assert hands.status() is Status.FINISHED


def test_an_exhausted_space_ends_a_workload() -> None:
    """When searches have nothing more, what they proposed is measured and the campaign ends."""
    hands = Hands("a").add()
    while hands.searches:
        hands.propose(next(iter(hands.searches)), count=1, exhausted=True)
    assert hands.finish() == 2
    assert len(hands.ended()) == 2
    assert hands.state.campaigns["vision"].reason == "all its workloads have ended"


def test_a_search_that_keeps_failing_is_asked_no_more() -> None:
    """A workload ends when its search failed three times in a row; the campaign goes on without it."""
    hands = Hands("a").add(workloads=1)
    while hands.searches:
        hands.tell(events.search_failed, hands.searches.popitem()[0], "its process died")
    assert hands.ended() == ["its search failed 3 times: its process died"]
    assert hands.status() is Status.FINISHED


def test_a_search_that_answers_again_is_forgiven() -> None:
    """Late answers of killed work, any number of them, end nothing."""
    hands = Hands("a").add(workloads=1, budget=Budget(trials=12))
    while hands.status() is not Status.FINISHED:
        for _ in range(2 if hands.searches else 0):
            hands.tell(events.search_failed, hands.searches.popitem()[0])
        hands.supply()
        hands.measure(hands.running()[0].assignment)
    assert not hands.ended()
    assert len(hands.of("count")) == 12


# Faults


def test_a_fault_of_the_candidate_counts() -> None:
    """A candidate that fails by its own fault is a trial, without a latency, and is not tried again. A candidate that
    does not compile is a trial that cost no board time.
    """
    hands = fleet("a", "b")
    first = hands.running()[0]
    hands.measure(first.assignment, FaultSide.CANDIDATE)
    (count,) = hands.of("count")
    assert (count.candidate, count.latency_s) == (first.candidate, None)
    assert sum(m.job == first.job for m in hands.of("measure")) == 1
    hands = Hands("a").add()
    hands.propose(next(iter(hands.searches)))
    hands.build(next(iter(hands.builds)), FaultSide.CANDIDATE)
    assert len(hands.of("count")) == 1
    assert hands.state.campaigns["vision"].board_s == 0.0


def test_a_board_fault_sends_the_candidate_elsewhere() -> None:
    """The same candidate is measured on another board, and first of all. Where there is no other board, the one that
    failed is tried again.
    """
    hands = fleet("a", "b")
    first = hands.running()[0]
    hands.measure(first.assignment, FaultSide.BOARD)
    hands.measure(next(m for m in hands.running() if m.board != first.board).assignment)
    again = [m for m in hands.of("measure") if m.job == first.job]
    assert [m.board for m in again] == ["a", "b"]
    assert not any(count.job == first.job for count in hands.of("count"))
    hands = fleet("a")
    first = hands.running()[0]
    hands.measure(first.assignment, FaultSide.BOARD)
    hands.measure(hands.running()[0].assignment)
    assert sum(m.job == first.job for m in hands.of("measure")) == 2


def test_an_idle_board_that_failed_does_not_keep_the_next_one_from_work() -> None:
    """Of two idle boards the first must not have the candidate, so that the second one gets it."""
    hands = Hands("a", "b").add(workloads=1, budget=Budget(trials=2))
    hands.supply()
    hands.tell(events.pause, "vision")
    failed, good = sorted(hands.running(), key=lambda m: m.board)
    hands.measure(failed.assignment, FaultSide.BOARD)
    hands.measure(good.assignment)
    hands.tell(events.resume, "vision")
    assert [(m.job, m.board) for m in hands.running()] == [(failed.job, "b")]


def test_a_candidate_that_took_two_boards_down_is_banned() -> None:
    """After the second lost board no board gets the candidate, not even if a search proposes it again."""
    hands = Hands("a", "b", "c").add(workloads=1)
    hands.supply()
    first = hands.running()[0]
    hands.measure(first.assignment, FaultSide.BOARD)
    hands.tell(events.leave, first.board)
    while not any(m.job == first.job for m in hands.running()):
        hands.measure(hands.running()[0].assignment)
    hands.measure(next(m for m in hands.running() if m.job == first.job).assignment, FaultSide.BOARD)
    (ban,) = (drop for drop in hands.of("drop") if drop.banned)
    assert ban.candidate == first.candidate
    while not hands.searches:
        hands.measure(hands.running()[0].assignment)
    request = hands.searches.popitem()[0]
    acts = hands.tell(events.proposed, request, name_candidates(first.candidate, "another"))
    assert [act.candidate for act in acts if act.kind == "drop"] == [first.candidate]


def test_attempts_are_bounded() -> None:
    """A candidate whose samples stay bad is given up, and its place goes back to the budget."""
    hands = fleet("a", max_attempts=3)
    first = hands.running()[0]
    attempts = 0
    while not hands.of("drop"):
        now = hands.running()[0]
        attempts += now.job == first.job
        hands.measure(now.assignment, FaultSide.SAMPLE if now.job == first.job else None)
    assert attempts == 3
    assert hands.finish() == 100


def test_a_sample_is_taken_again_on_another_board() -> None:
    """A board whose samples stay bad costs no candidate its place while others are there, and loses it none."""
    hands = fleet("hot", "b", max_attempts=2, max_losses=1, max_faults_in_a_row=1000)
    while hands.measures:
        now = hands.running()[0]
        hands.measure(now.assignment, FaultSide.SAMPLE if now.board == "hot" else None)
        hands.supply()
    assert not hands.of("drop")
    assert len(hands.of("count")) == 100


def test_a_campaign_in_which_nothing_works_is_paused() -> None:
    """After so many faults in a row of which no candidate is guilty, the campaign waits for an operator."""
    hands = fleet("a", max_faults_in_a_row=5)
    for _ in range(5):
        hands.measure(hands.running()[0].assignment, FaultSide.FARM)
    assert hands.status() is Status.PAUSED
    assert "5 trials in a row" in hands.state.campaigns["vision"].reason
    hands.tell(events.resume, "vision")
    assert hands.finish() == 100


def test_one_broken_board_does_not_pause_a_campaign() -> None:
    """Where only one of many boards fails, the others go on; faults before the last good trial are forgotten."""
    hands = fleet("a", "b", "c", "d", max_faults_in_a_row=5, max_attempts=50, max_losses=50)
    for board in "bcd":
        hands.measure(next(m for m in hands.running() if m.board == board).assignment, FaultSide.SAMPLE)
    hands.measure(hands.running()[0].assignment)
    for _ in range(8):
        hands.measure(next(m for m in hands.running() if m.board == "a").assignment, FaultSide.SAMPLE)
    assert hands.status() is Status.RUNNING


# Stragglers and boards without work


def test_a_straggler_is_doubled_and_counts_once() -> None:
    """What takes far too long is given to an idle board too; the first result counts, the other one is late."""
    hands = Hands("a", "b", straggler_min_s=10.0).add(workloads=1, budget=Budget(trials=4))
    hands.supply()
    slow = next(m for m in hands.running() if m.board == "a")
    while len(hands.measures) > 1:
        hands.measure(next(m for m in hands.running() if m.board == "b").assignment)
    for _ in range(2):
        hands.tell(after_s=10.0)
    twin = next(m for m in hands.running() if m.board == "b")
    assert twin.job == slow.job
    hands.measure(twin.assignment)
    assert [r.assignment for r in hands.of("revoke")][-1] == slow.assignment
    assert hands.tell(events.measured, slow.assignment, None, 60.0, 1e-3) == []
    assert len(hands.of("count")) == 4


# Clocks and shares


def test_boards_keep_their_clocks() -> None:
    """Two operating points on two boards: after the first candidates, each board stays where its clocks are."""
    hands = Hands(switch_s=5.0)
    hands.boards("a", point="default")
    hands.boards("b", point="maxn")
    hands.add(points=("default", "maxn"), budget=Budget(trials=200))
    hands.finish()
    for board in ("a", "b"):
        points = [m.task.point for m in hands.of("measure") if m.board == board]
        assert sum(one != other for one, other in itertools.pairwise(points)) <= 4


def test_a_point_without_a_board_of_its_own_is_not_starved() -> None:
    """One board, two operating points: both get about half of the trials, with few changes between them."""
    hands = Hands("a", switch_s=5.0)
    hands.add(points=("default", "maxn"), budget=Budget(trials=80))
    hands.finish()
    points = [count.task.point for count in hands.of("count")]
    assert 24 <= points.count("maxn") <= 56
    changes = sum(one != other for one, other in itertools.pairwise(points))
    assert 1 <= changes <= 30


def test_owners_share_by_board_time_not_by_trials() -> None:
    """An owner whose measurements take three times as long gets a third of the trials."""
    hands = Hands("a", "b", "c")
    for name in ("slow", "fast"):
        hands.add(name, budget=Budget(trials=400))
    hands.supply()
    for _ in range(300):
        now = hands.running()[0]
        hands.measure(now.assignment, board_s=6.0 if now.task.campaign == "slow" else 2.0)
        hands.supply()
    used = hands.state.owner_board_s
    assert used["owner of slow"] == pytest.approx(used["owner of fast"], rel=0.1)


def test_an_owner_gets_no_more_by_more_campaigns() -> None:
    """Three campaigns of one owner and one of another: half the board time each."""
    hands = Hands("a", "b")
    for name, owner in (("one", "x"), ("two", "x"), ("three", "x"), ("four", "y")):
        hands.add(name, owner=owner, budget=Budget(trials=400))
    hands.finish(200)
    assert hands.state.owner_board_s["x"] == pytest.approx(hands.state.owner_board_s["y"], rel=0.1)


def test_priority_is_a_share_and_starves_nobody() -> None:
    """Two priorities higher is four times the trials of the same owner's other campaign, which goes on all the same."""
    hands = Hands("a", "b").add("high", owner="x", priority=2, budget=Budget(trials=400))
    hands.add("low", owner="x", budget=Budget(trials=400))
    hands.finish(200)
    counted = {name: entry.counted for name, entry in hands.state.campaigns.items()}
    assert counted["high"] == pytest.approx(4 * counted["low"], rel=0.2)


@pytest.mark.parametrize(("there_before", "credit_s"), [(False, 10_000.0), (True, 10.0)])
def test_who_was_away_does_not_take_the_fleet(there_before: bool, credit_s: float) -> None:
    """Who joins after an hour, or was paused for it, shares from then on, and hardly makes up for the time before."""
    hands = Hands("a", "b", credit_s=credit_s)
    for name in ("first", "second") if there_before else ("first",):
        hands.add(name, budget=Budget(trials=1000))
    hands.supply()
    if there_before:
        hands.tell(events.pause, "second")
    hands.finish(100, board_s=36.0)
    back = (events.resume, "second") if there_before else (events.add_campaign, campaign("second"))
    hands.tell(*back)
    before = hands.state.campaigns["first"].counted
    hands.finish(60, board_s=36.0)
    assert 20 <= hands.state.campaigns["first"].counted - before <= 40


# Boards that come and go


def test_labels_keep_campaigns_to_their_boards() -> None:
    """A campaign that asks for a label only gets boards that have it."""
    hands = Hands("a", "b")
    hands.boards("c", labels=frozenset({"rack=a", "fan=yes"}))
    hands.add(labels={"rack": "a"})
    hands.supply()
    assert {m.board for m in hands.of("measure")} == {"c"}


def test_without_boards_a_campaign_waits_and_says_so() -> None:
    """When the last board leaves, the campaign waits; when one comes, it goes on and nothing was lost."""
    hands = fleet("a", "b")
    hands.tell(events.leave, "a")
    hands.tell(events.leave, "b")
    assert hands.status() is Status.WAITING
    assert hands.state.campaigns["vision"].reason == "no board of type nano is here"
    hands.supply()
    hands.boards("c")
    assert hands.status() is Status.RUNNING
    assert hands.finish() == 100
    assert not any(drop.banned for drop in hands.of("drop"))


# Budgets and orders


def test_a_board_that_yields_ends_its_trial_and_gets_no_other() -> None:
    """What it measures counts there; what waited at it goes elsewhere, and nothing comes instead until it has left."""
    hands = fleet("a", "b")
    running, waiting = (m for m in hands.of("measure") if m.board == "a")
    hands.tell(events.yield_board, "a")
    assert [revoked.assignment for revoked in hands.of("revoke")] == [waiting.assignment]
    hands.measure(running.assignment)
    assert [count.job for count in hands.of("count")] == [running.job]
    hands.supply()
    assert not [m for m in hands.measures.values() if m.board == "a"]
    hands.tell(events.leave, "a")
    hands.boards("a")
    assert [m for m in hands.measures.values() if m.board == "a"]
    assert hands.finish() == 100


def test_an_operator_changes_a_priority() -> None:
    """From then on the campaign's part of its owner's boards is another."""
    hands = Hands("a").add()
    hands.tell(events.change_priority, "vision", 2)
    assert hands.state.campaigns["vision"].weight == 4


def test_the_wall_clock_ends_a_campaign_and_pauses_do_not_count() -> None:
    """It ends at that time and not before; a pause moves it."""
    hands = Hands("a").add(budget=Budget(wall_clock_s=100.0))
    hands.supply()
    hands.tell(events.pause, "vision", after_s=40.0)
    hands.tell(events.resume, "vision", after_s=1000.0)
    hands.tell(after_s=59.0)
    assert hands.status() is Status.RUNNING
    hands.tell(after_s=1.0)
    assert hands.status() is Status.FINISHED
    assert not hands.measures


def test_a_paused_campaign_gets_nothing_new_and_loses_nothing() -> None:
    """What boards measure ends and counts; what waited goes on after the pause."""
    hands = fleet("a", "b")
    hands.tell(events.pause, "vision")
    assert len(hands.measures) == 2
    for now in hands.running():
        hands.measure(now.assignment)
    assert not hands.measures
    assert len(hands.of("count")) == 2
    hands.tell(events.resume, "vision")
    assert hands.finish() == 100


def test_budgets_are_changed_under_way() -> None:
    """When the budget shrinks below what is under way, the youngest work is given back and the rest counts. Trials
    added while it runs are made. A budget that allows nothing is an error that says what to do.
    """
    hands = fleet("a", "b")
    hands.measure(hands.running()[0].assignment)
    hands.tell(events.change_budget, "vision", Budget(trials=3))
    assert hands.finish() == 3
    assert hands.status() is Status.FINISHED
    hands = fleet("a")
    hands.tell(events.change_budget, "vision", Budget(trials=120))
    assert hands.finish() == 120
    with pytest.raises(UsageError, match="allows nothing"):
        Budget(trials=0)


def test_early_stopping_ends_a_workload_then_the_campaign() -> None:
    """A workload that gets no better is searched no further, and when all have stopped the campaign ends. No better
    candidate of any workload in so many trials, and the campaign ends.
    """
    hands = Hands("a").add(early_stopping=5)
    hands.finish()
    assert len(hands.ended()) == 2
    assert 12 <= len(hands.of("count")) <= 20
    assert hands.status() is Status.FINISHED
    hands = Hands("a").add(early_stopping_all=9)
    hands.finish()
    assert "no better candidate in 9 trials" in hands.state.campaigns["vision"].reason


def test_a_cancelled_campaign_leaves_nothing() -> None:
    """Its boards are free at once, late answers change nothing, and its name may be used again."""
    hands = fleet("a", "b")
    measures, searches = dict(hands.measures), dict(hands.searches)
    hands.tell(events.cancel, "vision")
    assert not hands.measures
    assert (len(hands.state.jobs), len(hands.state.assignments), len(hands.state.lanes)) == (0, 0, 0)
    assert not any(hands.tell(events.measured, number, None, 1.0, 1e-3) for number in measures)
    assert not any(hands.tell(events.proposed, number, name_candidates("x")) for number in searches)
    hands.add()
    assert hands.finish() == 100


def test_a_campaign_goes_on_after_a_restart() -> None:
    """What counted before counts still, in all budgets: only the rest is made, and less of what was done most."""
    hands = Hands("a", "b", measure_limit_s=10.0)
    budget = Budget(trials=100, per_workload=60, board_s=1000.0)
    trials = [CountedTrial("nano", f"vision-w{n}", "default", 1e-3 + n * 1e-3) for n in (*[0] * 55, *[1] * 20)]
    hands.tell(events.add_campaign, progress.to_campaign(campaign().order, budget, trials, board_s=900.0), 50.0)
    hands.finish()
    tasks = [count.task for count in hands.of("count")]
    assert len(tasks) == 25
    assert [task.workload for task in tasks].count("vision-w0") <= 5
    assert hands.state.campaigns["vision"].board_s == pytest.approx(950.0)


# Bad input


def test_a_trial_of_another_campaign_is_refused() -> None:
    """The store has it for this campaign, whose order lacks its workload."""
    with pytest.raises(UsageError, match="is no workload of"):
        progress.to_campaign(campaign().order, Budget(), [CountedTrial("nano", "x", "default", None)])


def test_board_types_may_differ_in_what_is_searched_on_them() -> None:
    """A campaign in parts searches on each type, at each point, only the workloads of that part."""
    hands = Hands("n")
    one, two = workload("one"), workload("two", "dense")
    types = (make_type("nano", (one,)), make_type("tx2", (one, two), points={"slow": OperatingPoint()}))
    hands.add(types=types, budget=Budget(per_workload=8))
    hands.boards("t", board_type="tx2")
    hands.finish()
    keys = {tuple(count.task)[1:] for count in hands.of("count")}
    assert keys == {("one", "nano", "default"), ("one", "tx2", "slow"), ("two", "tx2", "slow")}


def test_winners_cost_their_campaign_board_time() -> None:
    """What boards spend on a campaign's winners is its own and its owner's, also after its search has ended."""
    hands = Hands().add()
    hands.tell(events.cancel, "vision")
    hands.tell(events.finalist_measured, "vision", 7.5)
    hands.tell(events.finalist_measured, "missing", 7.5)
    assert hands.state.campaigns["vision"].board_s == 7.5
    assert sum(hands.state.owner_board_s.values()) == 7.5


def test_a_board_whose_waiting_job_is_taken_gets_another_at_once() -> None:
    """An idle board takes a busy one's waiting job; the job that just failed on the idle one waits there instead."""
    hands = Hands("a", "b").add(workloads=1, budget=Budget(trials=3))
    hands.supply()
    (waiting,) = (each for each in hands.measures.values() if each.waits)
    (failing,) = (each for each in hands.running() if each.board != waiting.board)
    acts = hands.measure(failing.assignment, FaultSide.BOARD)
    begun = {each.board: each.job for each in acts if each.kind == "measure"}
    assert begun == {failing.board: waiting.job, waiting.board: failing.job}


def test_a_budget_of_energy_ends_a_campaign() -> None:
    """The search ends once its measurements have used the joules; those of finalists count too."""
    hands = Hands("n1")
    hands.tell(events.add_campaign, progress.to_campaign(campaign().order, Budget(energy_j=10.0), [], energy_j=4.0))
    hands.supply()
    hands.tell(events.measured, hands.running()[0].assignment, None, 1.0, 1e-3, 3.0)
    assert hands.status() is not Status.FINISHED
    hands.tell(events.finalist_measured, "vision", 1.0, 3.0)
    assert (hands.status(), hands.state.campaigns["vision"].energy_j) == (Status.FINISHED, 10.0)
