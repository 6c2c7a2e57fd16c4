"""A real Prometheus reads what the coordinator and a board export, and Prometheus' own linter has nothing to say."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry

from farm.metrics.exporter import Exporter
from farm.metrics.farm_metrics import FarmMetrics
from farm.store import Store
from farm.values import Virtual
from tests.integration.conftest import ROOT, find_free_port, wait_until

DEPLOY = ROOT / "deploy" / "prometheus"


def require(program: str) -> str:
    """The path of one of Prometheus' programs. Skips without, and fails where FARM_REQUIRE_PROMETHEUS is set."""
    if path := shutil.which(program):
        return path
    reason = f"{program} is not installed (Debian: apt-get install prometheus)"
    if os.environ.get("FARM_REQUIRE_PROMETHEUS"):
        pytest.fail(reason)
    pytest.skip(reason)


def fetch(url: str) -> str:
    """What a server answers."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """The coordinator's metrics, of a real store with two boards; one has been probed."""
    registry = CollectorRegistry()
    metrics = FarmMetrics(registry)
    with Store(tmp_path_factory.mktemp("home") / "farm.db") as store:
        for seed, name in enumerate(("sim-1", "sim-2")):
            store.register_board(name, "jetson-nano", Virtual(seed))
        metrics.observe_boards(store.fetch_boards())
        metrics.observe_trials(store.count_statuses())
    metrics.observe_link("sim-1", True, 3)
    metrics.observe_probe("sim-1", {"passed": True, "seconds": 0.4, "median_s": 0.01, "factor": 1.01})
    metrics.observe_tracker(True, 0)
    with Exporter(registry, find_free_port()) as exporter:
        yield exporter


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of `device-agent metrics` for a virtual board."""
    port = find_free_port()
    folder = tmp_path_factory.mktemp("board")
    command = [sys.executable, "-m", "device_agent", "metrics", "--virtual", "jetson-nano", "--name", "sim-1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], cwd=ROOT, stderr=log, env=os.environ | {"TMPDIR": str(folder)}
        )
    try:
        wait_until(lambda: answers(port) or process.poll() is not None, "the board's metrics")
        assert process.poll() is None, (folder / "log").read_text()
        yield port
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not [child for child in below if child.is_running()], "its simulator or helper stayed"
        assert [path.name for path in folder.iterdir()] == ["log"], "it left files behind"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def answers(port: int) -> bool:
    """Whether metrics come from a port."""
    with contextlib.suppress(OSError):
        return bool(fetch(f"http://127.0.0.1:{port}/metrics"))
    return False


def test_the_linter_has_nothing_to_say(coordinator: Exporter, board: int) -> None:
    """`promtool check metrics` is silent about the names, units and texts of both sides."""
    promtool = require("promtool")
    for port in (coordinator.address[1], board):
        text = fetch(f"http://127.0.0.1:{port}/metrics")
        done = subprocess.run([promtool, "check", "metrics"], input=text.encode(), capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_example_configuration_is_right() -> None:
    """Prometheus would start with it, and its rules parse."""
    promtool = require("promtool")
    for kind, name in (("config", "prometheus.yml"), ("rules", "tvm-farm.rules.yml")):
        done = subprocess.run(
            [promtool, "check", kind, str(DEPLOY / name)], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_prometheus_server_scrapes_both(coordinator: Exporter, board: int, tmp_path: pathlib.Path) -> None:
    """By the example's configuration: the coordinator by its address, the board by what the coordinator announces."""
    prometheus = require("prometheus")
    coordinator.set_targets({"sim-1": ("jetson-nano", ("127.0.0.1", board))})
    text = (DEPLOY / "prometheus.yml").read_text()
    for old, new in (
        ("127.0.0.1:9464", f"127.0.0.1:{coordinator.address[1]}"),
        ("scrape_interval: 15s", "scrape_interval: 1s"),
        ("evaluation_interval: 15s", "evaluation_interval: 1s"),
        ("refresh_interval: 30s", "refresh_interval: 1s"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "tvm-farm.rules.yml", tmp_path)
    port = find_free_port()
    command = [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, cwd=tmp_path
        )

    def ask(query: str) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
            return list(json.loads(fetch(url))["data"]["result"])
        return []

    try:
        wait_until(lambda: len(ask("up == 1")) == 2, "both to be scraped")
        [offline] = ask('tvm_farm_boards{state="offline", health="suspect"}')
        assert offline["value"][1] == "2"
        [factor] = ask("tvm_farm_golden_kernel_factor")
        assert (factor["metric"]["board"], factor["value"][1]) == ("sim-1", "1.01")
        wait_until(lambda: ask('device_agent_power_watts{board="sim-1", rail="POM_5V_IN"}'), "the board's power")
        [who] = ask("device_agent_info")
        assert (who["metric"]["board"], who["metric"]["type"]) == ("sim-1", "jetson-nano")
        # A join of both sides: what the farm knows of a board beside what the board says.
        assert ask('device_agent_clock_hertz{domain="a57"} * on (board) group_left tvm_farm_board_link_up')
    finally:
        server.kill()
        server.wait()
