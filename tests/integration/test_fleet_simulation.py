"""The fleet's scheduler over fifty thousand simulated trials: how boards are used and shared."""

from __future__ import annotations

from farm.campaign.scheduler import values as v
from farm.testing.fleet_simulation import Chances, SimulatedFleet, Simulation
from farm.types.campaigns import Budget

TRIALS, BOARDS, OWNERS = 50_000, 100, 4
CHANCES = Chances(
    build_failed=0.01, candidate=0.02, board=0.002, lost=0.0003, leave=0.0003, sample=0.005, repeated=0.001
)


def test_a_fleet_is_used_and_shared() -> None:
    """Boards have work for 95 % of the time, four owners are within 5 % of an equal share, no trial is lost."""
    simulation = Simulation(
        v.SchedulerSettings(builders=2 * BOARDS),
        SimulatedFleet({"nano": BOARDS // 2, "tx2": BOARDS // 2}, chances=CHANCES),
        seed=2,
    )
    for number in range(OWNERS):
        workloads = tuple(v.CampaignWorkload(f"w{number}-{n}", "conv2d", 1.0 + n % 3, 1e8) for n in range(25))
        spec = v.ScheduledCampaign(
            f"campaign-{number}",
            f"owner-{number}",
            workloads,
            ("nano", "tx2"),
            Budget(trials=TRIALS // OWNERS),
            ("default", "maxn"),
            # A priority counts among the campaigns of one owner: between owners it buys nothing.
            priority=number,
        )
        simulation.at(0.0, v.CampaignAdded(spec))
    books = simulation.run()
    print(f"{books.utilisation:.1%} used, {books.unfairness:.1%} from fair")
    assert books.counted == TRIALS
    assert books.proposed == books.counted + books.discarded + books.banned
    assert simulation.open == 0
    assert books.utilisation >= 0.95
    assert books.unfairness <= 0.05
