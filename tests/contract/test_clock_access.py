"""What every way of writing clocks promises: in this process, and through the clock helper; on files and a model."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from device_agent.clocks.access import ClockAccess
from device_agent.clocks.client import HelperClient
from device_agent.clocks.transaction import LocalAccess
from device_agent.errors import BusyError, HelperUnavailableError, RefusedError, UnsafeError
from device_agent.sysfs import Tree, open_tree
from farm.virtual.client import SimulatedTree
from tests.clock_tree import A57, CPUS, EMC, GPU_CLASS, PIN, make_tree

PATIENCE_S = 30.0
PATHS = tuple(path for path, _ in PIN if not path.endswith("/rate"))


class Board:
    """A board's files, and makers of access to its clocks."""

    def __init__(self, tree: Tree, open_access: Callable[[], ClockAccess]) -> None:
        self.tree = tree
        self.open_access = open_access

    def read(self) -> dict[str, str]:
        return {path: self.tree.read(path) for path in PATHS if self.tree.exists(path)}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Start one of our modules as a process and wait for its socket; ended after the last test."""
    with contextlib.ExitStack() as stack:

        def run(module: str, socket: Path, *options: str) -> None:
            log = stack.enter_context(socket.with_suffix(".log").open("wb"))
            command = [sys.executable, "-m", module, *options]
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait, PATIENCE_S)
            stack.callback(process.terminate)
            deadline = time.monotonic() + PATIENCE_S
            while not socket.exists():
                assert process.poll() is None, socket.with_suffix(".log").read_text()
                assert time.monotonic() < deadline
                select.select([], [], [], 0.005)

        yield run


@pytest.fixture(scope="module", params=["local-files", "local-virtual", "helper-files", "helper-virtual"])
def board(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., None]
) -> Board:
    folder = tmp_path_factory.mktemp("board")
    access, kind = request.param.split("-")
    if kind == "virtual":
        server = folder / "board.sock"
        start("farm.virtual.server", Path(f"{server}.root"), "jetson-tx2", "--socket", str(server))
        root = f"virtual:{server}.root"
        for cpu in (1, 2):
            SimulatedTree(f"{server}.root").write(f"{CPUS}/cpu{cpu}/online", "1")
    else:
        root = str(make_tree(folder / "root"))
    tree = open_tree(root)
    if access == "local":
        return Board(tree, lambda: LocalAccess(tree, folder / "state"))
    path = folder / "helper.sock"
    options = ("--socket", str(path), "--state-dir", str(folder / "state"), "--root", root)
    start("farm.virtual.clock_helper", path, *options)
    return Board(tree, lambda: HelperClient(path))


@pytest.fixture
def access(board: Board) -> Iterator[ClockAccess]:
    access = board.open_access()
    yield access
    with contextlib.suppress(HelperUnavailableError, UnsafeError):
        access.restore()
    access.close()


def pin(access: ClockAccess) -> None:
    access.begin("a test")
    for path, text in PIN:
        access.write(path, text)


def test_transaction(board: Board, access: ClockAccess) -> None:
    """Writes take effect, are held by name, and are gone after `restore`."""
    before = board.read()
    assert access.status().holder == ""
    pin(access)
    assert access.status().holder.startswith("a test")
    assert board.tree.read(f"{A57}/scaling_max_freq") == "960000"
    assert access.read(f"{EMC}/mrq_rate_locked") == "1"
    assert access.restore()
    assert access.status().holder == ""
    assert board.read() == before


def test_nothing_held_is_nothing_to_restore_or_clear(access: ClockAccess) -> None:
    """There is nothing to restore, and that is no error. A board that is not unsafe needs no clearing."""
    assert access.restore() == ()
    assert access.clear_unsafe() == ()


def test_begin_again_keeps_the_first_snapshot(board: Board, access: ClockAccess) -> None:
    """A second `begin` of the same holder changes nothing."""
    before = board.read()
    pin(access)
    access.begin("a test")
    access.restore()
    assert board.read() == before


def test_close_restores(board: Board, access: ClockAccess) -> None:
    """The clocks of a holder that vanishes are restored."""
    before = board.read()
    pin(access)
    access.close()
    deadline = time.monotonic() + PATIENCE_S
    while board.read() != before:
        assert time.monotonic() < deadline
    assert access.status().holder == ""


def test_one_holder(board: Board, access: ClockAccess) -> None:
    """A second holder is refused; afterwards it may."""
    access.begin("one")
    other = board.open_access()
    with pytest.raises(BusyError):
        other.begin("two")
    with pytest.raises(RefusedError):
        other.write(f"{A57}/scaling_max_freq", "960000")
    access.restore()
    other.begin("two")
    other.close()


def test_writes_need_a_transaction_and_reads_none(access: ClockAccess) -> None:
    """Nothing is written outside a transaction. What only root may read can be asked for at any time; other files
    cannot.
    """
    with pytest.raises(RefusedError):
        access.write(f"{A57}/scaling_max_freq", "960000")
    with pytest.raises(RefusedError):
        access.set_power_mode(0)
    assert access.read(f"{EMC}/min_rate") == "40800000"
    with pytest.raises(RefusedError):
        access.read("/etc/shadow")


@pytest.mark.parametrize(
    ("path", "text"),
    [(f"{CPUS}/cpu0/online", "0"), (f"{A57}/scaling_max_freq", "1"), ("/etc/shadow", "x"), (f"{CPUS}/cpu1/online", "")],
)
def test_rules_hold(access: ClockAccess, path: str, text: str) -> None:
    """The holder, too, writes only what is on the list."""
    access.begin("a test")
    with pytest.raises(RefusedError):
        access.write(path, text)


def test_kernel_errors_come_through(board: Board, access: ClockAccess) -> None:
    """A file that is not there is the kernel's own error, with its path."""
    with pytest.raises(FileNotFoundError) as error:
        access.read("/sys/kernel/debug/clk/override.emc/clk_state")
    assert error.value.filename
    access.begin("a test")
    with pytest.raises(RefusedError):
        access.set_power_mode(99)


def test_what_refuses_to_go_back_is_unsafe_until_cleared(board: Board, access: ClockAccess) -> None:
    """A clock that does not go back makes the board unsafe; it is cleared by going back, or by force."""
    before = board.read()
    pin(access)
    stick(board, True)
    with pytest.raises(UnsafeError, match="scaling_governor"):
        access.restore()
    assert "scaling_governor" in access.status().unsafe
    with pytest.raises(UnsafeError):
        access.begin("next")
    with pytest.raises(UnsafeError):
        access.clear_unsafe()
    assert access.status().unsafe
    stick(board, False)
    assert access.clear_unsafe()
    assert access.status().unsafe == ""
    assert board.read() == before
    access.begin("next")
    access.restore()


def stick(board: Board, stuck: bool) -> None:
    """Have A57's governor refuse to be changed, or not any more."""
    path = f"{A57}/scaling_governor"
    root = getattr(board.tree, "root", None)
    if root is None:
        board.tree.write("/sys/virtual/fault", f"write_refused:{path}" if stuck else "clear")
        return
    # As root every file can be written; a folder cannot.
    file, aside = Path(f"{root}{path}"), Path(f"{root}{path}.aside")
    if stuck:
        file.rename(aside)
        file.mkdir()
    else:
        file.rmdir()
        aside.rename(file)


def test_gpu_by_its_class(board: Board, access: ClockAccess) -> None:
    """The GPU is written by the path under which it is found."""
    access.begin("a test")
    access.write(f"{GPU_CLASS}/max_freq", "318750000")
    assert board.tree.read(f"{GPU_CLASS}/max_freq") == "318750000"
