"""The script that sets a swept point, run by a shell on trees of kernel files: it sets, restores, gives up cleanly."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
from typing import Any

import pytest

from device_agent.protocol import OperatingPoint
from farm.inventory.board_types import require_board_type
from farm.sweep.export import chosen as export_script
from farm.sweep.export.chosen import Chosen
from farm.virtual.board import VirtualBoard
from farm.virtual.tree import Hardware
from tests import clock_tree
from tests.unit.sweep_documents import chosen_point
from tests.unit.virtual_boards import SIMULATED, make_board

_TIMEOUT_S = 20
TX2_POINT: dict[str, Any] = {
    "cores_online": (0, 3, 4, 5),
    "cpu_freq_hz": {"a57": 960_000_000},
    "gpu_freq_hz": 624_750_000,
    "memory_freq_hz": 800_000_000,
}


def write_script(folder: pathlib.Path, chosen: Chosen) -> pathlib.Path:
    path = folder / "point.sh"
    kind = require_board_type(chosen.document["board"]["type"])
    path.write_text(export_script.export_script(chosen, kind), encoding="utf-8")
    return path


def run(script: pathlib.Path, root: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(script), *arguments],
        env=make_environment(root),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def make_environment(root: pathlib.Path) -> dict[str, str]:
    nvpmodel = str(root.parent / "nvpmodel")
    return {"PATH": os.environ["PATH"], "ROOT": str(root), "STATE": str(root.parent / "state"), "NVPMODEL": nvpmodel}


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small TX2's kernel files."""
    return clock_tree.make_tree(tmp_path / "root")


def read(root: pathlib.Path, path: str) -> str:
    """A file's text."""
    return pathlib.Path(f"{root}{path}").read_text().strip()


def test_script_sets_and_restores(tmp_path: pathlib.Path, tree: pathlib.Path) -> None:
    """After `set` the tree holds the point, after `restore` what it held before, and the snapshot is gone."""
    script = write_script(tmp_path, chosen_point("jetson-tx2", **TX2_POINT))
    before = clock_tree.read_all(tree)
    done = run(script, tree, "set")
    assert done.returncode == 0, done.stderr
    for path, value in {
        f"{clock_tree.A57}/scaling_min_freq": "960000",
        f"{clock_tree.A57}/scaling_max_freq": "960000",
        f"{clock_tree.GPU}/min_freq": "624750000",
        f"{clock_tree.GPU}/max_freq": "624750000",
        f"{clock_tree.GPU_DEVICE}/railgate_enable": "0",
        f"{clock_tree.EMC}/mrq_rate_locked": "1",
        f"{clock_tree.EMC}/rate": "800000000",
        f"{clock_tree.CPUS}/cpu1/online": "0",
        f"{clock_tree.CPUS}/cpu2/online": "0",
    }.items():
        assert read(tree, path) == value, path
    done = run(script, tree, "restore")
    assert done.returncode == 0, done.stderr
    assert clock_tree.read_all(tree) == before
    assert not (tmp_path / "state").exists()


def test_script_runs_a_command_at_the_point(tmp_path: pathlib.Path, tree: pathlib.Path) -> None:
    """The command sees the clocks held, its exit code is the script's, and everything is as before afterwards."""
    script = write_script(tmp_path, chosen_point("jetson-tx2", **TX2_POINT))
    before = clock_tree.read_all(tree)
    look = f'cat "$ROOT{clock_tree.A57}/scaling_max_freq"; cat; exit 7'
    done = subprocess.run(
        ["sh", str(script), "run", "sh", "-c", look],
        env=make_environment(tree),
        input="from stdin",
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "960000\nfrom stdin"), done.stderr
    assert clock_tree.read_all(tree) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_script_restores_when_it_is_ended(tmp_path: pathlib.Path, tree: pathlib.Path, number: signal.Signals) -> None:
    """A signal ends the command too, and the clocks go back."""
    script = write_script(tmp_path, chosen_point("jetson-tx2", **TX2_POINT))
    before = clock_tree.read_all(tree)
    running = subprocess.Popen(
        ["sh", str(script), "run", "sh", "-c", "echo ready; exec sleep 60"],
        env=make_environment(tree),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout.readline() == "ready\n"
        running.send_signal(number)
        assert running.wait(_TIMEOUT_S) != 0
    finally:
        running.kill()
        running.communicate()
    assert clock_tree.read_all(tree) == before
    assert not (tmp_path / "state").exists()


def test_script_undoes_a_half_set_point(tmp_path: pathlib.Path, tree: pathlib.Path) -> None:
    """An error about a missing clock lists the available ones, and what was already set goes back."""
    script = write_script(tmp_path, chosen_point("jetson-tx2", **(TX2_POINT | {"gpu_freq_hz": 1_000_000_000})))
    before = clock_tree.read_all(tree)
    done = run(script, tree, "set")
    assert done.returncode == 1
    assert "no clock 1000000000" in done.stderr
    assert "624750000" in done.stderr
    assert clock_tree.read_all(tree) == before


def test_second_set_keeps_the_first_snapshot(tmp_path: pathlib.Path, tree: pathlib.Path) -> None:
    """Setting twice is refused, so that `restore` still knows what was there at first."""
    script = write_script(tmp_path, chosen_point("jetson-tx2", **TX2_POINT))
    before = clock_tree.read_all(tree)
    run(script, tree, "set")
    again = run(script, tree, "set")
    assert again.returncode == 1
    assert "restore" in again.stderr
    assert run(script, tree, "restore").returncode == 0
    assert clock_tree.read_all(tree) == before
    assert run(script, tree, "restore").returncode == 1


def test_script_asks_nvpmodel_for_a_mode_and_for_the_one_before(tmp_path: pathlib.Path, tree: pathlib.Path) -> None:
    """A power mode is set by its ID first, and the mode that was set comes back."""
    nvpmodel = tmp_path / "nvpmodel"
    nvpmodel.write_text(
        '#!/bin/sh\nif [ "$1" = -q ]; then printf "NV Power Mode: MAXP_CORE_ARM\\n3\\n"; '
        f'else echo "$@" >>{tmp_path}/asked; fi\n'
    )
    nvpmodel.chmod(0o755)
    script = write_script(tmp_path, chosen_point("jetson-tx2", power_mode="MAXQ", cpu_freq_hz={"a57": 960_000_000}))
    before = clock_tree.read_all(tree)
    done = run(script, tree, "run", "true")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text() == "-m 1\n-m 3\n"
    assert clock_tree.read_all(tree) == before


def test_script_of_a_nano_locks_its_memory_clock(tmp_path: pathlib.Path) -> None:
    """T210's memory files differ: the rate is written first, then the lock, and only the lock is taken back."""
    root = tmp_path / "root"
    cpu, debug = root / "sys/devices/system/cpu/cpu0/cpufreq", root / "sys/kernel/debug"
    files = {
        cpu / "scaling_min_freq": "102000",
        cpu / "scaling_max_freq": "1479000",
        cpu / "scaling_available_frequencies": "102000 921600 1479000",
        debug / "clk/override.emc/clk_state": "0",
        debug / "clk/override.emc/clk_update_rate": "1600000000",
        debug / "tegra_bwmgr/emc_rate": "1600000000",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    chosen = chosen_point("jetson-nano", cpu_freq_hz={"a57": 921_600_000}, memory_freq_hz=204_000_000)
    script = write_script(tmp_path, chosen)
    done = run(script, root, "set")
    assert done.returncode == 0, done.stderr
    assert "warning: the memory clock is 1600000000" in done.stderr
    assert (debug / "clk/override.emc/clk_state").read_text() == "1\n"
    assert run(script, root, "restore").returncode == 0
    assert (debug / "clk/override.emc/clk_state").read_text() == "0\n"
    assert (cpu / "scaling_max_freq").read_text() == "1479000\n"


def capture_tree(board_type: str, root: pathlib.Path) -> VirtualBoard:
    """Write the kernel files of a virtual board to disk, links as links; return the board."""
    board, _ = make_board(board_type)
    files = Hardware.of(board).files()
    for path, file in files._files.items():
        if file.read is not None:
            try:
                text = file.read()
            except OSError:
                continue
            at = pathlib.Path(f"{root}{path}")
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text + "\n")
    for path, target in files._links.items():
        if not pathlib.Path(f"{root}{path}").is_symlink():
            clock_tree.make_link(root, path, target)
    return board


def read_files(root: pathlib.Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text()
        for folder, _, names in os.walk(root)
        for path in (pathlib.Path(folder) / name for name in names)
        if not path.is_symlink()
    }


@pytest.mark.parametrize("board_type", [name for name in SIMULATED if name.startswith("jetson")])
def test_script_fits_every_jetson(tmp_path: pathlib.Path, board_type: str) -> None:
    """On each type's kernel files: all clusters and the GPU held at clocks they have, then everything as before."""
    root = tmp_path / "root"
    board = capture_tree(board_type, root)
    kind = require_board_type(board_type)
    online = [cluster for cluster in kind.clusters if set(cluster.cpus) & set(board.online)]
    point = OperatingPoint(
        cpu_freq_hz={cluster.name: sorted(cluster.freqs_hz)[-3] for cluster in online},
        gpu_freq_hz=sorted(board.gpu.clock.table)[1] if board.gpu else None,
        memory_freq_hz=board.memory.table[-1] if board.memory else None,
    )
    script = write_script(tmp_path, chosen_point(board_type, **point.to_dict()))
    before = read_files(root)
    done = run(script, root, "set")
    assert done.returncode == 0, done.stderr
    for cluster in online:
        cpu = next(cpu for cpu in cluster.cpus if cpu in board.online)
        held = read(root, f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_min_freq")
        assert held == str(point.cpu_freq_hz[cluster.name] // 1000)
    if board.gpu:
        assert read(root, f"/sys/class/devfreq/{board.gpu_device}/max_freq") == str(point.gpu_freq_hz)
    assert run(script, root, "restore").returncode == 0
    # What only has a meaning while the memory clock is locked is left as it was written.
    ignored = ("emc/rate", "emc/state", "override.emc/clk_update_rate")
    after = read_files(root)
    assert {k: v for k, v in after.items() if not k.endswith(ignored)} == {
        k: v for k, v in before.items() if not k.endswith(ignored)
    }


def test_script_is_sound_shell(tmp_path: pathlib.Path) -> None:
    """Shells parse it, and shellcheck, where it is installed, has nothing to say."""
    point = TX2_POINT | {"power_mode": "MAXQ"}
    script = write_script(tmp_path, chosen_point("jetson-tx2", **point))
    for shell in ("sh", "bash", "dash", "busybox"):
        if path := shutil.which(shell):
            words = [path, "sh", "-n"] if shell == "busybox" else [path, "-n"]
            subprocess.run([*words, str(script)], check=True, timeout=_TIMEOUT_S)
    if checker := shutil.which("shellcheck"):
        done = subprocess.run([checker, str(script)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stdout
