"""`farm sweep` as a user has it: real virtual boards behind real services, faults included."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.acceptance.conftest import Done, Home, Running, new_home, wait_until

# The Nanos' time is not waited for. The Raspberry Pis are live, so that there is something to interrupt.
NANO, PIS = "nano-1", ("pi-1", "pi-2")
# What a user accepts between Ctrl-C and the prompt.
END_TIMEOUT_S = 5.0
SWEEP = ("sweep", "run", "tiny-cnn", "--cores", "0", "--batch", "32")
# Six of the ten clocks of a Raspberry Pi.
SIX = ("--cpu-freqs", "600,700,800,1000,1200,1500", "--exhaustive")


@pytest.fixture(scope="module")
def rack() -> Iterator[Home]:
    with new_home() as home:
        assert home.run("board", "add", "nano", "--virtual", "jetson-nano", "--count", "2").code == 0
        assert home.run("board", "add", "pi", "--virtual", "raspberry-pi-4", "--count", "2", "--time", "live").code == 0
        try:
            up = home.run("up", "--wait", "90s")
            assert up.code == 0, up.err
            yield home
        finally:
            home.run("down", "--force")


def sweep(home: Home, *options: str, code: int = 0) -> Done:
    done = home.run(*SWEEP, *options, "--json")
    assert done.code == code, done.err
    return done


def count_visits(home: Home) -> int:
    rows = home.rows("SELECT count(*) FROM sweep_points")
    return int(rows[0][0]) if rows else 0


def newest(home: Home) -> dict[str, Any]:
    shown: list[dict[str, Any]] = home.run("sweep", "list", "--json").json()
    return shown[0]


def find_agent(home: Home, name: str) -> psutil.Process:
    found = []
    for process in home.processes():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "farm.virtual serve" in words and f"--name {name} " in words:
                found.append(process)
    assert found, name
    return min(found, key=psutil.Process.create_time)


def begin(home: Home, *options: str) -> Running:
    before = count_visits(home)
    running = home.start(*SWEEP, *options, "--json")
    wait_until(lambda: count_visits(home) >= before + 2 or running.process.poll() is not None, "two visits")
    assert running.process.poll() is None, running.err
    return running


@pytest.mark.core
def test_cpu_clocks_are_swept_and_a_setting_is_picked(rack: Home) -> None:
    """Latency falls with the clock, energy comes with its parts, the pick is a point that was measured."""
    document = sweep(rack, "--board", NANO, "--cpu-freqs", "403.2,1479", "--window", "0.5s").json()
    assert document["state"] == "finished"
    about = {"type": "jetson-nano", "names": [NANO], "simulated": True, "watts": "watts assumed", "device": "cpu"}
    assert document["board"] == about
    assert document["grid"]["measured"] == document["grid"]["points"] == 2
    [series] = document["series"]
    # What `farm model compile` would make now, not TVM's untuned code.
    assert series["variant"] == "compiled"
    rows = {row["domains"][0]["freq_hz"]: row for row in series["rows"]}
    times = [rows[hz]["latency_s"]["value"] for hz in sorted(rows)]
    assert times == sorted(times, reverse=True)
    for row in rows.values():
        assert row["measured"]
        assert row["latency_s"]["low"] <= row["latency_s"]["value"] <= row["latency_s"]["high"]
        assert row["energy_j"]["value"] == pytest.approx(row["power_w"]["value"] * row["latency_s"]["value"], rel=0.1)
        assert set(row["rail_power_w"]) == {"POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU"}
        assert row["temperature_c"] > 20
    assert rows[min(rows)]["power_w"]["value"] < rows[max(rows)]["power_w"]["value"]
    assert series["pick"]["key"] in {row["key"] for row in series["rows"]}
    assert series["front"]
    # Watched, not read from a table: the simulated sensor's 0.42 s.
    [period] = re.findall(r"every (\S+) s", " ".join(document["notes"]))
    assert float(period) == pytest.approx(0.42, abs=0.02)

    number = str(document["sweep"])
    assert rack.run("sweep", "show", number, "--json").json()["series"] == document["series"]
    shown = rack.run("sweep", "show", number)
    assert "simulated" in shown.out
    assert "PICK" in shown.out
    picked = rack.run("sweep", "pick", number, "--objective", "power", "--json").json()["picks"][0]["pick"]
    assert picked["key"].endswith("403.2MHz")
    late = rack.run("sweep", "pick", number, "--deadline", "0.001ms")
    assert late.code == 1
    assert "the fastest takes" in late.err


def test_a_sweep_is_planned_without_a_board(rack: Home) -> None:
    """The plan lists the points and the largest number of visits of `run`, and refuses what it refuses."""
    wanted = ("sweep", "run", "--dry-run", "tiny-cnn", "--board", NANO)
    document = rack.call(*wanted, "--cpu-freqs", "403.2,1479", "--json").json()
    assert document["grid"] == ["a57=403.2MHz", "a57=1479MHz"]
    assert (document["points"], document["visits"], document["boards"]) == (2, 3, [NANO])
    assert "no 1000 MHz" in rack.call(*wanted, "--cpu-freqs", "1000").err


def test_the_same_sweep_twice_gives_the_same_figures(rack: Home) -> None:
    """To the digit, on two boards that share the points, over a period; what takes them minutes is not waited for."""
    wanted = ("--board-type", "jetson-nano", "--boards", "2", "--cpu-freqs", "204,710.4,921.6,1479", "--window", "20s")
    first, second = (sweep(rack, *wanted, "--period", "20000fps", "--exhaustive").json() for _ in range(2))
    assert first["board"]["names"] == ["nano-1", "nano-2"]
    assert first["series"] == second["series"]
    for document in (first, second):
        assert document["cost"]["seconds"] < document["cost"]["measuring_s"]
    [series] = first["series"]
    for row in series["rows"]:
        period, idle_w = row["period"], row["idle_power_w"]["value"]
        joule = row["energy_j"]["value"] + idle_w * (1.6e-3 - row["latency_s"]["value"])  # a batch of 32
        assert period["mean_power_w"]["value"] == pytest.approx(joule / 1.6e-3)
        assert period["missed"]["runs"] == (period["missed"]["of"] if row["latency_s"]["value"] > 1.6e-3 else 0)
    pick = series["pick"]
    assert pick["released"]["mean_power_w"]["value"] <= pick["period"]["released_mean_power_w"]["value"]
    late = rack.run("sweep", "pick", str(first["sweep"]), "--period", "1us")
    assert (late.code, "ms too short" in late.err) == (1, True)


@pytest.mark.core
def test_what_a_board_does_not_have_is_refused(rack: Home) -> None:
    """A frequency, with a list of those there are; a sweep or board that is not there; an objective without sensor."""
    refused = sweep(rack, "--board", NANO, "--cpu-freqs", "1000", code=2)
    assert "no 1000 MHz" in refused.err
    assert "1036.8" in refused.err
    refused = sweep(rack, "--board", PIS[0], "--objective", "energy", code=2)
    assert "--objective latency" in refused.err
    refused = sweep(rack, "--board", PIS[0], "--variants", "untuned,tuned", "--window", "0.2s", code=2)
    assert "farm tune tiny-cnn --board-type raspberry-pi-4" in refused.err
    assert "working on" not in refused.err  # no board was taken
    assert "farm sweep list" in rack.run("sweep", "show", "999").err
    assert rack.run("sweep", "run", "tiny-cnn").code == 2
    assert "no board" in sweep(rack, "--board", "unknown", code=2).err


def test_without_a_sensor_the_sweep_is_of_latency(rack: Home) -> None:
    """Energy is null, not zero, which is said; a deadline that nothing meets names the best possible."""
    done = sweep(rack, "--board", PIS[0], "--window", "0.2s", "--deadline", "0.001ms", *SIX, code=1)
    assert "the fastest takes" in done.err
    document = done.json()
    assert document["goal"]["objective"] == "latency"
    assert any("no power sensor" in note for note in document["notes"])
    [series] = document["series"]
    assert len(series["rows"]) == document["grid"]["measured"] == 6
    for row in series["rows"]:
        assert row["energy_j"] is row["power_w"] is row["energy_above_idle_j"] is row["inferences_per_joule"] is None
    assert series["pick"] is None
    assert "the fastest takes" in series["no_pick"]


def test_ctrl_c_ends_at_once_and_the_sweep_goes_on_later(rack: Home) -> None:
    """The prompt comes back, the clocks and the board are free, no visit is lost or made twice."""
    running = begin(rack, "--board", PIS[0], "--window", "1s", *SIX)
    running.send(signal.SIGINT, group=True)
    done = running.wait(END_TIMEOUT_S)
    assert done.code == 130
    assert "Traceback" not in done.err
    interrupted = newest(rack)
    assert interrupted["state"] == "interrupted"
    assert f"farm sweep run --resume {interrupted['sweep']}" in done.err
    board = next(row for row in rack.run("board", "list", "--json").json() if row["name"] == PIS[0])
    assert board["lease"] is None
    resumed = rack.run("sweep", "run", "--resume", str(interrupted["sweep"]), "--json")
    assert resumed.code == 0, resumed.err
    assert f"{interrupted['visits']} visits are there" in resumed.err
    document = resumed.json()
    assert document["state"] == "finished"
    [series] = document["series"]
    assert all(row["measured"] for row in series["rows"])
    assert all(row["visits"] == 1 for row in series["rows"] if row["key"] != series["anchor"])


def test_a_board_that_dies_in_the_middle_is_waited_for(rack: Home) -> None:
    """Its agent is killed; the services bring it back, and the sweep goes on with it by itself."""
    running = begin(rack, "--board", PIS[0], "--window", "1s", *SIX)
    find_agent(rack, PIS[0]).kill()
    done = running.wait()
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["state"] == "finished"
    assert document["grid"]["measured"] == 6
    assert "hung up" in done.err


def test_this_machine_is_swept_with_what_it_has(home: Home) -> None:
    """No clocks that can be held: one point, as it is; two batch sizes."""
    done = home.run("sweep", "run", "mlp", "--board", "local", "--window", "0.2s", "--batch", "1,2", "--json")
    assert done.code == 0, done.err
    document = done.json()
    assert not document["board"]["simulated"]
    assert [(series["variant"], series["batch"]) for series in document["series"]] == [("compiled", 1), ("compiled", 2)]
    for series in document["series"]:
        assert series["pick"] is not None
        assert series["rows"][0]["measured"]
    home.expect_no_processes()
