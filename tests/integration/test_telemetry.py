"""What the keeper of a real tracker knows is what a scrape gets."""

from __future__ import annotations

import pathlib
import urllib.request

import pytest

from farm.cli import services
from farm.errors import UsageError
from farm.services.keeper import Keeper
from farm.services.probe_rules import plan_probes
from farm.services.telemetry import Telemetry
from farm.settings import Settings
from farm.store import Store
from farm.store.standing import require_kept
from farm.values import Board
from tests.ports import find_free_port


def scrape(telemetry: Telemetry) -> dict[str, float]:
    assert telemetry.address is not None
    host, port = telemetry.address
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {series: float(value) for series, _, value in pairs}


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
    assert (board.state, board.health) == ("idle", "good")
    assert plan_probes([board], {}, (), 1e9, 600.0) == []
    with pytest.raises(UsageError, match="vm is this machine"):
        require_kept(board)


def test_the_farm_works_without_metrics(tmp_path: pathlib.Path) -> None:
    """0 switches them off; nothing listens then, and updates do no harm."""
    telemetry = Telemetry(Settings(home=str(tmp_path), metrics_port=0))
    assert telemetry.address is None
    telemetry.note_report({"board": "b1", "passed": True, "seconds": 1.0})
    telemetry.close()
