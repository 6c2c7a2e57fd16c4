"""What a campaign's objective decides between finalists, and how it measures them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from device_agent.protocol import Energy, PowerWindow, RailPower, Status
from farm.campaign.verify import objectives
from farm.points.values import Objective
from farm.selection.decision import Decision
from farm.selection.rounds import Contest
from farm.selection.tie import TieRule
from farm.types.campaigns import TypeOrder, WorkloadOrder
from farm.units import parse_energy_j

_OTHERS = ("energy", "edp", "period")
ENERGY = TieRule(looks=(4,), objective=Objective.ENERGY)
# Seconds and joules a call: `fast` takes a third more energy than `frugal`, `slow` has both wrong.
COSTS = {"fast": (1.0e-3, 4.0e-3), "frugal": (1.2e-3, 3.0e-3), "slow": (2.0e-3, 5.0e-3)}


def run(contest: Contest, names: tuple[str, ...] = tuple(COSTS)) -> Contest:
    contest.enter(names)
    while not contest.is_over:
        taken = contest.begin("nano-1", 0.0, {"nano-1"}, 1)
        assert taken is not None
        while taken.left:
            name = taken.left.pop(0)
            latency_s, energy_j = COSTS[name]
            wobble = 1 + 0.001 * (taken.number % 3)
            contest.on_measured(taken, name, Status.OK, "", latency_s * wobble, energy_j * wobble)
        contest.end(taken)
    return contest


def lead(contest: Contest) -> str:
    assert contest.judgement is not None
    return contest.judgement.leader


@pytest.mark.parametrize(("objective", "winner"), [("latency", "fast"), *((by, "frugal") for by in _OTHERS)])
def test_the_objective_decides(objective: str, winner: str) -> None:
    """The least latency, energy, or energy times latency leads; the evidence names the objective."""
    rule = dataclasses.replace(ENERGY, objective=Objective(objective))
    contest = run(Contest(0, rule))
    assert lead(contest) == winner
    assert contest.judgement is not None
    found = Decision(contest, rule).conclude(contest.judgement)
    assert (found.winner, found.median_s) == (winner, pytest.approx(COSTS[winner][0], rel=0.01))
    assert found.evidence["objective"] == objective


def test_a_deadline_drops_what_is_late() -> None:
    """A candidate beyond its share of the deadline loses although it uses the least energy; the fastest stays."""
    contest = run(Contest(0, ENERGY, limit_s=1.1e-3))
    assert lead(contest) == "fast"
    assert contest.failed["frugal"].startswith("takes 1201.2 us")
    assert lead(run(Contest(0, ENERGY, limit_s=0.5e-3))) == "fast"


def test_an_advantage_within_the_rule_keeps_the_default() -> None:
    """The default schedule is kept against one that uses a little less energy."""
    contest = run(Contest(0, dataclasses.replace(ENERGY, advantage=0.4)))
    assert contest.judgement is not None
    assert (
        Decision(contest, dataclasses.replace(ENERGY, advantage=0.4), "fast").conclude(contest.judgement).winner
        == "fast"
    )


def test_a_round_without_energy_is_spoilt() -> None:
    """A measurement without the energy that the objective needs does not count."""
    contest = Contest(0, ENERGY)
    contest.enter(["fast", "slow"])
    taken = contest.begin("nano-1", 0.0, {"nano-1"}, 1)
    assert taken is not None
    contest.on_measured(taken, taken.left.pop(0), Status.OK, "", 1e-3, None)
    assert (taken.is_spoilt, taken.left) == (True, [])


def window(half_width: float, updates: int) -> Energy:
    low_j, high_j = 1e-3 * (1 - half_width), 1e-3 * (1 + half_width)
    total = RailPower("POM_5V_IN", 2.0, (1.9, 2.1), 2.0, (1.9, 2.1), updates, updates, 0, 0)
    return Energy(PowerWindow(0.0, 1.0, (total,), total, "board"), None, 1e-3, (low_j, high_j))


def test_windows_grow_until_the_interval_is_narrow() -> None:
    """The next window has as many values as its interval needs, by the square root, up to a limit."""
    first = objectives.plan_window([]).min_updates
    assert objectives.plan_window([window(0.04, 30)]).min_updates == 120
    assert objectives.plan_window([window(0.01, 30)]).min_updates == 30
    assert objectives.plan_window([window(0.01, 3)]).min_updates == first
    assert objectives.plan_window([window(0.5, 30)]).min_updates == 2000


def test_a_period_is_decided_by_energy_above_idle() -> None:
    """At one operating point a longer inference leaves less idle time: idle power is measured and taken off."""
    assert (objectives.plan_window([], Objective.PERIOD).idle_s > 2, objectives.plan_window([]).idle_s) == (True, 0)
    found = dataclasses.replace(window(0.01, 30), above_idle_j=4e-4)
    assert objectives.read_energy_j(found, Objective.PERIOD) == 4e-4
    assert objectives.read_energy_j(window(0.01, 30), Objective.PERIOD) is None


def test_a_wide_interval_is_told() -> None:
    """Evidence has J a call with an interval, and says where the precision was not reached."""
    found = objectives.describe_energy([window(0.05, 30), window(0.03, 60)])
    assert found["energy_j"] == pytest.approx(1e-3)
    assert found["energy_note"] == "the interval is +-3.0%: 10 s of sampling do not reach 2%"
    assert objectives.describe_energy([window(0.01, 60)])["energy_note"] == ""
    assert objectives.describe_energy([])["energy_j"] is None


def test_a_deadline_is_shared_by_the_fastest() -> None:
    """Every workload may take the same multiple of its fastest candidate; the model with the least room decides."""
    works = (
        WorkloadOrder(hash="a", name="a", kind="conv2d", flop=1, weight=3, models=("m", "n"), calls=(1, 2)),
        WorkloadOrder(hash="b", name="b", kind="dense", flop=1, weight=1, models=("n",), calls=(1,)),
    )
    of_type = TypeOrder(
        board_type="jetson-nano", simulated=True, target={}, threads=4, pipeline="p", points={}, workloads=works
    )
    assert objectives.find_slack(of_type, ("m", "n"), {"a": 2e-3, "b": 4e-3}, 16e-3) == pytest.approx(2.0)
    assert objectives.find_slack(of_type, ("m",), {"a": 2e-3}, 1e-3) == pytest.approx(0.5)
    assert objectives.find_slack(of_type, ("m",), {}, 1e-3) == math.inf


@pytest.mark.parametrize(
    ("text", "energy_j"), [("500J", 500.0), ("20kJ", 2e4), ("5.5 Wh", 19800.0), ("5", None), ("0J", None)]
)
def test_energies_have_units(text: str, energy_j: float | None) -> None:
    """Energy is parsed with its unit; without one, or of nothing, it is refused."""
    if energy_j is None:
        with pytest.raises(ValueError, match="500J, 20kJ"):
            parse_energy_j(text)
    else:
        assert parse_energy_j(text) == pytest.approx(energy_j)
