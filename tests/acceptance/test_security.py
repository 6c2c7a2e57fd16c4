"""Who reaches a board: its agent listens on its own loopback, and no client logs in without the key."""

from __future__ import annotations

import errno
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.acceptance.conftest import wait_until
from tests.acceptance.rack import Rack, running_rack
from tests.integration.sshd import make_key

pytestmark = pytest.mark.core

_AT_ONCE = 1000


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with running_rack(tmp_path_factory.mktemp("rack")) as rack:
        yield rack


def find_open_ports(address: str) -> list[int]:
    """Every TCP port of an address that takes a connection; asks each of the 65535."""
    found = []
    ports = list(range(1, 65536))
    for first in range(0, len(ports), _AT_ONCE):
        poll, waiting = select.poll(), {}
        for port in ports[first : first + _AT_ONCE]:
            sock = socket.socket()
            sock.setblocking(False)
            if sock.connect_ex((address, port)) in (0, errno.EINPROGRESS):
                waiting[sock.fileno()] = (sock, port)
                poll.register(sock, select.POLLOUT)
            else:
                sock.close()
        while waiting:
            ready = poll.poll(10_000)
            assert ready, f"{len(waiting)} ports of {address} gave no answer"
            for number, _ in ready:
                sock, port = waiting.pop(number)
                poll.unregister(number)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.append(port)
                sock.close()
    return found


def test_a_port_scan_of_the_board_finds_ssh_alone(rack: Rack) -> None:
    """With the tunnel up, agent and tracker listen on the board's loopback, and from outside only sshd answers."""
    listening = rack.host.listening()
    assert {port for address, port in listening if address == "127.0.0.1"} >= {9090, 9190}
    outside = {(address, port) for address, port in listening if not address.startswith("127.") and address != "::1"}
    assert outside == {(rack.host.address, 22)}
    assert find_open_ports(rack.host.address) == [22]


def test_the_coordinator_opens_loopback_ports_only(rack: Rack) -> None:
    """Tracker, forwards and metrics are for this machine alone."""
    status = rack.home.run("status", "--json").json()
    assert status["tracker"]["host"] == "127.0.0.1"
    mine = [process.pid for process in rack.home.processes()]
    assert status["pid"] in mine
    listeners = {
        connection.laddr.ip
        for pid in mine
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listeners == {"127.0.0.1"}


def test_a_client_without_the_key_gets_nowhere(rack: Rack) -> None:
    """Another SSH key is turned away, the agent's port is closed from outside, a made-up match key is refused."""
    foreign = make_key(rack.home.path / "foreign")
    command = ["ssh", "-i", str(foreign), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
    command += ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={rack.home.path}/known"]
    done = subprocess.run([*command, f"root@{rack.host.address}", "true"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 255
    assert "Permission denied" in done.stderr

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((rack.host.address, 9090), timeout=5).close()

    tracker = rack.home.run("status", "--json").json()["tracker"]
    program = (
        "import sys\nfrom tvm import rpc\n"
        "tracker = rpc.connect_tracker(sys.argv[1], int(sys.argv[2]))\n"
        "[server] = tracker.summary()['server_info']\n"
        "rpc.connect(server['addr'][0], server['addr'][1], key=server['key'].removeprefix('server:') + ':0.123')\n"
    )
    refused = subprocess.run(
        [sys.executable, "-c", program, tracker["host"], str(tracker["port"])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 1
    assert "cannot find server that matches key" in refused.stderr
    wait_until(lambda: rack.state().startswith("online"), "the board to be as before", 10)
