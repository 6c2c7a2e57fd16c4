"""`farm board certify`: a healthy virtual board, harmed ones, and a command that is interrupted."""

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

HARM = {"dead": ("sensor_error",), "capped": ("clock_cap:1000000000",)}


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


def certify(rack: Home, name: str, folder: pathlib.Path) -> tuple[int, dict[str, dict[str, Any]], str]:
    """The exit code, every check of the board by its name, and the page."""
    done = rack.run("board", "certify", name, "--out", str(folder), "--json")
    document = done.json()
    assert json.loads((folder / "report.json").read_text())["checks"] == document["checks"]
    return done.code, {check["name"]: check for check in document["checks"]}, (folder / "report.md").read_text()


def test_a_healthy_board(rack: Home, tmp_path: pathlib.Path) -> None:
    """Ctrl-C leaves no report and no clock held; then every check passes; no board is named."""
    running = rack.start("board", "certify", "well", "--out", str(tmp_path / "a"))
    wait_until(lambda: "clock tables" in running.out_path.read_text(), "clocks to be held")
    running.send(signal.SIGINT, group=True)
    done = running.wait(10)
    assert done.code == 130, done.out + done.err
    assert not (tmp_path / "a").exists()

    code, checks, page = certify(rack, "well", tmp_path / "report")
    assert code == 0, page
    assert {check["level"] for check in checks.values()} == {"ok"}, checks
    assert "a57: 15 clocks as the type has them" in checks["clock tables"]["detail"]
    assert "18 points held" in checks["holding"]["detail"]
    assert "within the type's range" in checks["power"]["detail"]
    assert page.startswith("# NVIDIA Jetson Nano 4 GB (simulated): passed")
    text = (tmp_path / "report" / "report.json").read_text()
    facts = json.loads(text)["facts"]
    before, speed = facts["clocks_before"], facts["speed"]
    assert {name: len(turns) for name, turns in speed["turns_s"].items()} == {"low": 3, "high": 3}
    assert speed["gain"] == min(speed["turns_s"]["low"]) / min(speed["turns_s"]["high"])
    assert (before["clusters"][0]["min_hz"], before["clusters"][0]["max_hz"]) == (102_000_000, 1_479_000_000)
    home = rack.environment["FARM_HOME"]
    assert not [word for word in ('"well"', home, "127.0.0.1", f'"{socket.gethostname()}"') if word in text + page]


def test_a_dead_sensor(rack: Home, tmp_path: pathlib.Path) -> None:
    """The check of rails fails and says why; clocks, speed and all else are checked all the same."""
    code, checks, page = certify(rack, "dead", tmp_path / "report")
    assert code == 1
    assert [name for name, check in checks.items() if check["level"] == "failed"] == ["rails"]
    assert "POM_5V_IN: no energy: Input/output error" in checks["rails"]["detail"]
    assert "**FAILED** rails: the type has POM_5V_IN" in page
    assert {checks[name]["level"] for name in ("holding", "speed", "kernel", "restored")} == {"ok"}


def test_a_clock_that_firmware_clamps(rack: Home, tmp_path: pathlib.Path) -> None:
    """Cpufreq knows nothing of it; the report names both clocks, and everything is as before afterwards."""
    code, checks, page = certify(rack, "capped", tmp_path / "report")
    assert code == 1
    assert {name for name, check in checks.items() if check["level"] == "failed"} == {"clocks", "holding", "speed"}
    assert "set to 1479 MHz, and its hardware runs at 1000 MHz" in checks["holding"]["detail"]
    assert "its hardware runs at 1000 MHz" in page
    assert checks["restored"]["level"] == "ok"
    assert "Traceback" not in page


def test_bad_input_and_too_little_time(rack: Home, tmp_path: pathlib.Path) -> None:
    """What is not a board or not a report's folder is refused; a deadline ends the checks and the report says which."""
    assert rack.run("board", "certify", "unknown").code == 2
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").touch()
    assert rack.run("board", "certify", "well", "--out", str(tmp_path / "b")).code == 2
    late = rack.run("board", "certify", "well", "--out", str(tmp_path / "c"), "--timeout", "0.01s")
    assert late.code == 1
    assert "the deadline of 0.01 s has passed" in (tmp_path / "c" / "report.md").read_text()
