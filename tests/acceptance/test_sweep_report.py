"""What becomes of a sweep's result: `farm sweep show` and `export` on a store that holds two sweeps."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from device_agent.clocks.platform import parse_configuration
from device_agent.protocol import OperatingPoint
from farm.points.values import DomainSetting, Estimate, Goal, Grid, GridPoint, Merge, PointMeasurement
from farm.store import Store
from farm.sweep import stored
from farm.sweep.plan.order import SweepOrder
from tests.acceptance.conftest import Home, new_home
from tests.unit import sweep_documents

pytestmark = pytest.mark.core

SIMULATED, REAL = 1, 2


def fill(store: Store, simulated: bool) -> int:
    clocks = sweep_documents.NANO_HZ[4::2]
    rows = {
        variant: {
            f"a57={hz / 1e6:.9g}MHz": sweep_documents.row(f"a57={hz / 1e6:.9g}MHz", [("a57", hz, 4, True)], work)
            for hz in clocks
        }
        for variant, work in (("untuned", 98e6), ("tuned", 41e6))
    }
    points = tuple(
        GridPoint(f"a57={hz / 1e6:.9g}MHz", OperatingPoint(cpu_freq_hz={"a57": hz}), (DomainSetting("a57", hz, 4),))
        for hz in clocks
    )
    grid = Grid(points, (Merge(points[-1].key, ("mode=MAXN",), "caps are rounded"),))
    order = SweepOrder("squeezenet1.1", variants=("untuned", "tuned"), exhaustive=True)
    sweep = store.sweeps.start(
        command="sweep run",
        model="squeezenet1.1",
        model_sha256="0" * 64,
        board_type="jetson-nano",
        simulated=simulated,
        request=dataclasses.asdict(order),
        goal=stored.goal_to_dict(Goal()),
        grid=stored.grid_to_dict(grid),
        settings={"notes": ["made for a test"], "environment": {"farm": "0"}},
    )
    for variant, by_key in rows.items():
        for visit, (key, row) in enumerate(by_key.items()):
            made = PointMeasurement(
                key,
                Estimate(**row["latency_s"]),
                at_s=float(visit),
                power=Estimate(**row["power_w"]),
                energy=Estimate(**row["energy_j"]),
                rail_power_w=row["rail_power_w"],
                board="n-1",
                simulated=simulated,
            )
            store.sweeps.add_point(
                sweep,
                variant=variant,
                batch=1,
                key=key,
                visit=visit,
                board="n-1",
                measurement=stored.measurement_to_dict(made),
                outcome={},
            )
    store.sweeps.finish(sweep, "finished", {"reason": "all points are measured"})
    return sweep


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with new_home() as home:
        folder = pathlib.Path(home.environment["FARM_HOME"])
        folder.mkdir(parents=True)
        with Store(folder / "farm.db") as store:
            assert [fill(store, simulated=True), fill(store, simulated=False)] == [SIMULATED, REAL]
        yield home


def test_report_is_written(home: Home) -> None:
    """The page, CSV, JSON and pictures are where the command says, and the page says that it is simulated."""
    done = home.run("sweep", "show", str(SIMULATED), "--out", "here", "--json")
    assert done.code == 0, done.err
    paths = {kind: home.path / path for kind, path in done.json()["report"].items()}
    assert set(paths) == {"page", "csv", "json", "front", "clock-a57"}
    assert all(path.is_file() for path in paths.values())
    page = paths["page"].read_text()
    assert "Simulated: this board is a model" in page
    assert "Set a57" in page
    assert "caps are rounded" in page
    assert json.loads(paths["json"].read_text())["sweep"] == SIMULATED


def test_export_gives_what_a_board_takes(home: Home) -> None:
    """The same point as a stanza that nvpmodel's parser reads, as JSON and as a script that shells parse."""
    point = json.loads(home.run("sweep", "export", str(REAL), "--as", "json").out)
    assert point["variant"] == "tuned"
    assert point["is_pick"] is True
    hz = point["operating_point"]["cpu_freq_hz"]["a57"]
    stanza = home.run("sweep", "export", str(REAL), "--as", "nvpmodel").out
    assert f"CPU_A57 MAX_FREQ {hz // 1000}" in stanza
    assert [mode.id for mode in parse_configuration(stanza)] == [2]
    done = home.run(
        "sweep", "export", str(REAL), "--as", "sh", "--operating-point", "a57=921.6MHz", "--out", "point.sh"
    )
    assert done.code == 0, done.err
    assert "hold_cpus 921600 0 1 2 3" in (home.path / "point.sh").read_text()
    subprocess.run(["sh", "-n", str(home.path / "point.sh")], check=True, timeout=20)


def test_compare_keeps_simulated_and_real_apart(home: Home) -> None:
    """They are compared only when told to, and then the document says so."""
    refused = home.run("sweep", "show", str(SIMULATED), str(REAL))
    assert refused.code == 2
    assert "--mixed" in refused.err
    document = home.run("sweep", "show", str(SIMULATED), str(REAL), "--mixed", "--json").json()
    assert document["mixed"] is True
    assert [series["one"]["variant"] for series in document["series"]] == ["tuned", "untuned"]
    assert document["series"][0]["points"][0]["ratios"]["latency"]["differs"] is False
    table = home.run("sweep", "show", str(REAL), str(REAL))
    assert table.code == 0, table.err
    assert "geometric mean over 6 points (1.000 to 1.000)" in table.out
