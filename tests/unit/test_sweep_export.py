"""A point taken out of a sweep: the stanza as nvpmodel reads it, and the script run on trees of kernel files."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from device_agent.clocks.power_mode import Mode, parse_configuration
from device_agent.protocol import OperatingPoint
from device_agent.virtual.power_modes import render_configuration
from farm.errors import UsageError
from farm.inventory.board_types import BoardType, require_board_type
from farm.sweep import export, export_script
from farm.sweep.export import Chosen
from farm.sweep.export_nvpmodel import export_nvpmodel
from tests import clock_tree
from tests.unit import sweep_documents
from tests.unit.virtual_boards import make_board

_TIMEOUT_S = 20


def choose(board_type: str, domains: Mapping[str, Any] | None = None, **point: Any) -> Chosen:
    """A measured point of a document on `board_type`; `domains`: name -> (Hz, units, held)."""
    clocks = [(name, *rest) for name, rest in (domains or {}).items()]
    row = sweep_documents.row("the point", clocks, 4e7)
    row["point"] = OperatingPoint(**point).to_dict()
    document = sweep_documents.document(
        [sweep_documents.series([row])], board={"type": board_type, "names": ["b-1"], "simulated": False}
    )
    return export.choose_point(document, document["series"][0])


def parse_stanza(chosen: Chosen, board_type: BoardType) -> Mode:
    """What nvpmodel makes of the stanza behind the board's own configuration."""
    board, _ = make_board(board_type.name)
    return parse_configuration(render_configuration(board) + "\n" + export_nvpmodel(chosen, board_type))[-1]


def test_stanza_of_a_nano_holds_cpu_and_gpu() -> None:
    """All cores online, both limits at the clock, the memory capped, with an ID that stock modes leave free."""
    kind = require_board_type("jetson-nano")
    domains = {"a57": (1_036_800_000, 4, True), "gpu": (460_800_000, 1, True), "memory": (1_600_000_000, 1, True)}
    chosen = choose(
        kind.name, domains, cpu_freq_hz={"a57": 1_036_800_000}, gpu_freq_hz=460_800_000, memory_freq_hz=1_600_000_000
    )
    mode = parse_stanza(chosen, kind)
    assert (mode.id, mode.name) == (2, "FARM_SWEEP_3")
    assert mode.online == dict.fromkeys(range(4), True)
    assert (mode.cpu_max_hz, mode.gpu_max_hz, mode.memory_max_hz) == ({0: 1_036_800_000}, 460_800_000, 1_600_000_000)
    text = export_nvpmodel(chosen, kind)
    assert "CPU_A57 MIN_FREQ 1036800\nCPU_A57 MAX_FREQ 1036800\n" in text
    assert "GPU_PWR_CNTL_EN on\nGPU MIN_FREQ 460800000\nGPU MAX_FREQ 460800000\n" in text
    assert "cannot hold it" in text


def test_stanza_of_a_tx2_leaves_out_a_cluster_that_is_offline() -> None:
    """As in NVIDIA's own modes there is no line for Denver's clock without Denver, and none for the boot core."""
    kind = require_board_type("jetson-tx2")
    domains = {"a57": (1_267_200_000, 4, True), "denver": (None, 0, False), "gpu": (1_300_500_000, 1, False)}
    chosen = choose(kind.name, domains, cores_online=(0, 3, 4, 5), cpu_freq_hz={"a57": 1_267_200_000})
    text = export_nvpmodel(chosen, kind)
    assert "CPU_DENVER" not in text
    assert "CORE_0" not in text
    assert "GPU MIN_FREQ 0\nGPU MAX_FREQ -1\n" in text
    mode = parse_stanza(chosen, kind)
    assert mode.plan_online(range(6), range(6)) == (0, 3, 4, 5)


def test_stanza_of_a_power_mode_takes_over_its_limits() -> None:
    """What a point leaves to its power mode is written as that mode has it, gated units too."""
    kind = require_board_type("jetson-agx-xavier")
    chosen = choose(kind.name, {"carmel0": (1_190_400_000, 2, False)}, power_mode="10W", gpu_freq_hz=318_750_000)
    text = export_nvpmodel(chosen, kind, mode_id=20)
    assert "< POWER_MODEL ID=20 NAME=FARM_SWEEP_3 >" in text
    assert "TPC_POWER_GATING TPC_PG_MASK 5\n" in text
    assert "CPU_DENVER_0 MIN_FREQ 1190400\nCPU_DENVER_0 MAX_FREQ 1200000\n" in text
    assert "GPU MAX_FREQ 318750000\n" in text
    assert "EMC MAX_FREQ 1065600000\n" in text
    mode = parse_stanza(chosen, kind)
    assert [cpu for cpu, on in mode.online.items() if on] == [0, 1]


def test_orin_clusters_are_numbered() -> None:
    """Both clusters of an Orin Nano are named as its file names them."""
    kind = require_board_type("jetson-orin-nano-8gb")
    domains = {"a78-0": (960_000_000, 4, True), "a78-1": (960_000_000, 2, True)}
    text = export_nvpmodel(choose(kind.name, domains, cpu_freq_hz={"*": 960_000_000}), kind)
    assert "CPU_A78_0 MAX_FREQ 960000\n" in text
    assert "CPU_A78_1 MIN_FREQ 960000\n" in text
    assert "FBP_PG_MASK" in text


@pytest.mark.parametrize(
    ("board_type", "point", "reason"),
    [
        ("raspberry-pi-4", {"cpu_freq_hz": {"*": 600_000_000}}, "no nvpmodel"),
        ("jetson-nano", {}, "nothing to set"),
        ("jetson-nano", {"power_mode": "30W"}, "30W"),
    ],
)
def test_what_nvpmodel_cannot_say_is_refused(board_type: str, point: dict[str, Any], reason: str) -> None:
    """No modes, nothing to set, a mode that nobody knows: each refusal says why."""
    with pytest.raises(UsageError, match=reason):
        export_nvpmodel(choose(board_type, **point), require_board_type(board_type))


def test_stock_ids_are_kept() -> None:
    """A stanza never takes the ID of a mode that boards are shipped with."""
    kind = require_board_type("jetson-nano")
    with pytest.raises(UsageError, match="MAXN"):
        export_nvpmodel(choose(kind.name, cpu_freq_hz={"a57": 102_000_000}), kind, mode_id=0)


def test_only_what_was_measured_is_exported() -> None:
    """Predicted points, throttled ones and ones that are not there are refused, with what to do."""
    document = sweep_documents.nano(every=3)
    tuned = document["series"][1]
    with pytest.raises(UsageError, match="only predicted"):
        export.choose_point(document, tuned, key="a57=204MHz")
    with pytest.raises(UsageError, match="no operating point"):
        export.choose_point(document, tuned, key="a57=205MHz")
    tuned["rows"][0] |= {"throttled": True, "invalid": "throttled: too warm"}
    with pytest.raises(UsageError, match="too warm"):
        export.choose_point(document, tuned, key="a57=102MHz")
    with pytest.raises(UsageError, match="no pick 9"):
        export.choose_point(document, tuned, rank=9)
    tuned |= {"pick": None, "no_pick": "no point keeps 1 ms"}
    with pytest.raises(UsageError, match="no point keeps 1 ms"):
        export.choose_point(document, tuned)


def test_runners_up_follow_the_pick() -> None:
    """Rank 1 is the pick, rank 2 the first runner-up."""
    document = sweep_documents.nano()
    tuned = document["series"][1]
    assert export.choose_point(document, tuned).is_pick
    assert export.choose_point(document, tuned, rank=2).row["key"] == tuned["pick"]["runners_up"][0]["key"]


def test_json_holds_the_point_as_agents_know_it() -> None:
    """The exported point is the protocol's, and null stays null."""
    kind = require_board_type("jetson-nano")
    chosen = choose(kind.name, cpu_freq_hz={"a57": 921_600_000})
    content = json.loads(export.export_json(chosen, kind))
    assert OperatingPoint.from_dict(content["operating_point"]) == chosen.point
    assert content["evidence"]["latency_s"]["low"] < content["evidence"]["latency_s"]["value"]
    assert content["simulated"] is False


def test_comments_carry_the_evidence_in_ascii_and_one_line_each() -> None:
    """A model's name cannot end a comment, and a simulated point says that it is."""
    chosen = choose("jetson-nano", cpu_freq_hz={"a57": 921_600_000})
    chosen.document["model"] = "réseau\nrm -rf /"  # type: ignore[index]
    chosen.document["board"]["simulated"] = True
    lines = export.write_comments(chosen)
    assert all(line.isascii() and "\n" not in line for line in lines)
    text = "\n".join(lines)
    for word in ("sweep 3", "SIMULATED", "latency", "power", "energy per inference", " to ", "pick"):
        assert word in text


# ---- the script


def write_script(folder: pathlib.Path, chosen: Chosen) -> pathlib.Path:
    """The script as a file."""
    path = folder / "point.sh"
    kind = require_board_type(chosen.document["board"]["type"])
    path.write_text(export_script.export_script(chosen, kind), encoding="utf-8")
    return path


def run(script: pathlib.Path, root: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a tree; whatever it prints comes back."""
    return subprocess.run(
        ["sh", str(script), *arguments],
        env=make_environment(root),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def make_environment(root: pathlib.Path) -> dict[str, str]:
    """What the script reads from its environment."""
    nvpmodel = str(root.parent / "nvpmodel")
    return {"PATH": os.environ["PATH"], "ROOT": str(root), "STATE": str(root.parent / "state"), "NVPMODEL": nvpmodel}


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small TX2's kernel files."""
    return clock_tree.make_tree(tmp_path / "root")


TX2_POINT: dict[str, Any] = {
    "cores_online": (0, 3, 4, 5),
    "cpu_freq_hz": {"a57": 960_000_000},
    "gpu_freq_hz": 624_750_000,
    "memory_freq_hz": 800_000_000,
}


def read(root: pathlib.Path, path: str) -> str:
    """A file's text."""
    return pathlib.Path(f"{root}{path}").read_text().strip()


def test_script_sets_and_restores(tmp_path: pathlib.Path, tree: pathlib.Path) -> None:
    """After `set` the tree holds the point, after `restore` what it held before, and the snapshot is gone."""
    script = write_script(tmp_path, choose("jetson-tx2", **TX2_POINT))
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
    script = write_script(tmp_path, choose("jetson-tx2", **TX2_POINT))
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
    script = write_script(tmp_path, choose("jetson-tx2", **TX2_POINT))
    before = clock_tree.read_all(tree)
    running = subprocess.Popen(
        ["sh", str(script), "run", "sh", "-c", "echo ready; exec sleep 60"],
        env=make_environment(tree),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(number)
        assert running.wait(_TIMEOUT_S) != 0
    finally:
        running.kill()
        running.communicate()
    assert clock_tree.read_all(tree) == before
    assert not (tmp_path / "state").exists()


def test_script_undoes_a_half_set_point(tmp_path: pathlib.Path, tree: pathlib.Path) -> None:
    """A clock that the board lacks is told with what there is, and what was already set goes back."""
    script = write_script(tmp_path, choose("jetson-tx2", **(TX2_POINT | {"gpu_freq_hz": 1_000_000_000})))
    before = clock_tree.read_all(tree)
    done = run(script, tree, "set")
    assert done.returncode == 1
    assert "no clock 1000000000" in done.stderr
    assert "624750000" in done.stderr
    assert clock_tree.read_all(tree) == before


def test_second_set_keeps_the_first_snapshot(tmp_path: pathlib.Path, tree: pathlib.Path) -> None:
    """Setting twice is refused, so that `restore` still knows what was there at first."""
    script = write_script(tmp_path, choose("jetson-tx2", **TX2_POINT))
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
    script = write_script(tmp_path, choose("jetson-tx2", power_mode="MAXQ", cpu_freq_hz={"a57": 960_000_000}))
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
    chosen = choose("jetson-nano", cpu_freq_hz={"a57": 921_600_000}, memory_freq_hz=204_000_000)
    script = write_script(tmp_path, chosen)
    done = run(script, root, "set")
    assert done.returncode == 0, done.stderr
    assert "warning: the memory clock is 1600000000" in done.stderr
    assert (debug / "clk/override.emc/clk_state").read_text() == "1\n"
    assert run(script, root, "restore").returncode == 0
    assert (debug / "clk/override.emc/clk_state").read_text() == "0\n"
    assert (cpu / "scaling_max_freq").read_text() == "1479000\n"


def test_script_is_sound_shell(tmp_path: pathlib.Path) -> None:
    """Shells parse it, and shellcheck, where it is installed, has nothing to say."""
    point = TX2_POINT | {"power_mode": "MAXQ"}
    script = write_script(tmp_path, choose("jetson-tx2", **point))
    for shell in ("sh", "bash", "dash", "busybox"):
        if path := shutil.which(shell):
            words = [path, "sh", "-n"] if shell == "busybox" else [path, "-n"]
            subprocess.run([*words, str(script)], check=True, timeout=_TIMEOUT_S)
    if checker := shutil.which("shellcheck"):
        done = subprocess.run([checker, str(script)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stdout


def test_script_needs_known_clusters() -> None:
    """A cluster that the type does not know is refused, since nobody can say which CPUs it has."""
    with pytest.raises(UsageError, match="big"):
        export_script.export_script(
            choose("jetson-nano", cpu_freq_hz={"big": 600_000_000}), require_board_type("jetson-nano")
        )
