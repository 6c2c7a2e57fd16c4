"""Boards behind other hosts, as the user's OpenSSH configuration names them: real sshds, one behind another."""

from __future__ import annotations

import contextlib
import getpass
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from farm.cli.first_contact import confirm_host_keys
from farm.connectivity.host_keys import KnownHosts
from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_config import to_ssh_address
from farm.errors import FarmError, PermanentError, TransientError
from farm.values import Ssh
from tests.integration import board_hosts
from tests.integration.board_hosts import BoardHost, HostSshd
from tests.integration.conftest import wait_until
from tests.integration.sshd import make_key

BOARD = "192.0.2.10"


class Gate(BoardHost):
    def boot(self) -> None:
        self.sshd.start()


class Lab:
    """A gate that this machine reaches, and a board that only the gate does; keys are in `home`."""

    def __init__(self, gate: Gate, board: HostSshd, home: pathlib.Path) -> None:
        self.gate, self.board, self.home = gate, board, home
        self.known_hosts = KnownHosts(home / "known_hosts")

    @property
    def registered(self) -> Ssh:
        """As `farm board add nano --ssh nano` has it: everything else is in the configuration."""
        return Ssh("nano", "")

    def trust(self) -> dict[str, FarmError]:
        accept = [self.gate.fingerprint, self.board.host_key().fingerprint]
        return confirm_host_keys({"nano": to_ssh_address(self.registered)}, self.known_hosts, accept)


@pytest.fixture
def lab(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    board_hosts.require_namespaces()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FARM_SSH_KEY", "FARM_SSH_CONFIG", "SSH_AUTH_SOCK"):
        monkeypatch.delenv(name, raising=False)
    ip = board_hosts._ip
    with contextlib.ExitStack() as stack:
        gate = Gate("gate", tmp_path / "gate")
        stack.callback(gate.remove)
        gate.start()
        hidden = f"{gate.namespace}b"
        ip("netns", "add", hidden)
        stack.callback(ip, "netns", "del", hidden, check=False)
        ip("-n", gate.namespace, "link", "add", "lab", "type", "veth", "peer", "name", "eth0", "netns", hidden)
        for namespace, device, address in ((gate.namespace, "lab", "192.0.2.9"), (hidden, "eth0", BOARD)):
            ip("-n", namespace, "addr", "add", f"{address}/30", "dev", device)
            ip("-n", namespace, "link", "set", device, "up")
        board = HostSshd(tmp_path / "board", port=22, namespace=hidden, host=BOARD, is_hidden=True)
        stack.callback(board.stop)
        board.start()
        folder = tmp_path / ".ssh"
        folder.mkdir()
        (folder / "config").write_text(
            f"Host gate\n HostName {gate.address}\n IdentityFile {gate.key_file}\n"
            f"Host nano\n HostName {BOARD}\n ProxyJump gate\n IdentityFile {board.folder / 'user_key'}\n"
            f"Host *\n User {getpass.getuser()}\n"
        )
        yield Lab(gate, board, tmp_path)


def test_a_board_behind_another_host_is_reached_by_its_alias(lab: Lab) -> None:
    """Both host keys have to be confirmed, the nearer one first; then commands run on the board. When the host between
    goes, the connection is lost.
    """
    address = to_ssh_address(lab.registered)
    assert "gate" in str(confirm_host_keys({"nano": address}, lab.known_hosts)["nano"])
    assert lab.trust() == {}
    assert [key.fingerprint for key in lab.known_hosts.find("nano", 22)] == [lab.board.host_key().fingerprint]
    with SshConnection.connect(address, lab.known_hosts) as connection:
        done = connection.exec("echo $SSH_CONNECTION", 10.0)
        assert done.out.split()[0] == b"192.0.2.9"  # it sees the gate
        lab.gate.sshd.drop_sessions()
        assert connection.lost.wait(15)


def test_keys_of_the_running_agent_are_shown(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the agent holds is enough; without it, a key that no host accepts is refused."""
    assert lab.trust() == {}
    config = lab.home / ".ssh/config"
    config.write_text("".join(line for line in config.read_text().splitlines(True) if "IdentityFile" not in line))
    make_key(lab.home / ".ssh/id_ed25519")
    with pytest.raises(PermanentError, match="refuses the key"):
        SshConnection.connect(to_ssh_address(lab.registered), lab.known_hosts)
    socket = lab.home / "agent.sock"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        wait_until(socket.exists, "the agent")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        for key in (lab.gate.key_file, lab.board.folder / "user_key"):
            subprocess.run(["ssh-add", "-q", str(key)], check=True, timeout=20, env=os.environ)
        with SshConnection.connect(to_ssh_address(lab.registered), lab.known_hosts) as connection:
            assert connection.exec("true", 10.0).code == 0
    finally:
        agent.terminate()
        agent.wait(10)


def test_a_board_that_is_off_is_told_from_the_host_before_it(lab: Lab) -> None:
    """What fails says which of the two it was, and nothing of ours is left on the way."""
    assert lab.trust() == {}
    lab.board.stop()
    with pytest.raises(TransientError, match="gate:22 cannot connect to nano:22"):
        SshConnection.connect(to_ssh_address(lab.registered), lab.known_hosts)
    wait_until(lambda: not lab.gate.sshd.sessions(), "the connection to the gate to end")
    lab.gate.sshd.stop()
    with pytest.raises(TransientError, match="on the way to nano:22"):
        SshConnection.connect(to_ssh_address(lab.registered), lab.known_hosts)
