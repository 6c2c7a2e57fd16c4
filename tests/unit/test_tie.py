"""Who is fastest, from simulated rounds: how often noise wins, and what drift, odd samples and slow boards do to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from farm.selection import tie
from farm.selection.tie import Round, TieRule

RULE = TieRule()
NOISE = 0.02


def simulate(
    rng: np.random.Generator,
    latency_s: Mapping[str, float],
    *,
    noise: float = NOISE,
    rule: TieRule = RULE,
    board_factor: Callable[[str, str], float] = lambda board, candidate: 1.0,
    drift: float = 0.0,
    odd: float = 0.0,
) -> tuple[tie.Judgement, list[Round]]:
    """Measure on boards `a` and `b` in turn until it is decided; a part `odd` of measurements takes 30 % longer."""
    alive, rounds, when = sorted(latency_s), [], itertools.count()
    for look in rule.looks:
        while len(rounds) < look:
            number = len(rounds)
            board = "ab"[number % 2]
            measured = {}
            for place in range(len(alive)):
                candidate = alive[(place + number // 2) % len(alive)]
                factor = math.exp(rng.normal(0, noise)) * board_factor(board, candidate) * (1 + drift) ** next(when)
                measured[candidate] = latency_s[candidate] * factor * (1.3 if rng.random() < odd else 1.0)
            rounds.append(Round(number, board, measured))
        judgement = tie.judge(rounds, alive, rule, last=look == rule.looks[-1])
        if not judgement.open:
            break
        alive = [candidate for candidate in alive if candidate not in judgement.slower]
    return judgement, rounds


def repeat(times: int, latency_s: Mapping[str, float], **options: object) -> list[tuple[tie.Judgement, list[Round]]]:
    rng = np.random.default_rng(7)
    return [simulate(rng, latency_s, **options) for _ in range(times)]  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("odd", [0.0, 0.1])
def test_noise_seldom_makes_a_winner_of_equals(count: int, odd: float) -> None:
    """Of candidates that are equally fast, one wins in no more than 5 % of decisions, several looks included."""
    outcomes = repeat(400, {f"c{index}": 1e-3 for index in range(count)}, odd=odd)
    clear = sum(not judgement.tied for judgement, _ in outcomes)
    # What 5 % may show in 400 by chance: a binomial's 99 % quantile.
    assert clear <= 31


def test_the_faster_one_wins_over_a_slow_board_and_drift() -> None:
    """A board that is 30 % slow and clocks that sink by a third meanwhile hide no difference of 5 %."""
    slow = lambda board, candidate: 1.3 if board == "b" else 1.0  # noqa: E731
    outcomes = repeat(200, {"x": 1.05e-3, "y": 1e-3, "z": 1.05e-3}, board_factor=slow, drift=0.008)
    assert sum(judgement.leader == "y" and not judgement.tied for judgement, _ in outcomes) >= 190
    assert all("y" in (judgement.leader, *judgement.tied) for judgement, _ in outcomes)


def test_odd_and_quiet_boards_cost_what_they_must() -> None:
    """With every tenth measurement 30 % off, what is 10 % faster is hardly ever called slower. Where noise is small,
    equals are within the band after the first looks: no measurement is wasted.
    """
    outcomes = repeat(300, {"x": 1e-3, "y": 1.1e-3, "z": 1.1e-3}, odd=0.1)
    assert sum("x" not in (judgement.leader, *judgement.tied) for judgement, _ in outcomes) <= 3
    assert sum(judgement.leader == "x" and not judgement.tied for judgement, _ in outcomes) >= 240
    outcomes = repeat(100, {"x": 1e-3, "y": 1.001e-3, "z": 1.002e-3}, noise=0.002)
    assert np.mean([len(rounds) for _, rounds in outcomes]) < 6


def test_intervals_hold_the_true_ratio() -> None:
    """The interval of one look misses the true ratio no more often than the rule allows."""
    rule = TieRule(looks=(8,))
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(1000):
        rounds = [Round(n, "a", {"x": 1.0, "y": 1.2 * math.exp(rng.normal(0, 0.03))}) for n in range(8)]
        (ratio,) = tie.judge(rounds, ["x", "y"], rule, last=True).ratios
        missed += not ratio.low <= 1.2 <= ratio.high
    assert missed <= 67  # a binomial's 99 % quantile


def rounds_of(*latencies: Sequence[float], boards: str = "ab") -> list[Round]:
    return [
        Round(number, boards[number % len(boards)], dict(zip("xyz", each, strict=False)))
        for number, each in enumerate(latencies)
    ]


def test_rounds_that_tell_nothing_count_for_nothing() -> None:
    """Of candidates that measure exactly the same, the first by name leads, in any order. Ratios are compared over
    rounds in which all were measured. A single candidate leads, and nothing is open.
    """
    rounds = rounds_of(*[(0.1, 0.1, 0.1)] * 4)
    for names in itertools.permutations("xyz"):
        judgement = tie.judge(rounds, names, RULE, last=False)
        assert (judgement.leader, judgement.tied) == ("x", ("y", "z"))
    rounds = [*rounds_of((1.0, 1.2), (1.0, 1.21), (1.0, 1.19), (1.0, 1.2)), Round(9, "a", {"x": 5.0})]
    (ratio,) = tie.judge(rounds, "xy", RULE, last=False).ratios
    assert ratio.rounds == 4
    assert ratio.is_slower
    assert tie.judge(rounds_of((1.0,)), "x", RULE, last=False) == tie.Judgement("x", (), (), ())


def test_boards_that_disagree_are_named_and_no_others() -> None:
    """What is 10 % faster on one board and 10 % slower on the other is a tie, and both boards are named. Two boards
    with nothing but noise between them hardly ever seem to disagree.
    """
    rng = np.random.default_rng(5)
    turned = lambda board, candidate: 1.1 if (board == "a") == (candidate == "x") else 1.0  # noqa: E731
    judgement, rounds = simulate(rng, {"x": 1e-3, "y": 1e-3}, noise=0.01, board_factor=turned)
    assert judgement.tied
    (found,) = tie.find_contradictions(rounds, judgement.leader, judgement.tied, RULE)
    faster = {"x": "b", "y": "a"}
    assert (found.faster_on, found.slower_on) == (faster[found.candidate], faster[found.other])
    outcomes = repeat(200, {"x": 1e-3, "y": 1e-3})
    found = [tie.find_contradictions(rounds, judgement.leader, judgement.tied, RULE) for judgement, rounds in outcomes]
    assert sum(map(bool, found)) <= 4


@pytest.mark.parametrize(
    ("ratios", "overtaken"),
    [
        ((1.06, 1.07), True),
        ((1.06, 1.04), False),
        ((1.3, 0.99), False),
        ((1.06, 1.06, 1.06, 0.9), True),
        ((2.0, 1.2, 1.04, 1.04), False),
        ((), False),
    ],
)
def test_a_favourite_is_overtaken_where_three_rounds_of_four_say_so(ratios: Sequence[float], overtaken: bool) -> None:
    """One round in which the favourite was disturbed is not enough, nor are many small differences."""
    rounds = [Round(number, "nano-1", {"first": ratio, "other": 1.0}) for number, ratio in enumerate(ratios)]
    assert tie.overtakes(rounds, "other", "first", RULE) is overtaken
