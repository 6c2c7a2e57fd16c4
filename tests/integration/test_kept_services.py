"""The services that an engine keeps: real processes, without boards."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import anyio
import psutil
import pytest

from farm.campaign.engine.host import KeptServices
from farm.connectivity.services import Services, find_services, start_services
from farm.errors import FarmError
from farm.settings import Settings
from farm.store import Store
from tests.integration.conftest import wait_until
from tests.ports import find_free_port

PATIENCE_S = 100.0


@pytest.fixture
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    home = tmp_path_factory.mktemp("h")
    Store(home / "farm.db").close()
    return Settings(home=str(home), tracker_port=find_free_port(), metrics_port=0)


def test_services_that_were_killed_are_replaced(settings: Settings) -> None:
    """After kill -9 others are there by themselves; an operator's are used, and not replaced once they were ended."""
    notes: list[str] = []
    with KeptServices(settings, notes.append) as kept:
        first = find_services(settings)
        assert first is not None
        assert _answers(kept)
        kill(first)
        wait_until(lambda: _answers(kept) and _is_held(settings), "services")
        assert len(notes) == 2
        second = find_services(settings)
        assert second is not None
        kill(second)
        others, _ = start_services(settings)  # the engine may be first to start them
        wait_until(lambda: _answers(kept) and _is_held(settings), "services")
        said = list(notes)
        others.stop()
        wait_until(lambda: not _answers(kept), "their end")
    assert find_services(settings) is None
    assert notes == said


def test_services_that_are_ended_while_they_start_leave_nothing(settings: Settings, tmp_path: pathlib.Path) -> None:
    """Ctrl-C reaches a command that waits for them at any moment."""
    environment = {"TMPDIR": str(tmp_path), "FARM_HOME": settings.home, "FARM_TRACKER_PORT": str(find_free_port())}
    command = [sys.executable, "-m", "farm.services", "--stay", "--boards", ""]
    with subprocess.Popen(command, env=os.environ | environment) as process:
        wait_until(lambda: any(tmp_path.iterdir()) or process.poll() is not None, "its folder")
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert list(tmp_path.iterdir()) == []


def kill(services: Services) -> None:
    process = psutil.Process(services.info["pid"])
    process.kill()
    process.wait(PATIENCE_S)


def _answers(kept: KeptServices) -> bool:
    try:
        anyio.run(kept.tracker.fetch_summary, 1.0)
    except FarmError:
        return False
    return True


def _is_held(settings: Settings) -> bool:
    services = find_services(settings)
    return services is not None and bool(services.fetch_status()["held_by"])
