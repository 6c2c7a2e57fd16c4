"""What is understood of nvpmodel's configuration and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.board_types import load_board_types
from device_agent.clocks.platform import find_power_modes, parse_configuration
from device_agent.sysfs import FileTree

# Shaped as LineageOS/android_device_nvidia_galen, nvpmodel/nvpmodel_t194.conf.
_CONFIGURATION = Path(__file__).with_name("nvpmodel.conf").read_text()


class Board(FileTree):
    def __init__(self, root: Path, answer: str | OSError) -> None:
        super().__init__(root)
        self.answer = answer

    def run(self, command: list[str]) -> str:
        assert command[1:] == ["-q"]
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


def make_board(root: Path, answer: str | OSError = "", files: tuple[str, ...] = ("nvpmodel.conf",)) -> Board:
    for name in files:
        path = root / "etc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_CONFIGURATION)
    return Board(root, answer)


def test_modes_are_read_from_the_configuration() -> None:
    """Cores, limits in Hz and gating masks; what means the hardware's own limit is left out."""
    maxn, low = parse_configuration(_CONFIGURATION)
    assert (maxn.id, maxn.name, maxn.online, maxn.cpu_max_hz) == (0, "MAXN", {0: True, 1: True}, {})
    assert (maxn.gpu_max_hz, maxn.memory_max_hz) == (None, None)
    assert (low.id, low.name, low.online) == (1, "MODE_10W", {0: True, 1: False})
    assert (low.cpu_max_hz, low.gpu_max_hz, low.memory_max_hz) == ({0: 1_200_000_000}, 520_000_000, 1_065_600_000)
    assert low.gating == {"/sys/devices/gpu.0/tpc_pg_mask": 5}
    assert low.plan_online((0, 1, 7), range(8)) == (0, 7)
    assert maxn.plan_online((0,), (0, 2)) == (0,)


@pytest.mark.parametrize("text", ["", "no stanza at all", "< POWER_MODEL ID=x NAME=y >\n< >", "< PARAM"])
def test_a_text_that_is_no_configuration_has_no_modes(text: str) -> None:
    """Garbage is not a mode, and nothing raises."""
    assert parse_configuration(text) == ()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("NV Power Mode: MODE_10W\n1\n", "MODE_10W"),
        ("NVPM WARN: fan mode is not set!\nNV Power Mode: MAXN\n0\n", "MAXN"),
        ("NV Fan Mode:quiet\nNV Power Mode: mode_10w\n", "MODE_10W"),
        ("NVPM ERROR: no mode\n", None),
        (PermissionError(13, "Permission denied"), None),
        (TimeoutError(110, "not finished"), None),
        (FileNotFoundError(2, "nvpmodel"), None),
    ],
)
def test_the_current_mode_is_what_nvpmodel_says(tmp_path: Path, answer: str | OSError, expected: str | None) -> None:
    """By its number, else by its name; unknown where nvpmodel may not be asked."""
    modes = find_power_modes(make_board(tmp_path, answer))
    current = modes.read_current()
    assert (current.name if current else None) == expected


@pytest.mark.parametrize(
    ("mask", "answer", "expected"),
    [
        ("5", "", False),  # what is gated now counts, not nvpmodel's answer
        ("0", "NV Power Mode: MODE_10W\n1\n", True),
        (None, "NV Power Mode: MAXN\n0\n", True),
        (None, "NV Power Mode: MODE_10W\n1\n", False),
        (None, "", None),
    ],
)
def test_another_gating_mask_needs_a_reboot(
    tmp_path: Path, mask: str | None, answer: str, *, expected: bool | None
) -> None:
    """The mask in force is read, else taken from the current mode, else unknown."""
    board = make_board(tmp_path, answer)
    if mask is not None:
        file = tmp_path / "sys/devices/gpu.0/tpc_pg_mask"
        file.parent.mkdir(parents=True)
        file.write_text(mask)
    modes = find_power_modes(board)
    assert modes.needs_reboot(modes.modes[1]) is expected


def test_configurations_of_several_boards_are_not_guessed_from(tmp_path: Path) -> None:
    """One file in /etc/nvpmodel is the board's; two are ambiguous."""
    one = make_board(tmp_path / "one", files=("nvpmodel/nvpmodel_t194.conf",))
    assert find_power_modes(one) is not None
    two = make_board(tmp_path / "two", FileNotFoundError(2, "nvpmodel"), ("nvpmodel/a.conf", "nvpmodel/b.conf"))
    assert find_power_modes(two) is None


def test_the_types_modes_serve_where_the_configuration_cannot_be_read(tmp_path: Path) -> None:
    """Where nvpmodel answers there are modes; which, only the board type says."""
    known = load_board_types()["jetson-tx2"]
    clusters = {cluster.name: cluster.cpus for cluster in known.clusters}
    modes = find_power_modes(Board(tmp_path, "NV Power Mode: MAXQ\n1\n"), known.power_modes, clusters)
    assert modes.names == tuple(mode.name for mode in known.power_modes)
    current = modes.read_current()
    assert current.plan_online(range(6), range(6)) == (0, 3, 4, 5)
    assert current.cpu_max_hz == {0: 1_200_000_000}
    absent = find_power_modes(Board(tmp_path, FileNotFoundError(2, "nvpmodel")), known.power_modes, clusters)
    assert absent is None
