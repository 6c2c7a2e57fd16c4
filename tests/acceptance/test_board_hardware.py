"""`farm doctor --hardware`: a healthy virtual board, harmed ones, and a command that is interrupted."""

from __future__ import annotations

import json
import pathlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from farm.store import Store
from farm.values import Virtual
from tests.acceptance.conftest import Home, new_home, wait_until

HARM = {"dead": ("sensor_unsupported",), "capped": ("clock_cap:1000000000",)}


@pytest.fixture(scope="module")
def rack() -> Iterator[Home]:
    """A home with a healthy board and harmed ones, and the services up."""
    with new_home() as home:
        with Store(pathlib.Path(home.environment["FARM_HOME"]) / "farm.db") as store:
            for seed, name in enumerate(("well", *HARM)):
                store.boards.register(name, "jetson-nano", Virtual(seed, HARM.get(name, ())))
        assert home.run("up").code == 0
        yield home
        home.run("down", "--force")


def examine(rack: Home, name: str, file: pathlib.Path) -> tuple[int, dict[str, dict[str, Any]], str]:
    """The exit code, every check of the board by its name, and the report."""
    done = rack.run("doctor", name, "--hardware", "--report", str(file), "--json")
    text = file.read_text()
    checks = json.loads(text)["checks"]
    [told] = done.json()
    assert [each["name"] for each in told["checks"]][-len(checks) :] == [each["name"] for each in checks]
    return done.code, {check["name"]: check for check in checks}, text


def test_a_healthy_board(rack: Home, tmp_path: pathlib.Path) -> None:
    """Ctrl-C leaves no report and no clock held; then every check passes; no board is named."""
    running = rack.start("doctor", "well", "--hardware", "--report", str(tmp_path / "a.json"))
    wait_until(lambda: "clock tables" in running.out_path.read_text(), "clocks to be held")
    running.send(signal.SIGINT, group=True)
    done = running.wait(10)
    assert done.code == 130, done.out + done.err
    assert not (tmp_path / "a.json").exists()

    code, checks, text = examine(rack, "well", tmp_path / "report.json")
    assert code == 0, text
    assert {check["level"] for check in checks.values()} == {"ok"}, checks
    assert "a57: 15 clocks as the type has them" in checks["clock tables"]["detail"]
    assert "18 points held" in checks["holding"]["detail"]
    assert "within the type's range" in checks["power"]["detail"]
    assert json.loads(text)["simulated"]
    facts = json.loads(text)["facts"]
    before, speed = facts["clocks_before"], facts["speed"]
    assert {name: len(turns) for name, turns in speed["turns_s"].items()} == {"low": 3, "high": 3}
    assert speed["gain"] == min(speed["turns_s"]["low"]) / min(speed["turns_s"]["high"])
    assert (before["clusters"][0]["min_hz"], before["clusters"][0]["max_hz"]) == (102_000_000, 1_479_000_000)
    home = rack.environment["FARM_HOME"]
    assert not [word for word in ('"well"', home, "127.0.0.1", f'"{socket.gethostname()}"') if word in text]


def test_a_dead_sensor(rack: Home, tmp_path: pathlib.Path) -> None:
    """The check of rails fails and says why; clocks, speed and all else are checked all the same."""
    code, checks, _ = examine(rack, "dead", tmp_path / "report.json")
    assert code == 3
    assert [name for name, check in checks.items() if check["level"] == "failed"] == ["rails"]
    assert "the type has POM_5V_IN" in checks["rails"]["detail"]
    assert "POM_5V_IN: no energy: Operation not supported" in checks["rails"]["detail"]
    assert {checks[name]["level"] for name in ("holding", "speed", "kernel", "restored")} == {"ok"}
    refused = rack.run("sweep", "run", "tiny-cnn", "--board", "dead", "--period", "30fps")
    assert (refused.code, "visit 1" in refused.err) == (2, False)
    assert "its total (POM_5V_IN: no energy: Operation not supported" in refused.err


def test_a_clock_that_firmware_clamps(rack: Home, tmp_path: pathlib.Path) -> None:
    """Cpufreq knows nothing of it; the report names both clocks, and everything is as before afterwards."""
    code, checks, text = examine(rack, "capped", tmp_path / "report.json")
    assert code == 3
    assert {name for name, check in checks.items() if check["level"] == "failed"} == {"clocks", "holding", "speed"}
    assert "set to 1479 MHz, and its hardware runs at 1000 MHz" in checks["holding"]["detail"]
    assert checks["restored"]["level"] == "ok"
    assert "Traceback" not in text


def test_bad_input(rack: Home, tmp_path: pathlib.Path) -> None:
    """A report is of one board's hardware."""
    assert rack.run("doctor", "unknown", "--hardware").code == 2
    assert rack.run("doctor", "well", "--report", str(tmp_path / "b")).code == 2
    assert rack.run("doctor", "well", "dead", "--hardware", "--report", str(tmp_path / "b")).code == 2
