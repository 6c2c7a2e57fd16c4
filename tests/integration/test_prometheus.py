"""A real Prometheus reads what the coordinator and a board export, and Prometheus' own linter has nothing to say."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client import CollectorRegistry

from farm.connectivity import services as services_side
from farm.connectivity.services import SERVICES
from farm.metrics.farm_metrics import Exporter, FarmMetrics
from farm.settings import Settings
from farm.store import Store
from farm.types.states import CampaignStanding, TrialSums
from farm.values import Virtual
from farm.web import live
from tests.board_rows import make_lease
from tests.integration.conftest import ROOT, wait_until
from tests.integration.prometheus import DEPLOY, Ask, fetch, prometheus_server, require
from tests.ports import find_free_port


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(scope="module")
def metrics(registry: CollectorRegistry) -> FarmMetrics:
    return FarmMetrics(registry)


def observe_campaign(metrics: FarmMetrics, trials: int) -> None:
    at = {"board_type": "jetson-nano", "point": "default"}
    models = [{"name": "mlp", "latency_s": 0.25, "predicted": 1, **at}]
    boards = [{"name": "sim-1", "doing": "measuring", **at}]
    known = (1, "vision", "running", "run", models, boards, 90.0, 60.0, trials * 0.1, ("jetson-nano",))
    sums = TrialSums(trials, {"ok": trials * 3 // 4, "candidate": trials // 4}, trials * 0.5, trials * 0.2)
    metrics.observe_campaigns({"running": 1}, [CampaignStanding(*known)], {1: sums})


@pytest.fixture(scope="module")
def coordinator(
    registry: CollectorRegistry, metrics: FarmMetrics, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Exporter]:
    """The coordinator's metrics, of a real store with two boards; one has been probed and is held."""
    with Store(tmp_path_factory.mktemp("home") / "farm.db") as store:
        for seed, name in enumerate(("sim-1", "sim-2")):
            store.boards.register(name, "jetson-nano", Virtual(seed))
        rows = store.boards.fetch()
        lease = make_lease(acquired_at=rows[0].added_at)
        metrics.observe_boards([rows[0].model_copy(update={"lease": lease}), *rows[1:]])
        metrics.observe_trials(store.trials.count_statuses())
    metrics.observe_link("sim-1", True, 3)
    metrics.observe_probe("sim-1", {"passed": True, "seconds": 0.4, "median_s": 0.01, "factor": 1.01})
    metrics.observe_tracker(True, 0)
    observe_campaign(metrics, trials=4)
    metrics.observe_disk(10, 100)
    with Exporter(registry, find_free_port()) as exporter:
        yield exporter


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = find_free_port()
    folder = tmp_path_factory.mktemp("board")
    command = [sys.executable, "-m", "farm.virtual", "metrics", "--virtual", "jetson-nano", "--name", "sim-1"]
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


def test_an_idle_board_is_live_on_its_page(
    coordinator: Exporter, board: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of a board reads its exporter: clocks, temperatures and power at once, the CPU's load at the next read.
    Without services or an exporter it says so.
    """
    coordinator.set_targets({"sim-1": ("jetson-nano", ("127.0.0.1", board))})
    monkeypatch.setattr(live, "_FRESH_S", 0.0)
    boards = live.LiveBoards(tmp_path)
    assert boards.read("sim-1") == []
    with SERVICES.hold(tmp_path):
        SERVICES.publish(tmp_path, metrics=coordinator.address)
        first, second = [boards.read("sim-1") for _ in range(2)][-1]
        assert boards.read("sim-2") == []
    assert first.cpu_load is None
    assert second.cpu_load is not None
    assert 0 <= second.cpu_load <= 1
    assert second.clock_hz.keys() >= {"a57", "gpu"}
    assert second.power_w["POM_5V_IN"] > 0.5
    assert 0 < (second.memory_used or 0) < (second.memory_total or 0)
    assert (second.gpu_load, min(second.temperature_c.values()) > 0) == (0.0, True)


def test_the_example_configuration_is_right() -> None:
    """Prometheus would start with it, and its rules parse and fire when they should."""
    promtool = require("promtool")
    for verb, kind, name in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "tvm-farm.rules.yml"),
        ("test", "rules", "tvm-farm.rules.test.yml"),
    ):
        done = subprocess.run(
            [promtool, verb, kind, str(DEPLOY / name)], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def ask(coordinator: Exporter, board: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A Prometheus by the example's configuration that has scraped both; what it answers to a query."""
    coordinator.set_targets({"sim-1": ("jetson-nano", ("127.0.0.1", board))})
    with prometheus_server(tmp_path_factory.mktemp("prometheus"), coordinator.address[1]) as ask:
        wait_until(lambda: len(ask("up == 1")) == 2, "both to be scraped")
        yield ask


def test_a_prometheus_server_scrapes_both(ask: Ask) -> None:
    """The coordinator by its address, the board by what the coordinator announces."""
    [offline] = ask('tvm_farm_boards{state="offline", health="suspect"}')
    assert offline["value"][1] == "2"
    [factor] = ask("tvm_farm_golden_kernel_factor")
    assert (factor["metric"]["board"], factor["value"][1]) == ("sim-1", "1.01")
    wait_until(lambda: ask('device_agent_power_watts{board="sim-1", rail="POM_5V_IN"}'), "the board's power")
    [who] = ask("device_agent_info")
    assert (who["metric"]["board"], who["metric"]["type"]) == ("sim-1", "jetson-nano")
    # A join of both sides: what the farm knows of a board beside what the board says.
    assert ask('device_agent_clock_hertz{domain="a57"} * on (board) group_left tvm_farm_board_link_up')


def test_every_panel_of_every_dashboard_has_series(ask: Ask, metrics: FarmMetrics) -> None:
    """A real Prometheus that has scraped a campaign, a failed probe and a board answers each of their expressions."""
    observe_campaign(metrics, trials=40)
    metrics.observe_probe("sim-1", {"passed": False, "seconds": 6.0})
    metrics.observe_link("sim-1", True, 4)
    metrics.observe_trials({"ok": 40})
    unanswered = {
        f"{path.stem}: {panel['title']}: {target['expr']}"
        for path in sorted((DEPLOY.parent / "grafana").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
        if "device_agent_alarm" not in target["expr"]  # a Nano has none
    }
    assert len(unanswered) > 40

    def are_answered() -> bool:
        for each in list(unanswered):
            query = each.split(": ", 2)[2].replace("$__rate_interval", "30s")
            if ask(query.replace("$campaign", "vision").replace("$board", "sim-1")):
                unanswered.discard(each)
        return not unanswered

    deadline = time.monotonic() + 60
    while not are_answered() and time.monotonic() < deadline:
        select.select([], [], [], 0.2)
    assert not unanswered


def test_a_board_that_hangs_is_told_of(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real services keep a virtual board that is made to hang; the rules' alert fires, here at one failed probe."""
    settings = Settings(home=str(tmp_path / "home"), tracker_port=find_free_port(), metrics_port=find_free_port())
    with Store(settings.store_location) as store:
        store.boards.register("sim-1", "jetson-nano", Virtual(0, faults=("hang",)))
    monkeypatch.setenv("FARM_TRACKER_PORT", str(settings.tracker_port))
    monkeypatch.setenv("FARM_METRICS_PORT", str(settings.metrics_port))
    services, _ = services_side.start_services(settings)
    try:
        assert services.info["metrics"] is not None
        (folder := tmp_path / "prometheus").mkdir()
        once = ('result="failed"}[15m]) > 1', 'result="failed"}[15m]) > 0')
        with prometheus_server(folder, services.info["metrics"][1], once) as ask:
            query = 'ALERTS{alertname="BoardFailsProbes", alertstate="firing"}'
            wait_until(lambda: ask(query), "the alert to fire", 200)
            [alert] = ask(query)
            assert (alert["metric"]["board"], alert["metric"]["severity"]) == ("sim-1", "warn")
            assert not ask('ALERTS{alertname="BoardOffline", alertstate="firing"}')
    finally:
        services.stop()
