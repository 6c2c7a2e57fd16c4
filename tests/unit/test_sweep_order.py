"""What was ordered becomes a grid and a goal that the board can serve, or a refusal that says what it can."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any
from unittest import mock

import pytest

from device_agent.protocol import Clocks, DomainClocks, OperatingPoint
from farm.errors import UsageError
from farm.points.grid import NO_COUPLING
from farm.points.values import Estimate, Goal, Objective, PointMeasurement
from farm.sweep import stored
from farm.sweep.plan import order
from farm.sweep.plan.order import SweepOrder
from farm.sweep.run import session
from farm.sweep.run.programs import read_batches, read_variants
from farm.sweep.run.visitor import Progress

MHZ = 1_000_000
CLOCKS = Clocks(
    clusters=(DomainClocks("a57", available_hz=(100 * MHZ, 200 * MHZ, 300 * MHZ), cpus=(0, 1), online=(0, 1)),),
    gpu=DomainClocks("gpu", available_hz=(50 * MHZ, 60 * MHZ)),
    power_modes=("MAXN", "5W"),
)


def keys(wanted: SweepOrder, clocks: Clocks = CLOCKS) -> list[str]:
    return [each.key for each in order.plan_order(wanted, clocks, NO_COUPLING)[0].points]


def test_clocks_are_swept_as_asked_for() -> None:
    """And `all` says the same. What is not named is left as it is. In MHz, all of them."""
    assert keys(SweepOrder("m")) == ["a57=100MHz", "a57=200MHz", "a57=300MHz"]
    assert keys(SweepOrder("m", cpu_freqs=("all",))) == keys(SweepOrder("m"))
    assert keys(SweepOrder("m", gpu_freqs="all")) == ["gpu=50MHz", "gpu=60MHz"]
    assert keys(SweepOrder("m", cpu_freqs=("a57=150..300",))) == ["a57=200MHz", "a57=300MHz"]
    assert keys(SweepOrder("m", cores="0/0-1", cpu_freqs=("100",))) == ["cores=0 a57=100MHz", "cores=0-1 a57=100MHz"]
    with pytest.raises(UsageError, match="no 150 MHz") as refused:
        keys(SweepOrder("m", cpu_freqs=("100,150",)))
    assert "100, 200, 300 MHz" in refused.value.hint


def test_on_a_gpu_its_clock_and_the_memorys_are_swept() -> None:
    """The memory's only with the GPU's, where the board lets it be read, and unless it is named or left alone."""
    clocks = dataclasses.replace(CLOCKS, memory=DomainClocks("memory", available_hz=(400 * MHZ, 800 * MHZ)))
    whole = [f"gpu={gpu}MHz memory={hz}MHz" for gpu in (50, 60) for hz in (400, 800)]
    assert keys(SweepOrder("m", device="gpu"), clocks) == whole
    assert keys(SweepOrder("m", device="gpu", gpu_freqs="60"), clocks) == whole[2:]
    assert keys(SweepOrder("m", device="gpu", mem_freqs="none"), clocks) == ["gpu=50MHz", "gpu=60MHz"]
    assert keys(SweepOrder("m", device="gpu", cpu_freqs=("100",)), clocks) == ["a57=100MHz"]
    assert keys(SweepOrder("m", mem_freqs="none"), clocks) == keys(SweepOrder("m"))
    closed = dataclasses.replace(clocks, gpu=dataclasses.replace(CLOCKS.gpu, current_hz=50 * MHZ))
    assert len(keys(SweepOrder("m", device="gpu"), closed)) == 2


def test_a_board_without_clocks_is_measured_as_it_is_unless_values_are_asked_for() -> None:
    """One point, and said; a frequency that was named cannot be replaced by anything."""
    for wanted in (SweepOrder("m"), SweepOrder("m", cpu_freqs=("all",))):
        grid, notes = order.plan_order(wanted, Clocks(), NO_COUPLING)
        assert [each.key for each in grid.points] == ["default"]
        assert "as it is" in notes[0]
    with pytest.raises(UsageError):
        keys(SweepOrder("m", cpu_freqs=("100",)), Clocks())


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ({"window_s": 0.01}, "--window"),
        ({"budget_points": 0}, "--budget-points"),
        ({"exhaustive": True, "budget_points": 3}, "contradict"),
    ],
)
def test_impossible_orders_are_refused(wanted: dict[str, object], word: str) -> None:
    """Before any board is asked."""
    with pytest.raises(UsageError, match=word):
        SweepOrder("m", **wanted)  # type: ignore[arg-type]


def test_without_a_sensor_the_goal_is_latency_unless_power_was_asked_for() -> None:
    """The default objective gives way and says so; one that was named is refused with what to do."""
    goal, notes = order.require_goal(Goal(deadline_s=1.0), False, objective_named=False)
    assert goal == Goal(Objective.LATENCY, 1.0)
    assert "no power sensor" in notes[0]
    with pytest.raises(UsageError, match="--objective energy needs power") as refused:
        order.require_goal(Goal(), False, objective_named=True)
    assert "latency" in refused.value.hint
    with pytest.raises(UsageError, match="--max-power"):
        order.require_goal(Goal(max_power_w=3.0), False, objective_named=False)
    assert order.require_goal(Goal(), True, objective_named=False) == (Goal(), [])
    with pytest.raises(UsageError, match=r"--period needs power, .* \(VDD_IN: no energy: Operation not supported\)"):
        order.require_goal(
            Goal(Objective.PERIOD, period_s=0.033), False, True, "VDD_IN: no energy: Operation not supported"
        )


def test_a_sensor_whose_driver_loads_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Session by session, since an agent looks before each; not for ever."""
    monkeypatch.setattr(session, "_SENSOR_PAUSE_S", 0.001)
    for seen, wait_s in (([(), (), ("VDD_IN",)], 60.0), (itertools.repeat(()), 0.02)):
        monkeypatch.setattr(session, "_SENSOR_WAIT_S", wait_s)
        opened: Any = iter(seen)
        first = mock.Mock(open=lambda opened=opened: mock.Mock(total_rails=next(opened), to_dict=dict))
        fake = mock.Mock(first=first, _crew=mock.Mock(call=lambda made: made))
        found = session.SweepSession.connect(fake, True).total_rails
        assert (found, first.close.call_count > 1) == (("VDD_IN",) if isinstance(seen, list) else (), True)


def test_what_is_stored_comes_back() -> None:
    """Order, grid, goal and measurement survive JSON unchanged."""
    wanted = SweepOrder("m", ("data=1,3",), ("untuned", "tuned"), (1, 4), ("all",), budget_points=3)
    older = dataclasses.asdict(wanted) | {"repeat": 3, "ambient_c": 21.0}
    assert SweepOrder.from_dict(json.loads(json.dumps(older))) == wanted
    grid, _ = order.plan_order(SweepOrder("m", cpu_freqs=("all",), power_modes="all"), CLOCKS, NO_COUPLING)
    assert stored.grid_from_dict(json.loads(json.dumps(stored.grid_to_dict(grid)))) == grid
    for goal in (Goal(Objective.EDP, 0.033, 7.5, True), Goal(Objective.PERIOD, period_s=0.04)):
        assert stored.goal_from_dict(json.loads(json.dumps(stored.goal_to_dict(goal)))) == goal
    for power in (Estimate(2.0, 1.9, 2.1), None):
        visit = PointMeasurement(
            "k", Estimate(1.0, 0.9, 1.1), 3.0, 1.05, power, rail_power_w={"IN": 2.0}, idle_power=power
        )
        assert stored.measurement_from_dict(json.loads(json.dumps(stored.measurement_to_dict(visit)))) == visit
    assert isinstance(grid.points[0].point, OperatingPoint)


def test_progress_tells_what_is_left_at_most() -> None:
    """After two of five visits in ten seconds fifteen are left at most; more visits than planned raise the total."""
    times = iter((0.0, 5.0, 10.0, 15.0))
    progress = Progress(5, lambda: next(times))
    assert progress.count("a") == "visit 1 of at most 5, at most 20.0 s left: a"
    assert progress.count("b") == "visit 2 of at most 5, at most 15.0 s left: b"
    short = Progress(0, lambda: 1.0)
    assert short.count("c") == "visit 1 of at most 1: c"


def test_variants_and_batches_are_read() -> None:
    """In a fixed order, each once; what is none is refused."""
    assert read_variants("tuned, untuned,tuned") == ("untuned", "tuned")
    assert read_batches("4,1,4") == (1, 4)
    for wrong in ("", "fast"):
        with pytest.raises(UsageError):
            read_variants(wrong)
    for wrong in ("", "0", "x", "1,-2"):
        with pytest.raises(UsageError):
            read_batches(wrong)
