"""Series and boards share the points of a sweep."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from device_agent.protocol import OperatingPoint
from farm.points.values import DomainSetting, Estimate, Goal, Grid, GridPoint, Objective, PointMeasurement
from farm.sweep.plan.adaptive import PlannerSettings
from farm.sweep.plan.conductor import Conductor, RoundConductor, Series, VisitTask

UNTUNED, TUNED = ("untuned", 1), ("tuned", 1)
GRID = Grid(
    tuple(
        GridPoint(f"cpu={mhz}MHz", OperatingPoint(cpu_freq_hz={"cpu": mhz}), (DomainSetting("cpu", mhz * 10**6, 4),))
        for mhz in range(100, 1000, 100)
    )
)


def begin(*series: Series, **settings: object) -> Conductor:
    return Conductor(GRID, Goal(Objective.LATENCY), PlannerSettings(**settings), series)  # type: ignore[arg-type]


def visit(task: VisitTask, board: str, at_s: float, invalid: str = "") -> PointMeasurement:
    latency_s = 1e6 / (task.point.domains[0].freq_hz or 1)
    return PointMeasurement(
        task.point.key, Estimate(latency_s, latency_s * 0.99, latency_s * 1.01), at_s, board=board,
        invalid=invalid, retry=bool(invalid),
    )  # fmt: skip


def carry_out(conductor: Conductor, task: VisitTask, board: str, at_s: float, invalid: str = "") -> None:
    for series in task.series:
        conductor.add(series, visit(task, board, at_s, invalid))
    conductor.done(board)


def ask(conductor: Conductor, board: str) -> VisitTask | None:
    found = conductor.find_next(board)
    assert found is not None
    return found[0]


def run(conductor: Conductor, *boards: str) -> list[tuple[str, VisitTask]]:
    made: list[tuple[str, VisitTask]] = []
    working = list(boards)
    while working:
        for board in list(working):
            task = ask(conductor, board)
            if task is None:
                working.remove(board)
                continue
            made.append((board, task))
            carry_out(conductor, task, board, float(len(made)))
    return made


def test_all_series_are_measured_at_each_point_that_is_one() -> None:
    """Every point of an exhaustive sweep has both variants, in one visit; the anchor, too. Its twin stays, and the grid
    says so.
    """
    conductor = begin(UNTUNED, TUNED, exhaustive=True)
    made = run(conductor, "a")
    assert {task.point.key for _, task in made} == {point.key for point in GRID.points}
    assert all(set(task.series) == {UNTUNED, TUNED} for _, task in made)
    assert len(made) <= len(GRID) + 3
    assert not conductor.void
    assert conductor.reason
    conductor = begin(UNTUNED, exhaustive=True)
    assert conductor.merge(GRID.points[0], OperatingPoint(cpu_freq_hz={"cpu": 200_000_000}))
    assert len(conductor.grid) == len(GRID) - 1
    assert conductor.grid.merged[0].dropped == (GRID.points[0].key,)
    assert not conductor.merge(GRID.points[1], OperatingPoint(cpu_freq_hz={"cpu": 200_000_000}))


def share_out(conductor: Conductor, boards: Sequence[str], dice: random.Random, last: str = "") -> list[Any]:
    """Let boards ask and answer in an order that `dice` draw; who got what, by board. `last` leaves after one point."""
    made: dict[str, list[Any]] = {board: [] for board in boards}
    under_way: dict[str, VisitTask] = {}
    working = list(boards)
    while working:
        board = dice.choice(working)
        if task := under_way.pop(board, None):
            carry_out(conductor, task, board, float(len(made[board])))
            if board == last:
                conductor.leave(board)
                working.remove(board)
            continue
        if (found := conductor.find_next(board)) is None:
            continue
        [task] = found
        if task is None:
            conductor.leave(board)
            working.remove(board)
            continue
        made[board].append((task.point.key, task.series, task.reason))
        under_way[board] = task
    return [made, conductor.visits]


@pytest.mark.parametrize("last", ["", "b"], ids=["all stay", "one leaves"])
def test_rounds_deal_the_same_points_whoever_is_ready_first(last: str) -> None:
    """Three boards, four orders of asking: each board gets the same points, and nothing is left undone."""
    boards = ("a", "b", "c")
    seen = []
    for seed in range(4):
        goal, settings = Goal(Objective.LATENCY), PlannerSettings(exhaustive=True)
        conductor = RoundConductor(GRID, goal, settings, (UNTUNED, TUNED), None, boards)
        seen.append(share_out(conductor, boards, random.Random(seed), last))
    assert all(each == seen[0] for each in seen)
    made, visits = seen[0]
    assert {key for each in made.values() for key, _, _ in each} == {point.key for point in GRID.points}
    assert len({key for key, _, _ in made["a"]}) < len(GRID)
    assert {visit.key for visit in visits[TUNED]} == {point.key for point in GRID.points}
    ready_first = [
        share_out(begin(UNTUNED, TUNED, exhaustive=True), boards, random.Random(seed), last) for seed in range(4)
    ]
    assert any(each != ready_first[0] for each in ready_first)


def test_boards_share_the_points_and_each_measures_the_anchor() -> None:
    """No point but the anchor is measured on both."""
    conductor = begin(UNTUNED, exhaustive=True)
    made = run(conductor, "a", "b")
    anchor = conductor.anchor.key
    for board in ("a", "b"):
        own = [task.point.key for name, task in made if name == board]
        assert own[0] == anchor
    others = [task.point.key for _, task in made if task.point.key != anchor]
    assert sorted(others) == sorted({point.key for point in GRID.points} - {anchor})


def test_a_point_that_another_board_is_at_is_not_given_twice() -> None:
    """While both are at work."""
    conductor = begin(UNTUNED, exhaustive=True)
    for board in ("a", "b"):
        task = ask(conductor, board)
        assert task.point.key == conductor.anchor.key
        carry_out(conductor, task, board, 1.0)
    first, second = ask(conductor, "a"), ask(conductor, "b")
    assert first.point.key != second.point.key


def test_a_board_waits_for_the_last_points_of_another() -> None:
    """Its result decides whether there is more to do."""
    conductor = Conductor(Grid(GRID.points[:1]), Goal(Objective.LATENCY), PlannerSettings(), (UNTUNED,))
    task = ask(conductor, "a")
    assert task is not None
    carry_out(conductor, task, "a", 1.0)
    busy = ask(conductor, "b")
    assert busy is not None  # it has not been at the only point yet
    assert conductor.find_next("a") is None
    assert conductor.find_next("a") is None
    carry_out(conductor, busy, "b", 2.0)
    assert ask(conductor, "a") is None


def test_a_spoilt_visit_is_made_again_and_given_up_after_some() -> None:
    """Spoilt again and again the sweep is void, with the reason."""
    conductor = begin(UNTUNED, exhaustive=True)
    seen = []
    for at_s in range(20):
        task = ask(conductor, "a")
        if task is None:
            break
        seen.append(task.point.key)
        carry_out(conductor, task, "a", float(at_s), "the board slowed itself down")
    assert len(seen) >= 3
    assert seen[0] == seen[1]
    assert "slowed itself down" in conductor.void


def test_a_sweep_goes_on_from_its_visits() -> None:
    """A conductor with earlier visits asks for what is left only."""
    first = begin(UNTUNED, exhaustive=True)
    made = []
    for at_s in range(4):
        task = ask(first, "a")
        made.append(task.point.key)
        carry_out(first, task, "a", float(at_s))
    second = Conductor(GRID, Goal(Objective.LATENCY), PlannerSettings(exhaustive=True), (UNTUNED,), first.visits)
    later = [task.point.key for _, task in run(second, "a")]
    assert not set(made[1:]) & (set(later) - {first.anchor.key})
    assert {*made, *later} == {point.key for point in GRID.points}


@pytest.mark.parametrize("boards", [("a",), ("a", "b")])
def test_an_adaptive_sweep_stops_by_itself(boards: tuple[str, ...]) -> None:
    """For latency alone, the fastest clock is soon known."""
    conductor = begin(UNTUNED)
    made = run(conductor, *boards)
    assert GRID.points[-1].key in {task.point.key for _, task in made}
    assert len({task.point.key for _, task in made}) < len(GRID)


def test_a_point_that_a_board_refuses_is_left_out_and_said() -> None:
    """The others are measured to the end; the last one is never given up."""
    conductor = begin(UNTUNED, exhaustive=True)
    assert conductor.refuse(GRID.points[0], "takes a reboot")
    made = run(conductor, "a")
    assert {task.point.key for _, task in made} == {point.key for point in GRID.points[1:]}
    assert conductor.notes == [f"{GRID.points[0].key} is left out: takes a reboot"]
    for point in GRID.points[1:-1]:
        assert conductor.refuse(point, "takes a reboot")
    assert not conductor.refuse(GRID.points[-1], "takes a reboot")
