"""`farm board provision` and `farm bundle`: what an operator types to put the agent on boards and take it off again."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import signal
from collections.abc import Iterator

import pytest

from tests.acceptance.conftest import Home
from tests.integration.provisioning import (
    SYSTEM_PYTHONS,
    accounts,
    find_system_python,
    has_account,
    list_tree,
    open_folder,
)
from tests.integration.sshd import Sshd, running_sshd
from tests.ports import find_free_port

__all__ = ["accounts"]  # a fixture
pytestmark = pytest.mark.usefixtures("accounts")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or find_system_python() not in SYSTEM_PYTHONS,
    reason="a board with a user and a clock helper of its own takes root and a system Python >= 3.10",
)
# The type of a Linux machine that has none of its own.
GENERIC = "x86-64-v3" if platform.machine() == "x86_64" else "armv8-a"


@pytest.fixture
def room() -> Iterator[pathlib.Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture
def sshd(tmp_path: pathlib.Path) -> Iterator[Sshd]:
    """A board's server."""
    with running_sshd(tmp_path / "sshd") as server:
        yield server


def add_board(home: Home, name: str, sshd: Sshd) -> None:
    ports = {"port": sshd.port, "agent_port": find_free_port(), "tracker_port": find_free_port()}
    login = {"user": sshd.address.user, "key_file": str(sshd.address.key_file)}
    board = {"type": GENERIC, "transport": "ssh", "address": "127.0.0.1"} | login | ports
    (home.path / "fleet.yaml").write_text(json.dumps({"hosts": {name: board}}))
    done = home.run("fleet", "apply", str(home.path / "fleet.yaml"))
    assert done.code == 0, done.err


@needs_root
def test_a_board_from_registration_to_removal(home: Home, sshd: Sshd, room: pathlib.Path) -> None:
    """Unknown key, provisioned and healthy, interrupted, unchanged, removed: each with its exit code; nothing stays."""
    add_board(home, "b1", sshd)
    before = list_tree(room)
    command = ["board", "provision", "b1", "--prefix", str(room / "b1")]

    unknown = home.run(*command)
    assert unknown.code == 1
    assert "not confirmed yet" in unknown.out + unknown.err

    assert home.run("board", "trust", "b1", "--fingerprint", sshd.host_key().fingerprint).code == 0
    stopped = home.start(*command)
    stopped.wait_for("b1: folder: done")
    stopped.send(signal.SIGINT)
    done = stopped.wait()
    assert done.code == 130, done.err
    assert "as before: no agent of ours" in done.out

    first = home.run(*command, "--json")
    assert first.code == 0, first.err
    (board,) = first.json()["boards"]
    assert (board["outcome"], board["probe"]) == ("provisioned", "")
    assert [step["status"] for step in board["steps"] if step["name"] == "probe"] == ["ok"]
    (listed,) = home.run("board", "list", "--json").json()
    assert listed["health"] == "good"
    assert has_account(room / "b1")

    again = home.run(*command)
    assert again.code == 0, again.err
    assert "unchanged" in again.out

    removed = home.run(*command, "--uninstall")
    assert removed.code == 0, removed.err
    assert list_tree(room) == before
    assert not has_account(room / "b1")


@pytest.mark.core
def test_what_cannot_be_provisioned(home: Home) -> None:
    """An unknown board, a virtual one, and a bundle for nothing: wrong usage, said in a line."""
    assert home.run("board", "add", "sim", "--virtual", "jetson-nano").code == 0
    for arguments, message in (
        (("board", "provision", "unknown"), "no board 'unknown'"),
        (("board", "provision", "sim"), "the farm starts its agent itself"),
        (("board", "bundle"), "--arch is missing"),
        (("board", "bundle", "--arch", "riscv64"), "no wheels for 'riscv64'"),
        (("board", "bundle", "--arch", "aarch64", "--python", "3.8"), "cannot be 3.8"),
    ):
        done = home.run(*arguments)
        assert done.code == 2, (arguments, done.err)
        assert message in done.err
        assert "Traceback" not in done.err
