"""What every tree of kernel files does: one of real files, a virtual board's in this process, one over a socket."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from device_agent.board_types import load_board_types
from device_agent.protocol import texts
from device_agent.sysfs import FileTree, Tree, list_names, open_tree, read_int, read_ints, read_text
from farm.virtual.board import VirtualBoard
from farm.virtual.client import SimulatedTree
from farm.virtual.tree import VirtualTree

_POLICY = "/sys/devices/system/cpu/cpufreq/policy0"
_ZONES = "/sys/class/thermal"
# What is captured of a board: enough to ask every question below.
_CAPTURED = (
    "/proc/device-tree/compatible",
    "/sys/devices/system/cpu/online",
    f"{_POLICY}/related_cpus",
    f"{_POLICY}/scaling_available_frequencies",
    f"{_POLICY}/scaling_min_freq",
    f"{_POLICY}/scaling_max_freq",
    f"{_ZONES}/thermal_zone0/type",
    f"{_ZONES}/thermal_zone1/type",
    "/sys/bus/i2c/devices/6-0040/name",
)
_KINDS = ("files", "virtual", "simulated")


def capture(folder: Path) -> Path:
    """A copy of a virtual Nano's files, as one would take it from a real one."""
    tree = VirtualTree(VirtualBoard(load_board_types()["jetson-nano"]))
    for path in _CAPTURED:
        target = folder / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        text = tree.read(path)
        # The device tree's entries end with NULs, the kernel's values with a line feed.
        target.write_text(text.replace(" ", "\0") + "\0" if "device-tree" in path else text + "\n")
    link = folder / "sys/devices/system/cpu/cpu0/cpufreq"
    link.parent.mkdir()
    link.symlink_to(folder / _POLICY[1:])
    return folder


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("simulator") / "board.sock")
    ready, written = os.pipe()
    command = [
        sys.executable,
        "-m",
        "farm.virtual.server",
        "jetson-nano",
        "--socket",
        path,
        "--exit-with-parent",
    ]
    process = subprocess.Popen([*command, "--ready-fd", str(written)], pass_fds=[written])
    os.close(written)
    try:
        assert os.read(ready, 6) == b"ready\n"
        yield path
    finally:
        os.close(ready)
        process.terminate()
        process.wait(10)


@pytest.fixture(params=_KINDS)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    if request.param == "files":
        return FileTree(capture(tmp_path))
    if request.param == "virtual":
        return VirtualTree(VirtualBoard(load_board_types()["jetson-nano"]))
    return SimulatedTree(request.getfixturevalue("simulator") + ".root")


def test_paths_are_read_listed_and_told_apart(tree: Tree) -> None:
    """No line feeds; the device tree's NULs are blanks. Links to folders count as folders. Files, folders, links;
    nothing else.
    """
    assert tree.read(f"{_POLICY}/related_cpus") == "0 1 2 3"
    assert tree.read("/proc/device-tree/compatible").split() == ["nvidia,jetson-nano", "nvidia,tegra210"]
    names = tree.names("/sys/devices/system/cpu/cpu0/cpufreq")
    assert names == sorted(names)
    assert {"related_cpus", "scaling_min_freq", "scaling_max_freq"} <= set(names)
    assert "thermal_zone0" in tree.names(f"{_ZONES}/")
    for path in (_POLICY, f"{_POLICY}/related_cpus", "/sys/devices/system/cpu/cpu0/cpufreq", "/sys"):
        assert tree.exists(path)
    for path in (f"{_POLICY}/nothing", "/sys/devices/system/cpu/cpu99", f"{_POLICY}/related_cpus/below"):
        assert not tree.exists(path)


def test_what_is_written_is_read_back(tree: Tree) -> None:
    """With or without a line feed, also through a link."""
    tree.write(f"{_POLICY}/scaling_max_freq", "921600")
    assert tree.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq") == "921600"
    tree.write("/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq", "1479000\n")
    assert tree.read(f"{_POLICY}/scaling_max_freq") == "1479000"


@pytest.mark.parametrize(
    ("operation", "path", "expected"),
    [
        ("read", f"{_POLICY}/nothing", errno.ENOENT),
        ("read", "/sys/devices/system/cpu/cpu99/online", errno.ENOENT),
        ("read", _POLICY, errno.EISDIR),
        ("read", f"{_POLICY}/related_cpus/below", errno.ENOTDIR),
        ("names", f"{_POLICY}/nothing", errno.ENOENT),
        ("names", f"{_POLICY}/related_cpus", errno.ENOTDIR),
        ("write", f"{_POLICY}/nothing", errno.ENOENT),
        ("write", _POLICY, errno.EISDIR),
    ],
)
def test_errors_are_the_kernels(tree: Tree, operation: str, path: str, expected: int) -> None:
    """The error number says what is wrong, through any transport."""
    arguments = (path, "1") if operation == "write" else (path,)
    with pytest.raises(OSError) as caught:
        getattr(tree, operation)(*arguments)
    assert caught.value.errno == expected


def test_nothing_is_made_and_no_tool_invented(tree: Tree) -> None:
    """A file that is not there stays so. A board without it says so, as a captured one does of every tool."""
    with pytest.raises(FileNotFoundError):
        tree.write(f"{_POLICY}/new", "1")
    assert not tree.exists(f"{_POLICY}/new")
    with pytest.raises(FileNotFoundError):
        tree.run(["no-such-tool", "-q"])


def test_readers_work_on_every_tree(tree: Tree) -> None:
    """The functions over trees read numbers, lists and names alike, and give nothing where nothing is."""
    assert read_int(tree, f"{_POLICY}/scaling_min_freq") == 102000
    assert read_ints(tree, f"{_POLICY}/scaling_available_frequencies")[-1] == 1479000
    assert list_names(tree, _ZONES, "thermal_zone*")[:2] == ["thermal_zone0", "thermal_zone1"]
    assert texts.parse_cpus(tree.read("/sys/devices/system/cpu/online")) == (0, 1, 2, 3)
    assert read_text(tree, f"{_POLICY}/nothing") is None
    assert list_names(tree, f"{_POLICY}/nothing") == []


def test_only_models_say_that_they_are_simulated(tree: Tree) -> None:
    """What comes from files may be real."""
    assert tree.simulated == (not isinstance(tree, FileTree))


def test_a_simulators_socket_opens_as_a_root(simulator: str, tmp_path: Path) -> None:
    """`virtual:SOCKET` and folders are both roots; a folder that is not there is an error."""
    assert open_tree(f"virtual:{simulator}").simulated
    assert not open_tree(str(tmp_path)).simulated
    with pytest.raises(NotADirectoryError):
        open_tree(str(tmp_path / "nothing"))


def test_a_tool_is_the_systems_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, neither the caller's PATH nor a home decides which nvpmodel runs, or what it reads."""
    planted = tmp_path / "nvpmodel"
    planted.write_text("#!/bin/sh\necho planted\n")
    planted.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "x.so"))
    assert set(FileTree().run(["env"]).split()) >= {"HOME=/", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
    assert "LD_PRELOAD" not in FileTree().run(["env"])
    if not Path("/usr/sbin/nvpmodel").exists():
        with pytest.raises(FileNotFoundError):
            FileTree().run(["nvpmodel", "-q"])
