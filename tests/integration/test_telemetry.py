"""What the keeper of a real tracker knows is what a scrape gets."""

from __future__ import annotations

import os
import pathlib
import signal
import urllib.request

import pytest

from farm.cli import services
from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.errors import UsageError
from farm.services.keeper import Keeper
from farm.services.probe_rules import plan_probes
from farm.services.telemetry import Telemetry
from farm.settings import Settings
from farm.store import Store
from farm.store.standing import require_kept
from farm.values import Board, Virtual
from tests.integration.conftest import wait_until
from tests.ports import find_free_port


def scrape(telemetry: Telemetry) -> dict[str, float]:
    assert telemetry.address is not None
    host, port = telemetry.address
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {series: float(value) for series, _, value in pairs}


def test_boards_tracker_and_probes_are_exported(tmp_path: pathlib.Path) -> None:
    """A board's health, a tracker that was killed, and a report, as soon as the keeper knows of them."""
    settings = Settings(home=str(tmp_path), tracker_port=find_free_port(), metrics_port=find_free_port())
    with Store(tmp_path / "farm.db") as store:
        store.boards.register("b1", "jetson-nano", Virtual(0))
        store.boards.observe("b1", Kind.DRAIN, "test", decide_by(Observation(Kind.DRAIN, ""), HealthLimits()))
        keeper = Keeper(settings, store, 1, [], tmp_path / "logs")
        telemetry = Telemetry(settings)
        keeper.watchers.append(telemetry.watch)
        try:
            keeper.step()
            before = scrape(telemetry)
            telemetry.note_report({"board": "b1", "passed": False, "seconds": 3.0})
            process = keeper.tracker._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)

            def restarted() -> bool:
                keeper.step()
                return scrape(telemetry)["tvm_farm_tracker_restarts_total"] == 1

            wait_until(restarted, "the tracker's restart to be exported")
            after = scrape(telemetry)
        finally:
            telemetry.close()
            keeper.close()
    assert before['tvm_farm_boards{health="maintenance",state="offline"}'] == 1
    assert before["tvm_farm_tracker_up"] == 1
    assert before['tvm_farm_trials_total{status="ok"}'] == 0
    assert after['tvm_farm_probes_total{board="b1",result="failed"}'] == 1
    assert after["tvm_farm_tracker_up"] == 1


def test_this_machine_is_not_missed_between_two_tunings(tmp_path: pathlib.Path) -> None:
    """What `farm tune` wrote to the store of this machine has no agent while nothing uses it: it is out of reach,
    waits for it, probes it, or has Prometheus tell of it.
    """
    settings = Settings(home=str(tmp_path), tracker_port=find_free_port(), metrics_port=find_free_port())
    with Store(tmp_path / "farm.db") as store:
        store.boards.save(Board("vm", "local", False, {}))
        keeper = Keeper(settings, store, 1, None, tmp_path / "logs")
        telemetry = Telemetry(settings)
        keeper.watchers.append(telemetry.watch)
        try:
            for _ in range(3):
                keeper.step()
            series = scrape(telemetry)
            kept = dict(keeper.boards)
        finally:
            telemetry.close()
            keeper.close()
        board = store.boards.require("vm")
        assert services.list_in_service(store) == []
    assert kept == {}
    assert series['tvm_farm_board_state{board="vm",state="offline"}'] == 0
    assert (board["state"], board["health"]) == ("idle", "good")
    assert plan_probes([board], {}, (), 1e9, 600.0) == []
    with pytest.raises(UsageError, match="vm is this machine"):
        require_kept(board)


def test_the_farm_works_without_metrics(tmp_path: pathlib.Path) -> None:
    """0 switches them off; nothing listens then, and updates do no harm."""
    telemetry = Telemetry(Settings(home=str(tmp_path), metrics_port=0))
    assert telemetry.address is None
    telemetry.note_report({"board": "b1", "passed": True, "seconds": 1.0})
    telemetry.close()
