"""What a user at a board types: `device-agent` as a child process, on virtual boards and captured trees.

The fault table: each row harms a board in one way and says what the command answers and how it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from farm.virtual.client import SimulatedTree
from tests.acceptance.conftest import wait_until

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 60.0
_CPU0 = "/sys/devices/system/cpu/cpufreq/policy0"


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value


def agent(*words: str, cwd: pathlib.Path = ROOT) -> Result:
    virtual = "virtual" in " ".join(words) or "--fault" in words
    done = subprocess.run(
        [sys.executable, "-m", "farm.virtual" if virtual else "device_agent", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        pytest.param(
            "clocks pin --virtual jetson-nano --cpu-freq 1GHz", 2, ("921.6", "1036.8"), id="frequency-not-in-the-table"
        ),
        pytest.param("clocks pin --virtual jetson-nano --power-mode TURBO", 2, ("MAXN", "5W"), id="no-such-power-mode"),
        pytest.param(
            "clocks pin --virtual jetson-nano --cpu-freq 921.6MHz --fault write_refused:scaling_max_freq",
            1,
            ("scaling_max_freq",),
            id="write-is-refused",
        ),
        pytest.param(
            "clocks pin --virtual jetson-nano --cpu-freq 921.6MHz --clock-helper /nowhere",
            3,
            ("/nowhere",),
            id="helper-socket-missing",
        ),
        pytest.param("clocks show --root /nowhere", 2, ("/nowhere",), id="root-is-no-folder"),
        pytest.param("clocks show --virtual jetson-9000", 2, ("jetson-nano",), id="no-such-virtual-board"),
        pytest.param("clocks show --fault hang", 2, ("--virtual",), id="real-boards-are-not-harmed"),
        pytest.param("clocks show --virtual jetson-nano --fault laziness", 3, ("laziness",), id="no-such-fault"),
        pytest.param("clocks pin --virtual jetson-nano", 2, ("--cpu-freq",), id="empty-point"),
        pytest.param("power --seconds 0", 2, ("0",), id="no-time"),
    ],
)
def test_bad_input_is_refused(words: str, code: int, answer: tuple[str, ...]) -> None:
    """The exit code says whose fault it was, the line on stderr or stdout what to give instead; no traceback."""
    result = agent(*words.split())
    said = result.out + result.err
    assert result.code == code, said
    assert all(word in said for word in answer), said
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", ["sensor_error", "sensor_garbage", "sensor_vanish", "sensor_stale"])
def test_a_sensor_that_fails_is_never_zero(kind: str) -> None:
    """Without a good value there is no power, and the command says so by its code; a stale value is flagged."""
    result = agent("power", "--virtual", "jetson-nano", "--seconds", "0.5", "--json", "--fault", kind)
    window = result.document["window"]
    assert result.code == (kind == "sensor_error" or (window is not None and not window["rails"])), result.err
    if window is not None:
        assert not window["enough"]
        assert window["note"]
        # A gated GPU really draws nothing, and an idle rail may read a little below; the whole board never does.
        assert all(rail["power_w"] > 0 for rail in window["rails"] if rail["rail"] == "POM_5V_IN")
        assert window["total"] is None or window["total"]["power_w"] > 0
    assert result.document["simulated"] is True


@pytest.mark.core
def test_a_clock_that_firmware_clamps_is_not_held() -> None:
    """Cpufreq says what was asked for; the hardware's own word is asked, the pin fails and says both clocks."""
    cap = ("--virtual", "jetson-nano", "--fault", "clock_cap:1224000000")
    result = agent("clocks", "pin", "--cpu-freq", "1479MHz", "--for", "0.1", *cap)
    assert result.code == 1, result.out + result.err
    assert "set to 1479 MHz, and its hardware runs at 1224 MHz" in result.out
    assert agent("clocks", "pin", "--cpu-freq", "921.6MHz", "--for", "0.1", *cap).code == 0


@pytest.mark.parametrize("command", ["describe", "clocks show", "power --seconds 0.2", "doctor"])
def test_a_board_without_anything_says_what_it_lacks(command: str, tmp_path: pathlib.Path) -> None:
    """An empty tree is a board of which nothing is known: null and notes, no zeros, no traceback."""
    result = agent(*command.split(), "--root", str(tmp_path), "--json")
    assert result.code in (0, 1), result.err
    assert "Traceback" not in result.err
    if command.startswith("power"):
        assert result.document["window"] is None


@pytest.mark.parametrize("board_type", ["jetson-nano", "jetson-tx2", "jetson-orin-nano-8gb", "raspberry-pi-4"])
def test_tables_are_complete(board_type: str) -> None:
    """Each command prints a table that says `simulated`, and a doctor that finds nothing broken."""
    for command in ("describe", "clocks show", "power --seconds 0.2", "doctor --pin"):
        result = agent(*command.split(), "--virtual", board_type)
        assert result.code == 0, result.out + result.err
        assert "simulated" in result.out
        assert "None" not in result.out


@dataclasses.dataclass
class VirtualBoard:
    root: str
    helper: str
    state: pathlib.Path

    @property
    def options(self) -> tuple[str, ...]:
        """What a command needs to be this board's."""
        return ("--root", self.root, "--clock-helper", self.helper, "--board-type", "jetson-nano")

    def read(self, path: str) -> str:
        return SimulatedTree(self.root.removeprefix("virtual:")).read(path)


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def running_virtual_board(folder: pathlib.Path, board_type: str) -> Iterator[VirtualBoard]:
    board, helper, state = folder / "board", folder / "helper", folder / "state"
    with running("farm.virtual.server", board_type, "--socket", str(board)):
        wait_until(board.exists, "the simulator")
        root = f"virtual:{board}"
        with running(
            *("farm.virtual.clock_helper", "--socket", str(helper), "--state-dir", str(state)),
            *("--root", f"{root}.root"),
        ):
            wait_until(helper.exists, "the clock helper")
            yield VirtualBoard(root, str(helper), state)


@contextlib.contextmanager
def pinning(board: VirtualBoard, *words: str) -> Iterator[subprocess.Popen[str]]:
    with running("farm.virtual", "clocks", "pin", *board.options, *words) as process:
        wait_until(lambda: board.read(f"{_CPU0}/scaling_max_freq") == "921600", "the clock to be held")
        yield process


def test_two_holders(tmp_path: pathlib.Path) -> None:
    """The second learns who holds the clocks; the first keeps them; Ctrl-C restores them."""
    with running_virtual_board(tmp_path, "jetson-nano") as board:
        before = board.read(f"{_CPU0}/scaling_min_freq"), board.read(f"{_CPU0}/scaling_max_freq")
        with pinning(board, "--cpu-freq", "921.6MHz") as first:
            second = agent("clocks", "pin", *board.options, "--cpu-freq", "204MHz")
            assert second.code == 1, second.out + second.err
            assert str(first.pid) in second.out + second.err
            shown = agent("clocks", "show", *board.options, "--json").document
            assert str(first.pid) in shown["holder"]
            assert board.read(f"{_CPU0}/scaling_max_freq") == "921600"
            first.send_signal(signal.SIGINT)
            assert first.wait(TIMEOUT_S) == 0
        assert (board.read(f"{_CPU0}/scaling_min_freq"), board.read(f"{_CPU0}/scaling_max_freq")) == before


def test_a_killed_command_leaves_nothing_held(tmp_path: pathlib.Path) -> None:
    """After kill -9 of the holder the helper puts everything back."""
    with running_virtual_board(tmp_path, "jetson-nano") as board:
        before = board.read(f"{_CPU0}/scaling_max_freq")
        with pinning(board, "--cpu-freq", "921.6MHz") as holder:
            holder.kill()
            wait_until(lambda: board.read(f"{_CPU0}/scaling_max_freq") == before, "the clocks to be restored")


def test_an_operator_takes_the_clocks_away(tmp_path: pathlib.Path) -> None:
    """`restore` refuses while a client holds the clocks, `--force` does not."""
    with running_virtual_board(tmp_path, "jetson-nano") as board, pinning(board, "--cpu-freq", "921.6MHz"):
        assert agent("clocks", "restore", *board.options).code == 1
        assert agent("clocks", "restore", "--force", *board.options).code == 0
        assert board.read(f"{_CPU0}/scaling_max_freq") != "921600"


def test_a_corrupt_snapshot_makes_the_board_unsafe_until_an_operator_clears_it(tmp_path: pathlib.Path) -> None:
    """Everything says unsafe and ends with 4; after `clocks restore` all is well."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "snapshot.json").write_text('{"half a snap')
    with running_virtual_board(tmp_path, "jetson-nano") as board:
        shown = agent("clocks", "show", *board.options)
        assert shown.code == 4, shown.out + shown.err
        assert "UNSAFE" in shown.out
        assert agent("clocks", "pin", *board.options, "--cpu-freq", "921.6MHz").code == 4
        assert agent("doctor", *board.options).code == 4
        assert agent("clocks", "restore", *board.options).code == 0
        assert agent("clocks", "show", *board.options).code == 0
