"""Private with any umask: FARM_HOME, the files in it, and every lock."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import stat
from collections.abc import Callable, Iterator

import pytest

from device_agent.clocks.transaction import lock_state
from farm import folders
from farm.campaign import plan_document
from farm.campaign.engine.state import ENGINE
from farm.connectivity.host_keys import FILE_NAME, HostKey, KnownHosts
from farm.connectivity.services import SERVICES
from farm.processes import children, home_log
from farm.search.codegen import golden
from farm.store import Store
from farm.web import access

HOST_KEY = HostKey.from_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f")


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def parent(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder for homes, which pytest's own folders could not be distinguished from: they are private."""
    folder = tmp_path / "shared"
    folder.mkdir(0o777)
    return folder


def find_open(home: pathlib.Path) -> list[str]:
    paths = [home, *home.rglob("*")]
    return [f"{path} {stat.filemode(path.lstat().st_mode)}" for path in paths if path.lstat().st_mode & 0o077]


def _run_services(home: pathlib.Path) -> None:
    with SERVICES.hold(home):
        SERVICES.publish(home, control="/nowhere/control")
        assert stat.S_IMODE((home / "services.json").stat().st_mode) == 0o600


def _run_engine(home: pathlib.Path) -> None:
    with ENGINE.hold(home):
        ENGINE.publish(home)


MAKERS: dict[str, Callable[[pathlib.Path], object]] = {
    "store": lambda home: Store(home / "farm.db").close(),
    "services": _run_services,
    "engine": _run_engine,
    "token": access.read_token,
    "named token": lambda home: access.add(home, "jane", access.Role.READER, "me"),
    "host key": lambda home: KnownHosts(home / FILE_NAME).add("nano", 22, HOST_KEY),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_new_home_is_its_owners_alone(parent: pathlib.Path, maker: str) -> None:
    """With umask 000 a home, its folders and its files have modes 0700 and 0600, by every maker."""
    home = parent / "data" / "home"
    MAKERS[maker](home)
    assert not find_open(home)
    assert not find_open(home.parent)


@pytest.mark.parametrize("maker", MAKERS)
def test_an_old_home_is_closed_with_a_word(parent: pathlib.Path, maker: str, caplog: pytest.LogCaptureFixture) -> None:
    """A home that other users could enter is closed to them once, and the warning says what to do."""
    home = parent / "home"
    home.mkdir(0o777)
    (home / "services.lock").touch(0o666)
    (home / "engine.lock").touch(0o666)
    for _ in range(2):
        MAKERS[maker](home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    [record] = [each for each in caplog.records if each.name == "farm.folders"]
    assert record.levelno == logging.WARNING
    assert "(mode 777)" in record.getMessage()
    assert "farm web token --new" in record.getMessage()


def test_new_folders_are_private(parent: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A home that its owner made before the first command is closed without a warning: it held nothing. Folders of logs
    and plans are their owner's, also where they come before the rest of the home.
    """
    home = parent / "home"
    home.mkdir(0o755)
    Store(home / "farm.db").close()
    assert not find_open(home)
    assert not caplog.records
    home_log.start_log("test", parent / "a" / "logs", foreground=True)
    children.stop(children.start(["true"], parent / "b" / "logs" / "linker.log", os.environ))
    plan_document.keep_plan(parent / "c", {"name": "nightly"})
    for name in "abc":
        assert stat.S_IMODE((parent / name).stat().st_mode) == 0o700


@pytest.mark.parametrize(("mode", "name"), [(0o1777, "farm.db"), (0o755, "notes.txt")])
def test_other_folders_stay_as_they_are(parent: pathlib.Path, mode: int, name: str) -> None:
    """A folder for everybody's files, or one that is no FARM_HOME, keeps its mode."""
    folder = parent / "folder"
    folder.mkdir()
    folder.chmod(mode)
    (folder / name).touch()
    folders.require_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == mode


def _hold_state(folder: pathlib.Path) -> contextlib.AbstractContextManager[object]:
    stack = contextlib.ExitStack()
    stack.callback(os.close, lock_state(folder))
    return stack


@pytest.mark.parametrize(
    ("hold", "name"),
    [
        (SERVICES.hold, "services.lock"),
        (ENGINE.hold, "engine.lock"),
        (lambda folder: golden._locked(folder / "lock", 0.0), "lock"),
        (lambda folder: KnownHosts(folder / FILE_NAME)._rewriting(), f"{FILE_NAME}.lock"),
        (access._changing, f".{access.FILE}.lock"),
        (_hold_state, "."),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_other_users_cannot_open_a_lock(
    parent: pathlib.Path,
    hold: Callable[[pathlib.Path], contextlib.AbstractContextManager[object]],
    name: str,
    exists: bool,
) -> None:
    """Who may open a lock, for reading even, can hold it: new ones and old ones are closed to other users."""
    home = parent / "home"
    home.mkdir(0o777)
    if exists and name != ".":
        (home / name).touch(0o666)
    with hold(home):
        assert not (home / name).stat().st_mode & 0o077
