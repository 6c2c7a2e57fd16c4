"""Which workload gets the next trials: facts over plain states."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from farm.campaign.scheduler import scheduler
from farm.campaign.scheduler.state import Task
from farm.types.campaigns import WorkloadOrder

# Warm-up, batch and the most of a task.
BATCH = 8
SETTINGS = (4, BATCH, 10**9)


def state(kind: str = "conv2d", weight: float = 1.0, flop: float = 1e8, **fields: Any) -> Task:
    workload = WorkloadOrder(hash="w", name="w", kind=kind, flop=flop, weight=weight, models=(), calls=())
    return Task(key=cast("Any", None), lane=cast("Any", None), workload=workload, **fields)


workload_states = st.builds(
    state,
    kind=st.sampled_from(["conv2d", "dense", "softmax"]),
    weight=st.integers(1, 20).map(float),
    flop=st.sampled_from([0.0, 1e3, 1e6, 1e9]),
    asked=st.integers(0, 64),
    rounds_s=st.lists(st.floats(1e-6, 1.0), max_size=5).map(lambda best: tuple(sorted(best, reverse=True))),
    exhausted=st.booleans(),
)


@given(st.lists(workload_states, max_size=12), st.integers(-3, 500))
def test_a_decision_stays_within_budget_and_space(states: list[Task], remaining: int) -> None:
    """Never more trials than remain, never an exhausted workload, and None only where nothing can be done."""
    decision = scheduler.decide_next(states, remaining, *SETTINGS)
    if decision is None:
        assert remaining <= 0 or all(s.exhausted for s in states)
        return
    index, count = decision
    assert not states[index].exhausted
    assert 1 <= count <= min(remaining, BATCH)


@given(st.lists(workload_states, min_size=1, max_size=12), st.integers(1, 500))
def test_breadth_comes_before_depth(states: list[Task], remaining: int) -> None:
    """Where there is enough for it, no workload gets a second round while another was never tried."""
    decision = scheduler.decide_next(states, remaining, *SETTINGS)
    fresh = sum(s.asked == 0 and not s.exhausted for s in states)
    if fresh and remaining:
        assert states[decision[0]].asked == 0


@given(st.lists(workload_states, min_size=1, max_size=12), st.integers(1, 500))
def test_the_same_states_give_the_same_decision(states: list[Task], remaining: int) -> None:
    """Nothing but its arguments enters a decision."""
    assert scheduler.decide_next(states, remaining, *SETTINGS) == scheduler.decide_next(states, remaining, *SETTINGS)


def test_the_weightiest_comes_first() -> None:
    """Of workloads never tried, the one with most work per inference is first: calls count, not size alone. A share
    below two thousandths of the model is worth one trial at first.
    """
    states = [state(flop=3e8), state(flop=1e8, weight=5.0), state(flop=1e8)]
    assert scheduler.decide_next(states, 100, *SETTINGS) == (1, 1)
    states = [state(flop=1e9, asked=4, rounds_s=(1e-2,)), state(flop=1e5, kind="softmax")]
    assert scheduler.decide_next(states, 100, *SETTINGS) == (1, 1)


def test_every_workload_has_a_trial_before_any_has_two() -> None:
    """However large the budget: a model's total is known only then. What weighs most is warmed up next."""
    states = [state(flop=3e8), state(flop=5e8), state(flop=1e2)]
    given = []
    for _ in range(5):
        decision = scheduler.decide_next(states, 10_000, *SETTINGS)
        assert decision is not None
        given.append(decision)
        index, count = decision
        states[index] = dataclasses.replace(states[index], asked=states[index].asked + count, rounds_s=(1e-3,))
    assert given == [(1, 1), (0, 1), (2, 1), (1, 3), (0, 3)]


def test_with_fewer_trials_than_workloads_the_heaviest_get_them() -> None:
    """Three trials for six workloads: one each for the three with most work."""
    states = [state(flop=flop) for flop in (1e6, 5e8, 1e7, 3e8, 4e8, 1e5)]
    given = []
    for remaining in (3, 2, 1):
        decision = scheduler.decide_next(states, remaining, *SETTINGS)
        assert decision is not None
        index, count = decision
        assert count == 1
        given.append(index)
        best_s = (states[index].workload.flop / 30e9,)
        states[index] = dataclasses.replace(states[index], asked=1, rounds_s=best_s)
    assert given == [1, 4, 3]


def test_a_few_trials_go_where_they_gain_most() -> None:
    """A pool whose first schedule was bad gets a few more, not all; nothing of weight is left with a single trial."""
    pool = state(kind="max_pool2d", flop=1e6)
    states = [pool, *(state(flop=flop) for flop in (4e8, 3e8, 2e8, 1e8)), *(state(flop=1e5) for _ in range(12))]
    remaining = 30
    while decision := scheduler.decide_next(states, remaining, *SETTINGS):
        index, count = decision
        each = states[index]
        asked = each.asked + count
        start_s = 2e-2 if each is states[0] and asked == 1 else 5e-4 if index == 0 else each.workload.flop / 20e9
        best_s = (*each.rounds_s, start_s * (1 + 1 / asked) / 2)
        states[index] = dataclasses.replace(each, asked=asked, rounds_s=best_s)
        remaining -= count
    assert states[0].asked <= 4
    assert all(s.asked >= 3 for s in states[1:4])


def test_a_small_budget_is_spread() -> None:
    """Of equal workloads every one gets its trial before any gets two."""
    states = [state() for _ in range(6)]
    remaining = 7
    while (decision := scheduler.decide_next(states, remaining, *SETTINGS)) and remaining:
        index, count = decision
        states[index] = dataclasses.replace(states[index], asked=states[index].asked + count)
        remaining -= count
    assert all(s.asked >= 1 for s in states)


def test_gains_decide_among_the_tried() -> None:
    """Between equals, the workload that just got faster is tried again rather than the one that stands still. A
    millisecond saved in a function that is called ten times counts ten times. A convolution far below the speed that
    another one reached has more to gain than that one.
    """
    still = state(asked=40, rounds_s=(1e-3, 1e-3, 1e-3, 1e-3))
    falling = state(asked=40, rounds_s=(4e-3, 3e-3, 2e-3, 1e-3))
    assert scheduler.decide_next([still, falling], 100, *SETTINGS) == (1, 8)
    once = state(asked=8, rounds_s=(3e-3, 2e-3))
    often = state(asked=8, rounds_s=(3e-3, 2e-3), weight=10.0)
    assert scheduler.decide_next([once, often], 100, *SETTINGS) == (1, 8)
    fast = state(asked=16, rounds_s=(1e-3,))
    slow = state(asked=16, rounds_s=(2e-2,))
    assert scheduler.decide_next([fast, slow], 100, *SETTINGS) == (1, 8)


def simulate(floors_s: list[float], start_s: list[float], weights: list[float], budget: int) -> list[int]:
    """Tune workloads whose best latency falls towards a floor as 1 / (1 + trials / 8); returns trials for each."""
    states = [state(weight=w, flop=1e8) for w in weights]
    remaining = budget
    while decision := scheduler.decide_next(states, remaining, *SETTINGS):
        index, count = decision
        asked = states[index].asked + count
        best = floors_s[index] + (start_s[index] - floors_s[index]) / (1 + asked / 8)
        states[index] = dataclasses.replace(states[index], asked=asked, rounds_s=(*states[index].rounds_s, best))
        remaining -= count
    return [s.asked for s in states]


def test_trials_go_where_they_cut_model_latency() -> None:
    """In a simulated tuning the workload with most to gain gets most, the one at its floor next to nothing."""
    trials = simulate(
        floors_s=[1e-3, 1e-3, 1e-3], start_s=[5e-2, 1.2e-2, 1.001e-3], weights=[1.0, 1.0, 1.0], budget=200
    )
    assert sum(trials) == 200
    assert trials[0] > trials[1] > trials[2]
    assert trials[2] <= 30


def test_a_simulated_tuning_beats_equal_shares() -> None:
    """Trials placed by expected gain end with a faster model than the same trials spread evenly."""
    floors, start, weights = [1e-3, 1e-3, 1e-3, 1e-3], [8e-2, 2e-3, 2e-3, 2e-3], [4.0, 1.0, 1.0, 1.0]

    def latency(trials: list[int]) -> float:
        return math.fsum(
            w * (f + (s - f) / (1 + n / 8)) for w, f, s, n in zip(weights, floors, start, trials, strict=True)
        )

    assert latency(simulate(floors, start, weights, 96)) < latency([24] * 4)
