"""Snapshots of clock files: what is in them, how they survive, and in which order they are put back."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from device_agent.board_types import load_board_types
from device_agent.clocks import guard
from device_agent.clocks.guard import Snapshot
from device_agent.clocks.transaction import LocalAccess, Transaction
from device_agent.errors import BusyError, ClockError, RefusedError, UnsafeError
from device_agent.sysfs import FileTree
from farm.virtual.board import VirtualBoard
from farm.virtual.tree import FAULT, VirtualTree
from tests.clock_tree import A57, CPUS, DENVER, EMC, EMC_CAP, GPU, make_tree, read_all

_MIN, _MAX, _GOVERNOR = (f"{A57}/scaling_{name}" for name in ("min_freq", "max_freq", "governor"))
_GOOD = {"files": {_MAX: "2035200"}, "version": 1}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A TX2's files."""
    return make_tree(tmp_path / "root")


def virtual(name: str = "jetson-tx2") -> VirtualTree:
    return VirtualTree(VirtualBoard(load_board_types()[name], 1, time.monotonic))


def test_snapshot_holds_everything(root: Path, tmp_path: Path) -> None:
    """A snapshot has every clock file of every core, GPU and memory, by the path that links lead to. A folder without
    one is a board without pinned clocks.
    """
    files = guard.take_snapshot(FileTree(root)).files
    assert set(read_all(root)) < set(files)
    assert files[_MAX] == "2035200"
    assert files[f"{GPU}/governor"] == "nvhost_podgov"
    assert f"{A57}/scaling_setspeed" not in files  # "<unsupported>" is not a value
    assert f"{CPUS}/cpu0/online" not in files
    assert Snapshot.load(tmp_path / "snapshot.json") is None


def test_snapshot_survives_the_disk(root: Path, tmp_path: Path) -> None:
    """What is loaded is what was saved, and nothing else is left in the folder."""
    snapshot = guard.take_snapshot(FileTree(root), "client")
    state = tmp_path / "state"
    state.mkdir()
    snapshot.save(state / "snapshot.json")
    snapshot.save(state / "snapshot.json")
    assert Snapshot.load(state / "snapshot.json") == snapshot
    assert os.listdir(state) == ["snapshot.json"]
    assert (state / "snapshot.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\x80",
        json.dumps(_GOOD)[:-4],
        json.dumps(_GOOD | {"version": 2}),
        json.dumps(_GOOD | {"surprise": 1}),
        json.dumps(_GOOD | {"files": {"/etc/shadow": "x"}}),
        json.dumps(_GOOD | {"files": {_MAX: 2035200}}),
        json.dumps(_GOOD | {"files": {_MAX: "9" * 100}}),
        json.dumps(_GOOD | {"files": ["a"]}),
        json.dumps(_GOOD | {"power_mode": "2; reboot"}),
    ],
)
def test_corrupt_snapshot(root: Path, tmp_path: Path, text: str) -> None:
    """A snapshot that cannot be read makes the board unsafe and is kept aside; an operator clears it."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "snapshot.json").write_text(text, encoding="latin-1")
    transaction = Transaction(FileTree(root), state)
    transaction.recover()
    assert "cannot be read" in transaction.unsafe
    assert (state / "snapshot.json.corrupt").read_text(encoding="latin-1") == text
    with pytest.raises(UnsafeError):
        transaction.begin("client")
    assert Transaction(FileTree(root), state).unsafe == transaction.unsafe
    assert transaction.clear_unsafe()
    assert Transaction(FileTree(root), state).unsafe == ""
    transaction.begin("client")


@pytest.mark.parametrize(
    ("current", "wanted", "first"),
    [
        (("345600", "652800"), ("960000", "2035200"), _MAX),  # going up
        (("1267200", "2035200"), ("345600", "652800"), _MIN),  # going down
        (("652800", "652800"), ("345600", "960000"), _MAX),  # widening
    ],
)
def test_min_never_exceeds_max(current: tuple[str, str], wanted: tuple[str, str], first: str) -> None:
    """Limits are written in the order in which the lower one never exceeds the upper one."""
    before, after = dict(zip((_MIN, _MAX), current, strict=True)), dict(zip((_MIN, _MAX), wanted, strict=True))
    changes = guard.plan_restore(after, before)
    assert changes[0][0] == first
    for path, text in changes:
        before[path] = text
        assert int(before[_MIN]) <= int(before[_MAX])
    assert before == after


def test_order_of_parts() -> None:
    """Cores online, alone; then governors, limits, caps, the lock, power; cores offline last, alone."""
    lock = f"{EMC}/mrq_rate_locked"
    online, offline = f"{CPUS}/cpu1/online", f"{CPUS}/cpu2/online"
    power = "/sys/devices/17000000.gp10b/power/control"
    wanted = {offline: "0", power: "auto", lock: "0", EMC_CAP: "0", _MAX: "960000", _GOVERNOR: "schedutil", online: "1"}
    current = {offline: "1", power: "on", lock: "1", EMC_CAP: "1", _MAX: "345600", _GOVERNOR: "userspace", online: "0"}
    assert guard.plan_restore(wanted, current) == [(online, "1")]
    current[online] = "1"
    middle = [path for path, _ in guard.plan_restore(wanted, current)]
    assert middle == [_GOVERNOR, _MAX, EMC_CAP, lock, power]
    current |= {path: wanted[path] for path in middle}
    assert guard.plan_restore(wanted, current) == [(offline, "0")]


def test_a_plan_leaves_nothing_out_but_the_boards_own_fan() -> None:
    """Once patience is over, a core that does not come online holds up neither limits nor cores to take offline. A fan
    that the board regulates gets its control back, not a speed of the past.
    """
    wanted = {f"{CPUS}/cpu1/online": "1", _MAX: "960000", f"{CPUS}/cpu2/online": "0"}
    current = {f"{CPUS}/cpu1/online": "0", _MAX: "345600", f"{CPUS}/cpu2/online": "1"}
    assert dict(guard.plan_restore(wanted, current, patient=False)) == wanted
    wanted = {"/sys/devices/pwm-fan/target_pwm": "80", "/sys/devices/pwm-fan/temp_control": "1"}
    current = {"/sys/devices/pwm-fan/target_pwm": "255", "/sys/devices/pwm-fan/temp_control": "0"}
    assert guard.plan_restore(wanted, current) == [("/sys/devices/pwm-fan/temp_control", "1")]


@pytest.mark.parametrize(("lock", "written"), [("0", False), ("1", True)])
def test_memory_rate_is_a_reading_unless_locked(lock: str, written: bool) -> None:
    """A memory clock that was not pinned is released, not held where it happened to be."""
    wanted = {f"{EMC}/rate": "408000000", f"{EMC}/mrq_rate_locked": lock}
    current = {f"{EMC}/rate": "1600000000", f"{EMC}/mrq_rate_locked": "1"}
    assert ((f"{EMC}/rate", "408000000") in guard.plan_restore(wanted, current)) is written


@pytest.mark.parametrize("name", sorted(name for name, known in load_board_types().items() if known.simulation))
def test_every_virtual_board_goes_back(name: str, tmp_path: Path) -> None:
    """Every change of a board through the helper's rules is undone, within 0.3 s, drivers that refuse included."""
    tree = virtual(name)
    before = guard.take_snapshot(tree)
    access = LocalAccess(tree, tmp_path)
    access.begin("a test")
    modes = [mode.id for mode in tree.board.board_type.power_modes if mode is not tree.board.power_mode]
    same = [i for i in modes if _gating(tree, i) == _gating(tree, before.power_mode)]
    if same:
        access.set_power_mode(same[0])
    for path in guard.take_snapshot(tree).files:
        if path.endswith("/online"):
            access.write(path, "1")
    for path in guard.take_snapshot(tree).files:
        folder, _, file = path.rpartition("/")
        if file in ("scaling_max_freq", "max_freq"):
            prefix = file.removesuffix("max_freq")
            table = tree.read(f"{folder}/{prefix}available_frequencies").split()
            access.write(f"{folder}/{prefix}min_freq", table[0])
            access.write(path, table[0])
            access.write(f"{folder}/{prefix}governor", "performance")
        elif file in ("clk_state", "mrq_rate_locked"):
            access.write(path, "1")
        elif file == "railgate_enable":
            access.write(path, "0")
    for path in guard.take_snapshot(tree).files:
        if path.endswith("/online"):
            access.write(path, "0")
    started = time.monotonic()
    access.restore()
    assert time.monotonic() - started < 0.3
    after = guard.take_snapshot(tree)
    assert after.power_mode == before.power_mode
    for path, text in before.files.items():
        if not path.endswith("/rate"):
            assert after.files[path] == text, path
    assert os.listdir(tmp_path) == []


def _gating(tree: VirtualTree, mode_id: int | None) -> int:
    return next((mode.power_gating for mode in tree.board.board_type.power_modes if mode.id == mode_id), 0)


def test_policy_of_cores_that_were_offline(tmp_path: Path) -> None:
    """Limits of a cluster that only a transaction brought online go back too, before it goes offline again."""
    tree = virtual()
    for cpu in (1, 2):
        tree.write(f"{CPUS}/cpu{cpu}/online", "0")
    access = LocalAccess(tree, tmp_path)
    access.begin("a test")
    access.write(f"{CPUS}/cpu1/online", "1")
    access.write(f"{DENVER}/scaling_max_freq", "345600")
    clock = tree.board.clusters["denver"].clock
    assert clock.max_hz == 345_600_000
    access.restore()
    assert tree.board.online == {0, 3, 4, 5}
    assert clock.max_hz == clock.table[-1]


@pytest.mark.parametrize(
    ("fault", "path"),
    [
        ("write_refused", f"{A57}/scaling_max_freq"),
        ("write_refused", f"{CPUS}/cpu4/online"),
        ("file_vanish", f"{A57}/scaling_max_freq"),
    ],
)
def test_what_does_not_go_back_is_named(fault: str, path: str) -> None:
    """A driver that refuses, or a file that is gone, is a problem by name; everything else goes back all the same."""
    tree = virtual()
    snapshot = guard.take_snapshot(tree)
    for target, text in ((f"{A57}/scaling_max_freq", "345600"), (f"{CPUS}/cpu4/online", "0")):
        tree.write(target, text)
    tree.write(f"{GPU.replace('/sys/devices/17000000.gp10b/devfreq', '/sys/class/devfreq')}/max_freq", "114750000")
    tree.write(FAULT, f"{fault}:{path}")
    _, problems = guard.restore(tree, snapshot, deadline_s=0.0)
    assert len(problems) == 1
    assert path in problems[0]
    assert tree.board.gpu.clock.max_hz > 114_750_000
    tree.write(FAULT, "clear")
    assert guard.restore(tree, snapshot)[1] == ()


def test_another_boot_may_have_other_files(root: Path) -> None:
    """After a boot a file that is not there any more is not held against the board."""
    tree = FileTree(root)
    snapshot = guard.take_snapshot(tree)
    Path(f"{root}{EMC_CAP}").unlink()
    assert guard.restore(tree, snapshot, deadline_s=0.05)[1] == (f"{EMC_CAP} is gone",)
    tree.write("/proc/sys/kernel/random/boot_id", "another")
    assert guard.restore(tree, snapshot, deadline_s=0.05)[1] == ()


def test_unreadable_file_is_not_written(root: Path, tmp_path: Path) -> None:
    """What could not be put back is not changed."""
    Path(f"{root}{_GOVERNOR}").write_text("<unknown>")
    access = LocalAccess(FileTree(root), tmp_path / "state")
    access.begin("a test")
    with pytest.raises(RefusedError, match="could not be put back"):
        access.write(_GOVERNOR, "performance")
    access.close()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes; within a test only, since pytest writes to files as well."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_full_disk(tmp_path: Path) -> None:
    """Without a snapshot on disk nothing begins, and nothing is left half-written."""
    with full_disk():
        access = LocalAccess(virtual(), tmp_path / "state")
        with pytest.raises(ClockError, match="cannot be written"):
            access.begin("a test")
    assert access.status().holder == ""
    assert os.listdir(tmp_path / "state") == []
    with pytest.raises(RefusedError):
        access.write(_MAX, "345600")


def test_a_board_has_one_state_folder_that_can_be_written(tmp_path: Path, root: Path) -> None:
    """A state folder that cannot be made refuses the beginning. The state folder is locked as long as a transaction
    lasts.
    """
    (tmp_path / "file").write_text("")
    with pytest.raises(ClockError, match="cannot be written"):
        LocalAccess(virtual(), tmp_path / "file" / "state").begin("a test")
    first, second = (LocalAccess(FileTree(root), tmp_path / "state") for _ in range(2))
    first.begin("one")
    with pytest.raises(BusyError):
        second.begin("two")
    first.restore()
    second.begin("two")
    second.close()
