"""What a pick is asked for: kept for later reports of the sweep, or for one export alone."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from device_agent.protocol import Clocks, DomainClocks
from farm.cli import sweep as commands
from farm.cli import sweep_report
from farm.cli.options import read_goal
from farm.errors import UsageError
from farm.points.grid import GridRequest, plan_grid
from farm.points.values import Estimate, Goal, Objective, PointMeasurement
from farm.store import Store
from farm.sweep import stored
from farm.sweep.export.chosen import ExportForm
from farm.sweep.fit.analysis import Combined
from farm.sweep.fit.pick import _explain

HZ = (600_000_000, 1_200_000_000)
GRID = plan_grid(Clocks((DomainClocks("a57", available_hz=HZ, cpus=(0, 1, 2, 3)),)), GridRequest({"a57": HZ}))
SLOW, FAST = (point.key for point in GRID.points)


def estimate(value: float) -> Estimate:
    return Estimate(value, value * 0.999, value * 1.001)


def add_sweep(store: Store) -> None:
    """Add a sweep of two points: the slow one needs least energy."""
    sweep = store.sweeps.start(
        command="sweep run",
        model="m",
        model_sha256="00",
        board_type="jetson-nano",
        simulated=True,
        request={"variants": ["untuned"], "batches": [1], "exhaustive": True, "budget_points": None, "seed": 0},
        goal=stored.goal_to_dict(Goal(Objective.ENERGY)),
        grid=stored.grid_to_dict(GRID),
        settings={},
    )
    for visit, (key, latency, power) in enumerate(((SLOW, 0.030, 2.0), (FAST, 0.015, 7.0))):
        energy = estimate(latency * power)
        measured = PointMeasurement(
            key, estimate(latency), float(visit), latency, estimate(power), energy, energy, board="n-1"
        )
        store.sweeps.add_point(
            sweep,
            variant="untuned",
            batch=1,
            key=key,
            visit=visit,
            board="n-1",
            measurement=stored.measurement_to_dict(measured),
            outcome={},
        )
    store.sweeps.finish(sweep, "finished", {})


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A FARM_HOME with one sweep."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    with Store(tmp_path / "farm.db") as store:
        add_sweep(store)
    return tmp_path


def export(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The sweep's point as `farm sweep export` writes it."""
    capsys.readouterr()
    sweep_report.export(1, ExportForm.JSON)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_what_was_picked_is_what_is_exported(home: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pick for another goal is kept; `none` takes a limit away again; one that nothing keeps changes nothing."""
    assert export(capsys)["key"] == SLOW
    commands.pick(1, deadline="20ms")
    kept = export(capsys)
    assert (kept["key"], kept["goal"]["deadline_s"], kept["is_pick"]) == (FAST, 0.02, True)
    with pytest.raises(SystemExit) as caught:
        commands.pick(1, max_power="1W")
    assert caught.value.code == 1
    assert export(capsys)["key"] == FAST
    commands.pick(1, max_power="8W")
    said = capsys.readouterr().out
    assert "with a latency of at most 20.0 ms and a power of at most 8.00 W; `farm sweep pick 1 --deadline none" in said
    sweep_report.export(1, ExportForm.SH)
    assert "energy per inference, with a latency of at most 20.0 ms" in capsys.readouterr().out
    commands.pick(1, deadline="none", max_power="none")
    assert "goal: the least energy per inference\n" in capsys.readouterr().out
    assert export(capsys)["key"] == SLOW


def test_a_pick_that_one_variant_has_not_changes_nothing(
    home: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two variants and a limit that one of them cannot keep the pick stays, exit code 1; --variant says which."""
    with Store(home / "farm.db") as store:
        measured = PointMeasurement(
            SLOW, estimate(0.2), 2.0, 0.2, estimate(2.0), estimate(0.4), estimate(0.4), board="n"
        )
        store.sweeps.add_point(
            1, variant="tuned", batch=1, key=SLOW, visit=2, board="n",
            measurement=stored.measurement_to_dict(measured), outcome={},
        )  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        commands.pick(1, deadline="50ms")
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert "nothing of tuned x1 can be picked" in said
    assert "The pick stays as it was" in said
    with Store(home / "farm.db") as store:
        assert stored.goal_from_dict(store.sweeps.require(1).goal).deadline_s is None
    commands.pick(1, deadline="50ms", variant="untuned x1")
    with Store(home / "farm.db") as store:
        assert stored.goal_from_dict(store.sweeps.require(1).goal).deadline_s == 0.05


def test_where_nothing_fits_each_limit_has_its_own_nearest_point() -> None:
    """The clocks beside the least power are those of the most frugal point, not of the fastest one."""
    points = {
        SLOW: Combined(SLOW, estimate(0.030), estimate(2.0), estimate(0.06)),
        FAST: Combined(FAST, estimate(0.015), estimate(7.0), estimate(0.105)),
    }
    told = _explain(points, Goal(deadline_s=0.01, max_power_w=1.0))
    assert f"the fastest takes 15.0 ms ({FAST}), the most frugal draws 2 W ({SLOW})" in told
    told = _explain(points, Goal(max_power_w=1.0))
    assert "fastest" not in told


def test_limits_as_they_are_typed() -> None:
    """What is not given stays; what cannot be is refused by its option."""
    before = Goal(Objective.POWER, 0.02, 5.0)
    assert read_goal(before, "", "", "") == before
    assert read_goal(before, "none", "800mW", "edp") == Goal(Objective.EDP, None, 0.8)
    camera = read_goal(before, "none", "", "", "30fps")
    assert (camera.objective, camera.period_s) == (Objective.PERIOD, pytest.approx(1 / 30))
    assert read_goal(camera, "", "", "edp") == Goal(Objective.EDP, None, 5.0)
    for words, aim in ((("", "", "", "none"), "energy"), (("", "", "wall-period"), "wall-period")):
        assert read_goal(camera, *words).aim == aim
    for words in (("", "", "edp", "30fps"), ("", "", "period"), ("40ms", "", "", "33ms"), ("none", "", "", "0fps")):
        with pytest.raises(UsageError, match=r"period of 33|a period is|--period"):
            read_goal(before, *words)
    for text in ("33", "0.5"):
        with pytest.raises(UsageError, match=f"--deadline '{text}' has no unit: {text}s, {text}ms"):
            read_goal(before, text, "", "")
        with pytest.raises(UsageError, match=f"--max-power '{text}' has no unit") as caught:
            read_goal(before, "", text, "")
        assert f"{text}W or {text}mW" in caught.value.hint
    for given, option in (("soon", "--deadline"), ("", "--objective")):
        with pytest.raises(UsageError, match=option):
            read_goal(before, given, "", "" if given else "best")
