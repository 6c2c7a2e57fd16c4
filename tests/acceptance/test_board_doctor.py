"""`farm doctor` and `farm doctor --all`: a virtual board and one over SSH, up to a kernel run on each."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import signal
import sys
from collections.abc import Iterator

import pytest

from farm.store import Store
from farm.values import Ssh
from tests.acceptance.conftest import Home, new_home, wait_until
from tests.integration.sshd import Sshd, running_sshd
from tests.ports import find_free_port


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """The board behind SSH."""
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def fleet(sshd: Sshd) -> Iterator[Home]:
    """A home with a virtual board and one over SSH, on which no agent runs yet."""
    address = sshd.address
    transport = Ssh(
        address.host,
        address.user,
        address.port,
        str(address.key_file),
        sshd.host_key().fingerprint,
        find_free_port(),
        find_free_port(),
    )
    with new_home() as home:
        with Store(pathlib.Path(home.environment["FARM_HOME"]) / "farm.db") as store:
            store.boards.register("over-ssh", "local", transport)
        assert home.run("board", "add", "sim", "--virtual", "jetson-nano").code == 0
        home.environment |= {
            "AGENT_PORT": str(transport.agent_port),
            "AGENT_TRACKER": f"127.0.0.1:{transport.tracker_port}",
        }
        yield home


@pytest.mark.core
def test_every_hop_of_every_board_is_told(fleet: Home, tmp_path: pathlib.Path) -> None:
    """First without an agent, whose absence is named; then with one, as far as a kernel with the right result.

    The services that were started for it are gone afterwards.
    """
    done = fleet.run("doctor", "over-ssh")
    assert done.code == 3, done.err
    lines = {line[5:17].strip(): line for line in done.out.splitlines() if line[:4] in ("ok  ", "warn", "FAIL", "–   ")}
    assert lines["tunnel"].startswith("ok")
    assert lines["registration"].startswith("FAIL")
    assert lines["kernel"].startswith("–")
    assert "farm board logs over-ssh" in done.out
    with running_agent(fleet, tmp_path):
        documents = fleet.run("doctor", "--all", "--json").json()
    checks = {one["board"]: {check["name"]: check for check in one["checks"]} for one in documents}
    assert {board for board, found in checks.items() if all(check["ok"] for check in found.values())} == {
        "sim",
        "over-ssh",
    }, documents
    assert list(checks["over-ssh"])[3:9] == ["ssh key", "tcp", "host key", "ssh login", "machine", "forwarding"]
    for found in checks.values():
        assert "with the right result" in found["kernel"]["detail"]
    assert "simulated" in checks["sim"]["registered"]["detail"]
    wait_until(lambda: len(fleet.processes()) == 0, "the services to end")
    assert "no board 'b7'" in fleet.run("doctor", "b7").err


@contextlib.contextmanager
def running_agent(fleet: Home, folder: pathlib.Path) -> Iterator[None]:
    """An agent started as a person would by hand, over SSH."""
    port, log = fleet.environment["AGENT_PORT"], folder / "log"
    command = [sys.executable, "-m", "device_agent", "serve", "--name", "over-ssh", "--port", port, "--port-end", port]
    command += ["--tracker", fleet.environment["AGENT_TRACKER"]]
    line = f"cd /; TMPDIR={folder} setsid {shlex.join(command)} </dev/null >{log} 2>&1 & echo $!"
    done = fleet.run("board", "exec", "over-ssh", "--", line)
    assert done.code == 0, done.err
    try:
        wait_until(lambda: log.exists() and "listens on" in log.read_text(), "the agent")
        yield
    finally:
        os.kill(int(done.out), signal.SIGTERM)
