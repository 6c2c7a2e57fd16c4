"""Simulated fleets: small ones, with more faults than any real one has."""

from __future__ import annotations

import pytest

from farm.campaign.scheduler import values as v
from farm.campaign.scheduler.values import Status
from farm.errors import InternalError
from farm.testing.fleet_simulation import Books, Chances, SimulatedFleet, Simulation
from farm.types.campaigns import Budget
from tests.unit.fleet_campaigns import campaign

# About every third measurement fails by a fault, and every twentieth takes its board away.
BAD_DAY = Chances(
    search_failed=0.01,
    build_failed=0.05,
    build_lost=0.05,
    candidate=0.1,
    board=0.05,
    lost=0.03,
    leave=0.03,
    sample=0.1,
    farm=0.05,
    repeated=0.1,
    straggler=0.05,
)
POINTS = ("default", "maxn")


def play(seed: int, chances: Chances = BAD_DAY, trials: int = 400) -> Simulation:
    fleet = SimulatedFleet({"nano": 8, "tx2": 4}, chances=chances)
    simulation = Simulation(v.SchedulerSettings(builders=20), fleet, seed)
    for name in ("one", "two"):
        spec = campaign(
            name, workloads=6, board_types=("nano", "tx2"), points=POINTS, budget=Budget(trials=trials // 2)
        )
        simulation.at(0.0, v.CampaignAdded(spec))
    simulation.run()
    return simulation


@pytest.mark.parametrize("seed", range(8))
def test_a_bad_day_loses_no_trial(seed: int) -> None:
    """With faults of every kind each campaign makes all its trials, and every candidate is accounted for once."""
    simulation = play(seed)
    books = simulation.books
    assert {name: entry.counted for name, entry in simulation.state.campaigns.items()} == {"one": 200, "two": 200}
    assert books.counted == 400
    assert books.proposed == books.counted + books.discarded + books.banned
    assert simulation.open == 0


def test_a_bad_day_has_everything_and_leaves_nothing() -> None:
    """What is played does happen: late and repeated answers, doubled stragglers, bans, candidates given up. A
    simulation is decided by its seed alone. A fleet whose campaigns are over remembers boards, and of campaigns what
    they were: nothing grows with trials.
    """
    books = play(1, trials=2000).books
    assert min(books.late, books.doubled, books.banned, books.discarded, books.switches) > 0
    assert play(3).books == play(3).books
    assert play(3).books != play(4).books
    state = play(5).state
    assert not any(len(table) for table in (state.tasks, state.jobs, state.requests, state.assignments))
    assert not state.lanes
    assert state.building == 0
    assert all(not (pool.owner_used or pool.campaign_used or pool.lane_used) for pool in state.pools.values())


def test_a_space_that_ends_ends_the_campaign() -> None:
    """Workloads with ten candidates each are measured out, and the campaign ends before its budget."""
    simulation = Simulation(v.SchedulerSettings(), SimulatedFleet({"nano": 4}, space=10))
    simulation.at(0.0, v.CampaignAdded(campaign(workloads=3, budget=Budget(trials=1000))))
    simulation.run()
    assert simulation.books.counted == 30
    assert simulation.state.campaigns["vision"].status is Status.FINISHED


def test_a_slow_host_is_not_given_longer_queues() -> None:
    """Where two compilers serve fifty boards, boards idle, what is built goes out at once, and queues stay short."""
    simulation = Simulation(v.SchedulerSettings(builders=2), SimulatedFleet({"nano": 50}))
    simulation.at(0.0, v.CampaignAdded(campaign(workloads=20, budget=Budget(trials=300))))
    most = 0
    while simulation.step():
        most = max(most, len(simulation.state.jobs))
        assert not any(lane.waiting for lane in simulation.state.lanes.values())
    assert simulation.books.counted == 300
    assert most <= 50 + 8 * 50 + 64


def test_the_books_add_up() -> None:
    """The simulation itself refuses a trial that is counted and was never proposed. Three owners with 90, 100 and 110 s
    are ten per cent from an equal share; no owners, nothing unfair.
    """
    simulation = Simulation(v.SchedulerSettings(), SimulatedFleet({"nano": 1}))
    key = v.TaskKey("one", "w", "nano", "default")
    with pytest.raises(InternalError, match="never proposed"):
        simulation._carry_out(v.Count(1, None, key, "candidate", None))
    assert Books(shares_s={"x": 90.0, "y": 100.0, "z": 110.0}).unfairness == pytest.approx(0.1)
    assert Books().unfairness == 0.0
    assert Books(busy_s=95.0, present_s=100.0).utilisation == pytest.approx(0.95)
