"""Forwards through a real OpenSSH server: bytes, cuts, and coming back after a loss."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from farm.connectivity.board_link import BoardLink
from farm.connectivity.frames import FrameFilter
from farm.connectivity.host_keys import HostKeyError
from farm.connectivity.ssh import SshConnection
from farm.connectivity.tunnels import Forward, ReverseForward
from farm.errors import DeadlineError, PermanentError, TransientError
from farm.processes.children import Backoff
from tests import hostile_board
from tests.integration import candidates
from tests.integration.conftest import wait_until
from tests.integration.sshd import Sshd, read_all, require_end, running_sshd
from tests.integration.stock_board import listens, stock_board
from tests.ports import find_free_port

PATIENCE_S = 20.0
QUICK = Backoff(first_s=0.1, last_s=0.5)
# TVM's own client holds the interpreter while it copies: it cannot share a process with the forward.
_STOCK_SCRIPT = """
import pathlib, sys
import numpy as np
import tvm
from tvm import rpc

host, port, path, size = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]), int(sys.argv[4])
remote = rpc.connect(host, port)
remote.upload(str(path))
module = remote.load_module(path.name)
device = remote.cpu()
a, b = (np.random.default_rng(seed).random((size, size), "float32") for seed in (1, 2))
arrays = [tvm.runtime.tensor(value, device) for value in (a, b, np.zeros((size, size), "float32"))]
assert len(module.time_evaluator("main", device, number=1, repeat=2)(*arrays).results) == 2
np.testing.assert_allclose(arrays[2].numpy(), a @ b, rtol=1e-3)
assert bytes(remote.download(path.name)) == path.read_bytes()
try:
    remote.load_module("nowhere.so")
except Exception as error:
    assert "nowhere" in str(error)
    print("as ever")
"""


@pytest.fixture
def service() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        yield listener


@pytest.fixture
def joined(connection: SshConnection, service: socket.socket) -> Iterator[tuple[Forward, socket.socket, socket.socket]]:
    """A forward with its two ends: the client's socket and the board's."""
    with (
        Forward(lambda: connection, service.getsockname()[1]) as forward,
        socket.create_connection(forward.address, PATIENCE_S) as client,
    ):
        server, _ = service.accept()
        server.settimeout(PATIENCE_S)
        with server:
            yield forward, client, server


def test_bytes_pass_both_ways_unchanged(joined: tuple[Forward, socket.socket, socket.socket]) -> None:
    """Five megabytes each way at the same time arrive as they were sent."""
    _, client, server = joined
    up, down = bytes(range(256)) * 20_000, bytes(reversed(range(256))) * 20_000
    got: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=client.sendall, args=(up,)),
        threading.Thread(target=server.sendall, args=(down,)),
        threading.Thread(target=lambda: got.update(up=read_all(server, len(up)))),
        threading.Thread(target=lambda: got.update(down=read_all(client, len(down)))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert got == {"up": up, "down": down}


def test_a_cut_ends_a_blocked_read_at_once(joined: tuple[Forward, socket.socket, socket.socket]) -> None:
    """A client that waits for an answer gets the end of the stream; so does the board. The board is not blamed."""
    forward, client, server = joined
    threading.Timer(0.05, forward.cut).start()
    require_end(client)
    require_end(server)
    # The board's end stays open: nothing here waits for it.
    wait_until(
        lambda: not any(t.name in ("farm-ssh-in", "farm-ssh-out") for t in threading.enumerate()), "the threads", 5
    )
    assert not forward.board_ended.is_set()
    forward.cut()
    with pytest.raises(OSError), socket.create_connection(forward.address, 0.5):
        pass


def test_links_can_be_cut_and_the_address_stays(
    joined: tuple[Forward, socket.socket, socket.socket], service: socket.socket
) -> None:
    """One overdue client is ended; the next one gets through at the same address."""
    forward, client, server = joined
    forward.cut_links()
    require_end(client)
    require_end(server)
    with socket.create_connection(forward.address, PATIENCE_S) as again:
        other, _ = service.accept()
        with other:
            other.sendall(b"hello")
            assert read_all(again, 5) == b"hello"


def test_a_board_that_hangs_up_is_said_to(joined: tuple[Forward, socket.socket, socket.socket]) -> None:
    """When the client notices the end, it is already known that the board caused it."""
    forward, client, server = joined
    server.sendall(b"last words")
    server.close()
    assert read_all(client, 10) == b"last words"
    assert client.recv(1) == b""
    assert forward.board_ended.is_set()


@pytest.mark.core
def test_a_forward_to_an_agent_lets_nothing_but_answers_pass(connection: SshConnection, service: socket.socket) -> None:
    """A stock client that comes through the tunnel is protected too, and the forward says from what."""
    with (
        Forward(lambda: connection, service.getsockname()[1], check=FrameFilter) as forward,
        socket.create_connection(forward.address, PATIENCE_S) as client,
    ):
        server, _ = service.accept()
        with server:
            good = hostile_board.GREETING + hostile_board.answer("{}")
            server.sendall(good)
            assert read_all(client, len(good)) == good
            server.sendall(hostile_board.frame(hostile_board.CALL, b"\x01" * 12))
            require_end(client)
            wait_until(lambda: bool(forward.refused), "the reason", 5)
    assert "code 3" in forward.refused
    assert not forward.board_ended.is_set()


def test_a_stock_client_and_a_stock_board_work_through_a_forward(
    connection: SshConnection, tmp_path: pathlib.Path, matmul: bytes
) -> None:
    """All that TVM's own server answers a stock script passes: modules, tensors, timings, errors, copies of bytes."""
    (tmp_path / "matmul.so").write_bytes(matmul)
    with stock_board(tmp_path) as port:
        wait_until(lambda: listens(port), "the server")
        with Forward(lambda: connection, port, check=FrameFilter) as forward:
            script = [sys.executable, "-c", _STOCK_SCRIPT, *map(str, forward.address), str(tmp_path / "matmul.so")]
            done = subprocess.run([*script, str(candidates.SIZE)], capture_output=True, text=True, timeout=100)
            assert done.stdout == "as ever\n", done.stderr[-3000:]
            assert forward.refused == ""


def test_a_client_that_leaves_is_not_the_boards_fault(joined: tuple[Forward, socket.socket, socket.socket]) -> None:
    """The board sees the end of the stream, and gets no blame for hanging up."""
    forward, client, server = joined
    client.close()
    assert server.recv(1) == b""
    server.close()
    assert not forward.board_ended.wait(0.2)
    wait_until(lambda: len(forward) == 0, "the link's end", 5)


def test_an_agent_that_does_not_listen(connection: SshConnection) -> None:
    """The client's connection ends at once, and it counts as the board's doing."""
    with (
        Forward(lambda: connection, find_free_port()) as forward,
        socket.create_connection(forward.address, PATIENCE_S) as client,
    ):
        require_end(client)
        assert forward.board_ended.wait(1)
        assert isinstance(forward.last_error, TransientError)


def test_a_client_that_does_not_read_holds_up_nobody_else(
    joined: tuple[Forward, socket.socket, socket.socket], service: socket.socket
) -> None:
    """One connection's buffers are full; another one through the same SSH connection goes on."""
    forward, _, server = joined
    server.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        while True:
            server.sendall(bytes(1 << 20))
    with socket.create_connection(forward.address, PATIENCE_S) as other:
        far, _ = service.accept()
        with far:
            far.sendall(b"hello")
            assert read_all(other, 5) == b"hello"


def test_a_cut_does_not_wait_for_a_board_that_hangs(
    joined: tuple[Forward, socket.socket, socket.socket], sshd: Sshd
) -> None:
    """Everything on the way is full and the session is stopped: the client is free at once all the same."""
    forward, client, _ = joined
    sessions = sshd.sessions()
    for process in sessions:
        process.suspend()
    try:
        client.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while True:
                client.sendall(bytes(1 << 20))
        began = time.monotonic()
        forward.cut()
        require_end(client)
        assert time.monotonic() - began < 0.5
    finally:
        for process in sessions:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def test_forwarding_that_the_board_forbids_is_named(tmp_path: pathlib.Path) -> None:
    """Either way: the message says which line of sshd_config to look at."""
    with running_sshd(tmp_path / "sshd", "AllowTcpForwarding no") as server, SshConnection.connect(server.pinned) as to:
        with pytest.raises(PermanentError, match="AllowTcpForwarding"):
            to.open_to(server.port)
        with pytest.raises(TransientError, match="AllowTcpForwarding"):
            to.listen(0, lambda channel: None)


@pytest.mark.core
def test_the_board_reaches_us_on_its_own_loopback_only(connection: SshConnection, service: socket.socket) -> None:
    """The port that it opens leads here, and no other address of the board has it."""
    reverse = ReverseForward(0, service.getsockname())
    port = reverse.attach(connection)
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        server, _ = service.accept()
        with server:
            client.sendall(b"register")
            assert read_all(server, 8) == b"register"
            reverse.cut()
            require_end(client)
    listening = [c.laddr.ip for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]
    assert set(listening) == {"127.0.0.1"}


def test_a_link_comes_back_on_the_same_ports(sshd: Sshd, service: socket.socket) -> None:
    """After its connection was killed, both forwards work again under the addresses that they had."""
    link = BoardLink(sshd.pinned, backoff=QUICK)
    forward = link.add_forward(service.getsockname()[1])
    reverse = link.add_reverse(0, service.getsockname())
    with link:
        link.wait_up(PATIENCE_S)
        port = reverse.board_port
        for _ in range(2):
            for address in (forward.address, ("127.0.0.1", port)):
                with socket.create_connection(address, PATIENCE_S):
                    service.accept()[0].close()
            connects = link.state.connects
            began = time.monotonic()
            sshd.drop_sessions()
            wait_until(lambda seen=connects: link.state.connects > seen, "the next connection")
            print(f"back after {time.monotonic() - began:.2f} s")
            assert reverse.board_port == port


def test_a_stopped_session_is_found_replaced_and_gives_its_port_back(sshd: Sshd, service: socket.socket) -> None:
    """A session that hangs holds its port on the board; it is ended there, and the new one gets the port."""
    link = BoardLink(sshd.pinned, backoff=QUICK)
    reverse = link.add_reverse(0, service.getsockname())
    forward = link.add_forward(service.getsockname()[1])
    with link:
        connection = link.wait_up(PATIENCE_S)
        with socket.create_connection(forward.address, PATIENCE_S) as client:
            server, _ = service.accept()
            port = reverse.board_port
            stopped = sshd.sessions()
            for process in stopped:
                process.suspend()
            began = time.monotonic()
            try:
                assert connection.lost.wait(10)
                client.settimeout(1)
                require_end(client)
                print(f"stopped session: found after {time.monotonic() - began:.2f} s")
                wait_until(lambda: link.state.connects == 2, "the next connection")
                print(f"stopped session: replaced after {time.monotonic() - began:.2f} s")
                assert reverse.board_port == port
                with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
                    service.accept()[0].close()
            finally:
                server.close()
                for process in stopped:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.resume()


def test_a_wrong_key_is_not_tried_again(sshd: Sshd) -> None:
    """The link gives up with the reason, which callers for the connection get."""
    wrong = dataclasses.replace(sshd.address, host_key="SHA256:" + "A" * 43)
    with BoardLink(wrong, backoff=QUICK) as link:
        for ask in (lambda: link.wait_up(PATIENCE_S), link.require_connection):
            with pytest.raises(HostKeyError):
                ask()
        assert link.state.final
        assert link.state.failures == 1


def test_trying_again_is_bounded(sshd: Sshd) -> None:
    """A board that stays away is given up after the time that was set, with the last reason."""
    away = dataclasses.replace(sshd.pinned, port=find_free_port())
    with BoardLink(away, backoff=Backoff(0.05, 0.2, give_up_s=1.0)) as link:
        began = time.monotonic()
        with pytest.raises(TransientError, match="refused") as caught:
            link.wait_up(PATIENCE_S)
        assert not isinstance(caught.value, DeadlineError)
        assert time.monotonic() - began < 2
        assert 4 < link.state.failures < 40


def test_a_board_that_comes_up_later_is_found(tmp_path: pathlib.Path) -> None:
    """Callers that wait meanwhile get the reason in time; once the board is up, the link restarts by itself."""
    with running_sshd(tmp_path / "sshd") as server, BoardLink(server.pinned, backoff=QUICK) as link:
        link.wait_up(PATIENCE_S)
        server.stop()
        wait_until(lambda: link.state.error is not None, "the loss")
        with pytest.raises(DeadlineError, match="refused"):
            link.wait_up(0.7)
        with pytest.raises(TransientError, match="out of reach"):
            link.require_connection()
        began = time.monotonic()
        server.start()
        assert link.wait_up(PATIENCE_S).exec("echo up", PATIENCE_S).out == b"up\n"
        print(f"rebooted: back {time.monotonic() - began:.2f} s after its sshd")


def test_a_closed_link_leaves_nothing(sshd: Sshd, service: socket.socket) -> None:
    """No thread of ours, no session there, no port, with a client and a channel open at the time."""
    before = set(threading.enumerate())
    link = BoardLink(sshd.pinned, backoff=QUICK)
    forward = link.add_forward(service.getsockname()[1])
    link.add_reverse(0, service.getsockname())
    with link, socket.create_connection(forward.address, PATIENCE_S) as client:
        link.wait_up(PATIENCE_S)
        link.close()
        require_end(client)
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads' end", 5)
    wait_until(lambda: not sshd.sessions(), "the session's end", 5)
