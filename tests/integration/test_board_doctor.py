"""The doctor's hops, each made to fail with the real thing; what comes after a failed one is not tried."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from farm.connectivity.host_keys import KnownHosts
from farm.connectivity.tracker import Tracker
from farm.crew.health import HealthLimits, Kind, Observation, decide_by
from farm.search import tvm_env
from farm.services.board_doctor import check_boards
from farm.services.checks import Check, Doubt, Level, run_chain
from farm.services.doctor_agent import AgentHops
from farm.services.doctor_ssh import SshHops
from farm.settings import Settings
from farm.store import Store
from farm.values import Direct, Health, Ssh
from tests.integration.conftest import Agent, wait_until
from tests.integration.sshd import Sshd, make_key, running_sshd
from tests.ports import find_free_port

# These tests share a process with ones that compile: the session alone would load TVM's runtime only.
tvm_env.load()

PROTOCOL_1 = (
    "import sys, device_agent.protocol as p; p.PROTOCOL_VERSION = 1; from device_agent import agent; agent.main()"
)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """The board of this module."""
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def run_ssh(sshd: Sshd, folder: pathlib.Path, **changes: Any) -> list[Check]:
    """What the hops over SSH find; `changes` are those of the address."""
    address = dataclasses.replace(sshd.pinned, **changes)
    transport = Ssh(address.host, address.user, address.port, agent_port=find_free_port())
    hops = SshHops("b1", transport, address, KnownHosts(folder / "known_hosts"))
    checks: list[Check] = []
    try:
        run_chain(hops.plan(), checks.append)
    finally:
        hops.close()
    return checks


def find_failed(checks: list[Check]) -> Check:
    """The one that failed; those before it did not, those after it were not tried."""
    [failed] = [check for check in checks if check.level is Level.FAILED]
    at = checks.index(failed)
    assert all(check.ok for check in checks[:at]), checks
    assert {check.level for check in checks[at + 1 :]} <= {Level.NOT_TRIED}, checks
    return failed


def test_the_way_over_ssh_is_told_hop_by_hop(sshd: Sshd, tmp_path: pathlib.Path) -> None:
    """Each hop says what it found; a board without an installation works as far as SSH goes."""
    checks = {check.name: check for check in run_ssh(sshd, tmp_path)}
    assert list(checks) == ["ssh key", "tcp", "host key", "ssh login", "machine", "forwarding", "services"]
    assert all(check.ok for check in checks.values()), checks
    assert sshd.host_key().fingerprint in checks["host key"].detail
    assert "OpenSSH" in checks["ssh login"].detail
    assert os.uname().machine in checks["machine"].detail
    assert checks["forwarding"].level is Level.WARNING
    assert "nothing listens" in checks["forwarding"].detail
    wait_until(lambda: not sshd.sessions(), "the connections to end")


def test_a_key_file_that_is_not_there_is_named(sshd: Sshd, tmp_path: pathlib.Path) -> None:
    """Before anything is connected to."""
    failed = find_failed(run_ssh(sshd, tmp_path, key_file=tmp_path / "none"))
    assert failed.name == "ssh key"
    assert str(tmp_path / "none") in failed.detail


def test_a_port_without_a_server_is_named(sshd: Sshd, tmp_path: pathlib.Path) -> None:
    """The machine answers that nothing listens."""
    failed = find_failed(run_ssh(sshd, tmp_path, port=find_free_port()))
    assert failed.name == "tcp"
    assert "refuses connections" in failed.detail


def test_a_name_that_leads_nowhere_is_named(sshd: Sshd, tmp_path: pathlib.Path) -> None:
    """By the resolver's own word."""
    failed = find_failed(run_ssh(sshd, tmp_path, host="no-such-board.invalid"))
    assert failed.name == "tcp"
    assert "no-such-board.invalid" in failed.detail


def test_what_is_no_ssh_server_is_named(sshd: Sshd, tmp_path: pathlib.Path) -> None:
    """It takes the connection and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        code = f"import socket; s = socket.fromfd({listener.fileno()}, 2, 1)\nwhile True: s.accept()[0].close()"
        server = subprocess.Popen([sys.executable, "-c", code], pass_fds=[listener.fileno()])
        try:
            failed = find_failed(run_ssh(sshd, tmp_path, port=listener.getsockname()[1]))
        finally:
            server.kill()
            server.wait()
    assert failed.name == "host key"
    assert "no SSH server" in failed.detail


@pytest.mark.parametrize(("pinned", "says"), [("", "is not confirmed"), ("SHA256:" + "A" * 43, "HAS CHANGED")])
def test_a_host_key_that_is_not_the_pinned_one_is_named(
    sshd: Sshd, tmp_path: pathlib.Path, pinned: str, says: str
) -> None:
    """With the command that confirms it, or loudly."""
    failed = find_failed(run_ssh(sshd, tmp_path, host_key=pinned))
    assert failed.name == "host key"
    assert says in failed.detail
    assert sshd.host_key().fingerprint in failed.detail


def test_a_login_that_is_refused_is_named(sshd: Sshd, tmp_path: pathlib.Path) -> None:
    """With what puts the key there."""
    failed = find_failed(run_ssh(sshd, tmp_path, key_file=make_key(tmp_path / "unknown")))
    assert failed.name == "ssh login"
    assert "ssh-copy-id" in failed.advice


def test_a_server_that_forbids_forwarding_is_named(tmp_path: pathlib.Path) -> None:
    """With the line of sshd_config."""
    with running_sshd(tmp_path / "sshd", "AllowTcpForwarding no") as server:
        failed = find_failed(run_ssh(server, tmp_path))
    assert failed.name == "forwarding"
    assert "AllowTcpForwarding" in failed.advice


class OneBoard:
    """What the doctor asks of the services, told by a real tracker: one board, whose way always stands."""

    def __init__(self, tracker: Any, key: str, is_reachable: bool = False) -> None:
        """`is_reachable`, independent of the tracker."""
        self.tracker = Tracker(tracker.host, tracker.port)
        self._key, self._is_reachable = key, is_reachable

    def fetch_status(self) -> dict[str, Any]:
        """As the services' own."""
        known = {info.get("key") for info in anyio.run(self.tracker.fetch_summary)["server_info"]}
        reachable = self._is_reachable or f"server:{self._key}" in known
        name = self._key.partition("/")[2]
        board = {
            "name": name,
            "way_up": True,
            "way_since_s": 1.0,
            "connects": 1,
            "reachable": reachable,
            "trouble": "?",
        }
        return {"boards": [board]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One for the module: it keeps the golden kernel."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def store(home: pathlib.Path) -> Iterator[Store]:
    """A new one for each test."""
    for path in home.glob("farm.db*"):
        path.unlink()
    with Store(home / "farm.db") as store:
        yield store


def run_agent(home: pathlib.Path, store: Store, tracker: Any, key: str, is_reachable: bool = False) -> list[Check]:
    """What the hops from the tracker on find of the board whose key this is; it is registered here unless it is."""
    board_type, _, name = key.partition("/")
    if name not in {row.name for row in store.boards.fetch()}:
        store.boards.register(name, board_type, Direct())
        store.boards.observe(name, Kind.BACK, "test", decide_by(Observation(Kind.BACK, ""), HealthLimits()))
    services: Any = OneBoard(tracker, key, is_reachable)
    hops = AgentHops(Settings(home=str(home)), store, store.boards.require(name), lambda: services, lambda: "")
    checks: list[Check] = []
    try:
        run_chain(hops.plan(), checks.append)
    finally:
        hops.close()
    return checks


def test_a_kernel_is_run_and_the_board_given_back(
    home: pathlib.Path, store: Store, tracker: Any, start_agent: Callable[..., Agent]
) -> None:
    """Every hop of a virtual board is ok; its lease is over afterwards."""
    agent = start_agent("--virtual", "jetson-nano", "--tracker", f"{tracker.host}:{tracker.port}")
    key = agent.key.replace("local", "jetson-nano")
    checks = {check.name: check for check in run_agent(home, store, tracker, key)}
    assert {check.level for check in checks.values()} == {Level.OK}, checks
    assert "restored" in checks["clocks"].detail
    assert "with the right result" in checks["kernel"].detail
    assert store.boards.require(key.partition("/")[2]).lease is None
    agent.stop()


def test_sensors_are_looked_for_again(
    home: pathlib.Path, store: Store, tracker: Any, start_agent: Callable[..., Agent], tmp_path: pathlib.Path
) -> None:
    """One that fails from the start gives no energy, and both doctors say why; the next session finds what has come."""
    options = ("--root", str(tmp_path), "--board-type", "jetson-nano")
    agent = start_agent(*options, "--tracker", f"{tracker.host}:{tracker.port}")
    key = agent.key.replace("local", "jetson-nano")
    device = tmp_path / "sys/bus/i2c/devices/6-0040"
    (device / "iio:device0").mkdir(parents=True)
    (device / "name").write_text("ina3221x")
    for channel, text in enumerate(("garbage", "600", "700")):
        (device / f"iio:device0/in_power{channel}_input").write_text(text)

    def check() -> str:
        [sensors] = (each for each in run_agent(home, store, tracker, key) if each.name == "sensors")
        return sensors.detail

    assert "POM_5V_IN: no energy: POM_5V_IN is not a number" in check()
    command = [sys.executable, "-m", "farm.virtual" if "--virtual" in options else "device_agent", "doctor", *options]
    doctor = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    assert "no energy: POM_5V_IN is not a number" in doctor
    assert "no energy: POM_5V_IN cannot be read" in doctor
    (device / "iio:device0/in_power0_input").write_text("3000")
    assert "no energy" not in check()
    agent.stop()


def test_an_older_agent_is_told_from_one_that_does_not_answer(
    home: pathlib.Path, store: Store, tracker: Any, tmp_path: pathlib.Path
) -> None:
    """It answers; the protocol is what fails, and the advice says which side to update."""
    ready = tmp_path / "ready"
    command = [sys.executable, "-c", PROTOCOL_1, "serve", "--name", "old", "--ready-file", str(ready)]
    process = subprocess.Popen([*command, "--tracker", f"{tracker.host}:{tracker.port}"])
    try:
        wait_until(ready.exists, "the agent")
        key = json.loads(ready.read_text())["key"]
        checks = run_agent(home, store, tracker, key)
    finally:
        process.kill()
        process.wait()
    failed = find_failed(checks)
    assert failed.name == "protocol"
    assert "update device-agent on the board" in failed.advice


def test_a_board_of_another_type_is_told(
    home: pathlib.Path, store: Store, tracker: Any, start_agent: Callable[..., Agent]
) -> None:
    """Its device tree takes precedence over the configuration of its agent."""
    where = f"{tracker.host}:{tracker.port}"
    agent = start_agent("--virtual", "jetson-nano", "--board-type", "jetson-tx2", "--tracker", where)
    failed = find_failed(run_agent(home, store, tracker, agent.key.replace("local", "jetson-tx2")))
    assert failed.name == "board type"
    assert "registered as jetson-tx2, but its device tree says jetson-nano" in failed.detail
    agent.stop()


def test_a_board_that_somebody_holds_is_not_disturbed(home: pathlib.Path, store: Store, tracker: Any) -> None:
    """The holder is named, and nothing of it is touched."""
    store.boards.register("held", "local", Direct())
    store.boards.observe("held", Kind.BACK, "test", decide_by(Observation(Kind.BACK, ""), HealthLimits()))
    store.leases.acquire("held", "alice", "tuning", allowed=frozenset(Health))
    checks = run_agent(home, store, tracker, "local/held", is_reachable=True)
    failed = find_failed(checks)
    assert failed.name == "lease"
    assert "alice has it for tuning" in failed.detail
    assert store.boards.require("held").lease.owner == "alice"


def test_doctor_tells_each_board_s_state_without_connecting(home: pathlib.Path, store: Store) -> None:
    """Suspect boards are worth a look, unsafe boards a failure; services that do not run are not."""
    for name in ("a", "b"):
        store.boards.register(name, "jetson-nano", Ssh("192.0.2.1", "farm"))
    store.boards.observe("b", Kind.UNSAFE, "test", decide_by(Observation(Kind.UNSAFE, "stuck"), HealthLimits()))
    services, first, second = check_boards(Settings(home=str(home)), store)
    assert services.ok
    assert "not running" in services.detail
    assert (first.name, first.level, first.advice) == ("board a", Level.WARNING, "farm doctor a")
    assert (second.level, "stuck" in second.detail) == (Level.FAILED, True)


def test_a_doubt_does_not_stop_the_chain() -> None:
    """Only what failed does; the rest names it."""
    checks: list[Check] = []
    hops: list[tuple[str, Callable[[], str | Doubt]]] = [
        ("one", lambda: Doubt("odd", "look")),
        ("two", lambda: pathlib.Path("/nowhere/at/all").read_text()),
        ("three", lambda: "never"),
    ]
    assert not run_chain(hops, checks.append)
    assert [check.level for check in checks] == [Level.WARNING, Level.FAILED, Level.NOT_TRIED]
    assert checks[2].detail == "needs two"
