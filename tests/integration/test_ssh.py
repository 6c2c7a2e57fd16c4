"""SSH to a board, against a real OpenSSH server: keys, commands, and every way in which it can fail, with its time."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import pickle
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from farm.connectivity.host_keys import HostKeyError, KnownHosts, UnknownHostKeyError
from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_handshake import SshAddress, fetch_host_key
from farm.errors import BoardLostError, DeadlineError, FarmError, PermanentError, TransientError, UsageError
from tests.integration.conftest import wait_until
from tests.integration.sshd import KINDS, Sshd, make_key
from tests.ports import find_free_port

PATIENCE_S = 20.0
# The ways to fail before anything is carried. Each sets the stage and gives the address to connect to.
Stage = Callable[[Sshd, pathlib.Path, contextlib.ExitStack], SshAddress]
CONNECT_TIMEOUT_S = 2.0


def test_a_command_gives_its_code_and_both_streams(connection: SshConnection) -> None:
    """What is printed arrives as it was, both streams apart, with the exit code. As shells do: 128 and the signal's
    number. A megabyte on each stream at once neither blocks nor loses a byte. A command that prints for ever costs
    no memory here, and the connection stays usable.
    """
    result = connection.exec("printf 'a\\0b'; echo wrong >&2; exit 7", PATIENCE_S)
    assert result == (7, b"a\0b", b"wrong\n")
    assert connection.exec("cat", PATIENCE_S) == (0, b"", b"")
    assert connection.exec("kill -SEGV $$", PATIENCE_S).code == 128 + signal.SIGSEGV
    command = "head -c 1000000 /dev/zero & head -c 1000000 /dev/zero >&2; wait"
    result = connection.exec(command, PATIENCE_S)
    assert (result.code, len(result.out), len(result.err)) == (0, 1_000_000, 1_000_000)
    with pytest.raises(PermanentError, match="more than 1000 bytes"):
        connection.exec("yes", PATIENCE_S, max_bytes=1000)
    assert connection.exec("echo still here", PATIENCE_S).out == b"still here\n"


def test_a_command_beyond_its_deadline_ends_on_the_board_too(connection: SshConnection, tmp_path: pathlib.Path) -> None:
    """We stop waiting on time, and the board ends the command soon after."""
    pid_file = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"more than 2 s"):
        connection.exec(f"echo $$ > {pid_file}; sleep 60", 2.0)
    assert time.monotonic() - began < 5
    wait_until(lambda: not psutil.pid_exists(int(pid_file.read_text())), "the command's end", 8)


def test_a_background_program_does_not_hold_the_caller(connection: SshConnection) -> None:
    """A program left behind with the output open is not waited for."""
    began = time.monotonic()
    assert connection.exec("sleep 5 & echo started", PATIENCE_S).out == b"started\n"
    assert time.monotonic() - began < 3


def test_more_commands_than_sshd_takes_wait_for_their_turn(connection: SshConnection) -> None:
    """Twenty at once all succeed although sshd allows ten sessions."""
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(connection.exec("sleep 0.1; echo ok", PATIENCE_S).out))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == [b"ok\n"] * 20


def test_the_first_contact_asks_for_the_key_to_be_confirmed(sshd: Sshd, tmp_path: pathlib.Path) -> None:
    """Nothing pinned: refused with what the board shows; once confirmed, it connects, and only its owner may write."""
    known = KnownHosts(tmp_path / "home" / "known_hosts")
    with pytest.raises(UnknownHostKeyError) as caught:
        SshConnection.connect(sshd.address, known)
    key = pickle.loads(pickle.dumps(caught.value)).key
    assert key == sshd.host_key() == fetch_host_key(sshd.address)
    assert key.fingerprint in caught.value.message
    known.add("127.0.0.1", sshd.port, key)
    with SshConnection.connect(sshd.address, known) as connection:
        assert connection.exec("echo hello", PATIENCE_S).out == b"hello\n"
    assert stat.S_IMODE(known.path.stat().st_mode) == 0o600
    assert known.remove("127.0.0.1", sshd.port)
    with pytest.raises(UnknownHostKeyError):
        SshConnection.connect(sshd.address, known)


@pytest.mark.parametrize("kind", KINDS)
def test_any_of_a_boards_keys_may_be_pinned(sshd: Sshd, tmp_path: pathlib.Path, kind: str) -> None:
    """A board has several host keys: whichever is pinned, by fingerprint or in the file, is the one asked for."""
    key = sshd.host_key(kind)
    SshConnection.connect(dataclasses.replace(sshd.address, host_key=key.fingerprint)).close()
    known = KnownHosts(tmp_path / "known_hosts")
    known.add("127.0.0.1", sshd.port, key)
    SshConnection.connect(sshd.address, known).close()


def test_the_inventorys_pin_goes_before_the_files(sshd: Sshd, tmp_path: pathlib.Path) -> None:
    """A fingerprint in the inventory counts alone, despite an earlier confirmation."""
    known = KnownHosts(tmp_path / "known_hosts")
    known.add("127.0.0.1", sshd.port, sshd.host_key())
    stale = dataclasses.replace(sshd.address, host_key="SHA256:" + "A" * 43)
    with pytest.raises(HostKeyError):
        SshConnection.connect(stale, known)


def host_down(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    deaf = stack.enter_context(socket.socket())
    deaf.bind(("127.0.0.1", 0))
    deaf.listen(0)
    for _ in range(3):
        filler = stack.enter_context(socket.socket())
        filler.setblocking(False)
        filler.connect_ex(deaf.getsockname())
    return dataclasses.replace(sshd.pinned, port=deaf.getsockname()[1])


def port_closed(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    return dataclasses.replace(sshd.pinned, port=find_free_port())


def no_such_name(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    return dataclasses.replace(sshd.pinned, host="board.invalid")


def says_nothing(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    return dataclasses.replace(sshd.pinned, port=silent.getsockname()[1])


def stalls_after(sshd: Sshd, stack: contextlib.ExitStack, limit: int) -> SshAddress:
    """The real server, of whose bytes only the first `limit` arrive; the connection stays open."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def carry(source: socket.socket, sink: socket.socket, left: float) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(int(min(left, 1 << 16)))):
                sink.sendall(data)
                left -= len(data)

    def serve() -> None:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", sshd.port))
            stack.callback(client.close)
            stack.callback(server.close)
            threading.Thread(target=carry, args=(client, server, float("inf")), daemon=True).start()
            carry(server, client, limit)

    threading.Thread(target=serve, daemon=True).start()
    return dataclasses.replace(sshd.pinned, port=listener.getsockname()[1])


def greets_and_hangs(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    return stalls_after(sshd, stack, 60)


def hangs_at_login(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    """The key exchange works, the login is never answered: so many bytes a login takes in full, less the last ones."""
    return stalls_after(sshd, stack, count_login_bytes(sshd) - 20)


def not_ssh(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve() -> None:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            with client:
                client.recv(100)
                client.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    return dataclasses.replace(sshd.pinned, port=listener.getsockname()[1])


def wrong_host_key(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    return dataclasses.replace(sshd.address, host_key="SHA256:" + "A" * 43)


def wrong_user_key(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    return dataclasses.replace(sshd.pinned, key_file=make_key(folder / "other"))


def wrong_user(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    return dataclasses.replace(sshd.pinned, user="absent-of-that-name")


def open_key_file(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    key = make_key(folder / "open")
    key.chmod(0o644)
    return dataclasses.replace(sshd.pinned, key_file=key)


def no_key_file(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    return dataclasses.replace(sshd.pinned, key_file=folder / "missing")


def locked_key_file(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    return dataclasses.replace(sshd.pinned, key_file=make_key(folder / "locked", "ed25519", "a few words"))


def public_key_file(sshd: Sshd, folder: pathlib.Path, stack: contextlib.ExitStack) -> SshAddress:
    key = make_key(folder / "pair").with_suffix(".pub")
    key.chmod(0o600)
    return dataclasses.replace(sshd.pinned, key_file=key)


AT_ONCE_S, ON_TIME_S = 1.5, CONNECT_TIMEOUT_S + 1.0
FAULTS: list[tuple[Stage, type[FarmError], str, float]] = [
    (host_down, DeadlineError, "nothing answered", ON_TIME_S),
    (port_closed, TransientError, "refused", AT_ONCE_S),
    (no_such_name, TransientError, "no address", ON_TIME_S),
    (says_nothing, DeadlineError, "said nothing", ON_TIME_S),
    (greets_and_hangs, DeadlineError, r"greeted \(SSH-2.0-OpenSSH", ON_TIME_S),
    (hangs_at_login, DeadlineError, "login", ON_TIME_S),
    (not_ssh, TransientError, "no SSH server", ON_TIME_S),
    (wrong_host_key, HostKeyError, "HAS CHANGED: pinned is SHA256:A+, it shows SHA256:", AT_ONCE_S),
    (wrong_user_key, PermanentError, "refuses the key", AT_ONCE_S),
    (wrong_user, PermanentError, "absent-of-that-name", AT_ONCE_S),
    (open_key_file, UsageError, "chmod 600", AT_ONCE_S),
    (no_key_file, UsageError, "cannot be read", AT_ONCE_S),
    (locked_key_file, UsageError, "passphrase", AT_ONCE_S),
    (public_key_file, UsageError, "public half", AT_ONCE_S),
]


@pytest.mark.parametrize(
    ("stage", "kind", "words", "limit_s"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_way_to_fail_is_named_in_time(
    sshd: Sshd, tmp_path: pathlib.Path, stage: Stage, kind: type[FarmError], words: str, limit_s: float
) -> None:
    """The error's branch says whether to try again, its words what to do; it comes within the deadline."""
    before = count_threads()
    with contextlib.ExitStack() as stack:
        address = stage(sshd, tmp_path, stack)
        began = time.monotonic()
        with pytest.raises(kind, match=words) as caught:
            SshConnection.connect(address, timeout_s=CONNECT_TIMEOUT_S)
        elapsed_s = time.monotonic() - began
        print(f"{stage.__name__}: {caught.type.__name__} after {elapsed_s:.2f} s")
        assert elapsed_s < limit_s
        # TransientError's children say more than it does; a permanent one must not look like one.
        assert isinstance(caught.value, TransientError) == issubclass(kind, TransientError)
        wait_until(lambda: count_threads() <= before, "our threads' end", 10)


def test_a_board_that_stops_answering_is_found_within_ten_seconds(sshd: Sshd) -> None:
    """Its kernel still takes packets, as a hung board's does: keepalives go unanswered."""
    with SshConnection.connect(sshd.pinned) as connection:
        sessions = sshd.sessions()
        for process in sessions:
            process.suspend()
        began = time.monotonic()
        try:
            assert connection.lost.wait(10)
            print(f"stopped session: lost after {time.monotonic() - began:.2f} s")
            with pytest.raises(BoardLostError, match="nothing heard"):
                connection.exec("echo hello", 60)
        finally:
            for process in sessions:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()


def test_a_killed_session_is_noticed_at_once(sshd: Sshd) -> None:
    """The connection's end sets `lost`, with a reason, without a call being made."""
    with SshConnection.connect(sshd.pinned) as connection:
        sshd.drop_sessions()
        assert connection.lost.wait(2)
        assert connection.reason
        with pytest.raises(BoardLostError):
            connection.exec("true", PATIENCE_S)


def test_a_call_that_cannot_be_sent_ends_the_connection(sshd: Sshd) -> None:
    """After the error that the board is lost, `lost` is set, though nothing was heard of the end yet."""
    with SshConnection.connect(sshd.pinned) as connection:
        sessions = sshd.sessions()
        for process in sessions:
            process.suspend()
        try:
            connection._sock.shutdown(socket.SHUT_WR)
            with pytest.raises(BoardLostError, match="hung up"):
                connection.exec("true", PATIENCE_S)
            assert connection.lost.is_set()
        finally:
            for process in sessions:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()


def test_an_idle_connection_stays(sshd: Sshd) -> None:
    """Keepalives are answered: after two of them the connection is as it was."""
    with SshConnection.connect(sshd.pinned) as connection:
        assert not connection.lost.wait(5)
        assert connection.exec("echo hello", PATIENCE_S).out == b"hello\n"


def test_close_ends_every_thread(sshd: Sshd) -> None:
    """A call in progress ends with an error, and nothing of the connection is left."""
    before = count_threads()
    connection = SshConnection.connect(sshd.pinned)
    threading.Timer(0.3, connection.close).start()
    with pytest.raises(BoardLostError, match="closed by us"):
        connection.exec("sleep 30", PATIENCE_S)
    connection.close()
    wait_until(lambda: count_threads() <= before, "the threads' end", 5)
    wait_until(lambda: not sshd.sessions(), "the server's session to end", 5)


def count_threads() -> int:
    """Threads of this process that are our own or paramiko's."""
    return sum(
        thread.name.startswith("farm-ssh") or type(thread).__module__.startswith(("paramiko", "farm"))
        for thread in threading.enumerate()
    )


def count_login_bytes(sshd: Sshd) -> int:
    counted = [0]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", sshd.port)) as server:
                threading.Thread(target=carry_all, args=(client, server), daemon=True).start()
                with contextlib.suppress(OSError):
                    while data := server.recv(1 << 16):
                        counted[0] += len(data)
                        client.sendall(data)

        def carry_all(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        threading.Thread(target=serve, daemon=True).start()
        address = dataclasses.replace(sshd.pinned, port=listener.getsockname()[1])
        with SshConnection.connect(address):
            return counted[0]
