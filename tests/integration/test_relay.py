"""The relay between plain sockets: what it carries, what a cut does, who is said to have hung up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from farm.connectivity.relay import Relay
from tests import hostile_board
from tests.hostile_board import GREETING
from tests.integration.sshd import read_all

PATIENCE_S = 10.0


@pytest.fixture
def board() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        yield listener


@pytest.fixture
def link(board: socket.socket) -> Iterator[tuple[Relay, socket.socket, socket.socket]]:
    """A relay with its two ends: the client's socket and the board's."""
    with Relay(*board.getsockname()) as relay, socket.create_connection(relay.address, PATIENCE_S) as client:
        server, _ = board.accept()
        server.settimeout(PATIENCE_S)
        with server:
            yield relay, client, server


def test_bytes_pass_both_ways_unchanged(link: tuple[Relay, socket.socket, socket.socket]) -> None:
    """Five megabytes each way at the same time arrive as they were sent."""
    _, client, server = link
    up, down = bytes(range(256)) * 20_000, GREETING + hostile_board.answer(bytes(reversed(range(256))) * 20_000)
    senders = [threading.Thread(target=s.sendall, args=(data,)) for s, data in ((client, up), (server, down))]
    got: dict[str, bytes] = {}
    readers = [
        threading.Thread(target=lambda: got.update(up=read_all(server, len(up)))),
        threading.Thread(target=lambda: got.update(down=read_all(client, len(down)))),
    ]
    for thread in [*senders, *readers]:
        thread.start()
    for thread in [*senders, *readers]:
        thread.join(PATIENCE_S)
    assert got == {"up": up, "down": down}


def test_a_cut_ends_a_blocked_read_at_once(link: tuple[Relay, socket.socket, socket.socket]) -> None:
    """A client that waits for an answer gets the end of the stream, not a time-out; so does the board."""
    relay, client, server = link
    threading.Timer(0.05, relay.cut).start()
    for sock in (client, server):
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert not relay.board_ended.is_set()
    relay.cut()


def test_a_board_that_hangs_up_is_said_to(link: tuple[Relay, socket.socket, socket.socket]) -> None:
    """When the client notices the end, it is already known that the board caused it."""
    relay, client, server = link
    server.sendall(GREETING)
    server.close()
    assert read_all(client, len(GREETING)) == GREETING
    assert client.recv(1) == b""
    assert relay.board_ended.is_set()


@pytest.mark.parametrize(("words", "refused"), [(b"HTTP", True), (hostile_board.frame(hostile_board.SHUTDOWN), False)])
def test_what_the_client_is_spared_is_said(
    link: tuple[Relay, socket.socket, socket.socket], words: bytes, refused: bool
) -> None:
    """A board that says what none says is cut off and named before the client notices; a goodbye is an end."""
    relay, client, server = link
    server.sendall(words if refused else GREETING + words)
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""
    assert bool(relay.refused) is refused
    assert relay.board_ended.is_set() is not refused


def test_a_client_that_leaves_is_not_the_boards_fault(link: tuple[Relay, socket.socket, socket.socket]) -> None:
    """The board sees the end of the stream, and gets no blame for hanging up."""
    relay, client, server = link
    client.close()
    assert server.recv(1) == b""
    server.close()
    assert not relay.board_ended.wait(0.1)


def test_a_board_that_is_not_there(board: socket.socket) -> None:
    """A refused connection ends the client's at once and counts as the board's doing."""
    address = board.getsockname()
    board.close()
    with Relay(*address) as relay, socket.create_connection(relay.address, PATIENCE_S) as client:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        assert relay.board_ended.wait(PATIENCE_S)


def test_a_cut_frees_a_client_whose_board_never_accepts() -> None:
    """While the relay still tries to reach the board, a cut ends the client's wait all the same."""
    # A full backlog: the kernel lets further connections hang.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(deaf.getsockname())
            with Relay(*deaf.getsockname()) as relay, socket.create_connection(relay.address, 2.0) as client:
                threading.Timer(0.1, relay.cut).start()
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""


def test_a_relay_nobody_uses_ends_with_its_cut(board: socket.socket) -> None:
    """Cut before any client came: the address is free again and no thread stays behind."""
    relay = Relay(*board.getsockname())
    relay.cut()
    with pytest.raises(OSError), socket.create_connection(relay.address, 0.5):
        pass
