"""What keeps a board's agent running where there is no systemd, on a board that has a bad day."""

from __future__ import annotations

import contextlib
import json
import pathlib
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.integration.conftest import wait_until

SUPERVISOR = pathlib.Path(__file__).parents[2] / "deploy" / "board" / "supervisor.py"


@pytest.fixture
def prefix(tmp_path: pathlib.Path) -> pathlib.Path:
    for name in ("etc", "current/bin", "run", "log"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc" / "board.json").write_text(json.dumps({"user": "", "agent": [], "helper": False}))
    python = tmp_path / "current" / "bin" / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    return tmp_path


@contextlib.contextmanager
def supervising(prefix: pathlib.Path) -> Iterator[psutil.Process]:
    """The supervisor of an installation; it is ended as a board's stop would."""
    with (prefix / "log" / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(SUPERVISOR), "--prefix", str(prefix), "run"], stdout=log, stderr=log
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def read_agent(prefix: pathlib.Path) -> int | None:
    """The agent's process number, as the state has it."""
    with contextlib.suppress(OSError):
        pid: int | None = json.loads((prefix / "run" / "state.json").read_text())["services"]["agent"]["pid"]
        return pid
    return None


def set_room(process: psutil.Process, size: int) -> None:
    """No file may grow beyond `size` by this process' hand, as on a full disk."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_does_not_end_the_supervisor(prefix: pathlib.Path) -> None:
    """An agent that ends while nothing can be written is started again; what happened is said once there is room."""
    log = prefix / "log" / "supervisor.log"
    (prefix / "log" / "agent.log").write_bytes(b"x" * (5 << 20))
    with supervising(prefix) as supervisor:
        wait_until(lambda: read_agent(prefix) is not None, "the agent to start")
        [agent] = supervisor.children()
        (prefix / "log" / "agent.log").write_bytes(b"x" * (5 << 20))  # one to trim, for which there is no room
        set_room(supervisor, 0)
        agent.kill()
        wait_until(
            lambda: any(child.pid != agent.pid for child in supervisor.children()), "the agent to be started again"
        )
        [again] = supervisor.children()
        assert read_agent(prefix) == agent.pid
        assert "ended with -9" not in log.read_text()
        set_room(supervisor, resource.RLIM_INFINITY)
        wait_until(lambda: read_agent(prefix) == again.pid, "the state to be written")
        wait_until(lambda: "no longer: the state cannot be written" in log.read_text(), "the log to say so")
    assert "agent ended with -9" in log.read_text()


def test_a_full_disk_from_the_start(prefix: pathlib.Path) -> None:
    """What needs files to begin with is tried until there is room; the supervisor can be stopped all the while."""
    (prefix / "tmp").write_text("in the way of a folder")
    with supervising(prefix) as supervisor:
        log = prefix / "log" / "supervisor.log"
        wait_until(lambda: "the services cannot be prepared" in log.read_text(), "the trouble to be said")
        (prefix / "tmp").unlink()
        wait_until(lambda: bool(supervisor.children()), "the agent to start")
