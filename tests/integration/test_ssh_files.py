"""Files to and from a board, through a real OpenSSH server: whole or not at all, and never twice."""

from __future__ import annotations

import os
import pathlib
import threading
import time

import pytest

from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_files import get, hash_file, put
from farm.errors import BoardLostError, DeadlineError, PermanentError, UsageError
from tests.integration.conftest import wait_until
from tests.integration.sshd import Sshd

BIG = 64 << 20


@pytest.fixture
def board(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of the board's."""
    folder = tmp_path / "board's folder"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("big") / "model.bin"
    path.write_bytes(os.urandom(1 << 20) * (BIG >> 20))
    return path


def test_a_file_goes_there_once(connection: SshConnection, board: pathlib.Path, big: pathlib.Path) -> None:
    """It arrives unchanged with the wanted mode; the second time nothing is sent."""
    target = board / "model.bin"
    first = put(connection, big, str(target), 0o600)
    assert (first.moved, first.size, first.sha256) == (True, BIG, hash_file(target))
    print(f"put: {BIG / first.seconds / 1e6:.0f} MB/s")
    assert target.stat().st_mode & 0o777 == 0o600
    inode = target.stat().st_ino
    assert not put(connection, big, str(target)).moved
    assert target.stat().st_ino == inode
    assert list(board.iterdir()) == [target]


def test_another_file_of_the_same_size_is_replaced_in_one_step(
    connection: SshConnection, board: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A process with the old file open keeps it whole; the path leads to the new one."""
    target, source = board / "libx.so", tmp_path / "new"
    target.write_bytes(b"old")
    source.write_bytes(b"new")
    with target.open("rb") as still_open:
        assert put(connection, source, str(target)).moved
        assert still_open.read() == b"old"
    assert target.read_bytes() == b"new"


def test_a_file_comes_back_once(connection: SshConnection, board: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Fetched unchanged; the second time nothing is fetched. An empty file is a file."""
    (board / "log").write_bytes(os.urandom(3_000_000))
    (board / "empty").touch()
    here = tmp_path / "log"
    assert get(connection, str(board / "log"), here).moved
    assert here.read_bytes() == (board / "log").read_bytes()
    assert not get(connection, str(board / "log"), here).moved
    assert get(connection, str(board / "empty"), tmp_path / "empty").size == 0
    assert (tmp_path / "empty").read_bytes() == b""


def test_what_cannot_be_is_named(connection: SshConnection, board: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """No such file here, no folder there, a folder in the way, no such file there, no folder here."""
    source = tmp_path / "source"
    source.write_bytes(b"x")
    with pytest.raises(UsageError, match="cannot be read"):
        put(connection, tmp_path / "missing", str(board / "x"))
    with pytest.raises(PermanentError, match="no folder for it"):
        put(connection, source, str(board / "missing" / "x"))
    with pytest.raises(PermanentError, match="is a folder"):
        put(connection, source, str(board))
    with pytest.raises(PermanentError, match="there is no"):
        get(connection, str(board / "missing"), tmp_path / "x")
    (board / "x").write_bytes(b"x")
    with pytest.raises(UsageError, match="cannot be written"):
        get(connection, str(board / "x"), tmp_path / "missing" / "x")


def test_a_connection_cut_during_a_transfer(
    sshd: Sshd, connection: SshConnection, board: pathlib.Path, big: pathlib.Path
) -> None:
    """It is called a lost board, the old file stays, and the next try succeeds and leaves no litter."""
    target = board / "model.bin"
    target.write_bytes(b"old")

    def cut() -> None:
        wait_until(lambda: any(part.stat().st_size for part in board.glob(".*.part")), "the transfer")
        sshd.drop_sessions()

    cutter = threading.Thread(target=cut)
    cutter.start()
    began = time.monotonic()
    with pytest.raises(BoardLostError, match=r"sending model\.bin"):
        put(connection, big, str(target))
    cutter.join()
    print(f"cut transfer: BoardLostError after {time.monotonic() - began:.2f} s")
    assert target.read_bytes() == b"old"
    with SshConnection.connect(sshd.pinned) as again:
        assert put(again, big, str(target)).moved
    assert list(board.iterdir()) == [target]


def test_a_transfer_has_a_deadline(connection: SshConnection, board: pathlib.Path, big: pathlib.Path) -> None:
    """One that takes too long ends with an error and leaves nothing; the connection stays usable."""
    with pytest.raises(DeadlineError, match="took more than"):
        put(connection, big, str(board / "model.bin"), timeout_s=0.2)
    assert not list(board.iterdir())
    assert connection.exec("echo here", 5).out == b"here\n"
