"""What the clock helper writes and reads, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.clocks import rules
from device_agent.errors import RefusedError
from device_agent.sysfs import FileTree
from tests.clock_tree import A57, CPUS, EMC, EMC_CAP, GPU, GPU_CLASS, GPU_DEVICE, INA, make_link, make_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> FileTree:
    """A TX2's files; nothing here changes them."""
    return FileTree(make_tree(tmp_path_factory.mktemp("board")))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (f"{CPUS}/cpu1/online", "0"),
        (f"{A57}/scaling_min_freq", "345600"),
        (f"{A57}/scaling_max_freq", "2035200"),
        (f"{A57}/scaling_governor", "schedutil"),
        (f"{A57}/scaling_setspeed", "960000"),
        (f"{CPUS}/cpu0/cpufreq/scaling_max_freq", "960000"),
        (f"{GPU_CLASS}/min_freq", "114750000"),
        (f"{GPU_CLASS}/max_freq", "1300500000"),
        (f"{GPU_CLASS}/governor", "nvhost_podgov"),
        (f"{GPU_CLASS}/device/railgate_enable", "0"),
        (f"{GPU_DEVICE}/power/control", "on"),
        (f"{GPU_DEVICE}/enable_3d_scaling", "0"),
        (f"{EMC}/rate", "1331200000"),
        (f"{EMC}/mrq_rate_locked", "1"),
        (f"{EMC}/state", "1"),
        (EMC_CAP, "0"),
        ("/sys/devices/pwm-fan/target_pwm", "255"),
        ("/sys/devices/pwm-fan/temp_control", "0"),
        ("/sys/bus/i2c/devices/0-0040/iio:device0/running_mode", "-1"),
    ],
)
def test_writes(tree: FileTree, path: str, text: str) -> None:
    """Clock files take the values that a board has, through the links of /sys as well."""
    real, _ = rules.check_write(tree, path, text)
    assert tree.exists(real)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        # files outside of clock control, by any path
        ("/etc/shadow", "x"),
        ("/proc/sysrq-trigger", "b"),
        ("/sys/power/state", "mem"),
        (f"{CPUS}/cpu0/online", "0"),
        (f"{CPUS}/cpu0/online", "1"),
        (f"{CPUS}/cpu01/online", "0"),
        (f"{CPUS}/cpu1/../cpu0/online", "0"),
        (f"{CPUS}/cpu1/online/../../../../../../../../etc/shadow", "0"),
        (f"{CPUS}/cpu1/./online", "0"),
        (f"{CPUS}//cpu1/online", "0"),
        (f"/{CPUS}/cpu1/online", "0"),
        (f"{CPUS}/cpu1/online\n", "0"),
        (f"{CPUS}/cpu1/online\0", "0"),
        (f"{CPUS}/cpu\u0661/online", "0"),
        (f"{CPUS}/cpu1/online/", "0"),
        ("sys/devices/system/cpu/cpu1/online", "0"),
        ("", "0"),
        ("/", "0"),
        ("/" + "a" * 5000, "0"),
        (f"{A57}/cpuinfo_max_freq", "960000"),
        (f"{A57}/scaling_available_governors", "performance"),
        ("/sys/class/devfreq/other/min_freq", "1"),
        (f"{INA}/iio:device0/rail_name_0", "1"),
        # values
        (f"{CPUS}/cpu1/online", "2"),
        (f"{CPUS}/cpu1/online", ""),
        (f"{CPUS}/cpu1/online", "0\n"),
        (f"{CPUS}/cpu1/online", " 0"),
        (f"{CPUS}/cpu1/online", "0 1"),
        (f"{CPUS}/cpu1/online", "\u0660"),
        (f"{A57}/scaling_min_freq", "345599"),
        (f"{A57}/scaling_max_freq", "2035201"),
        (f"{A57}/scaling_max_freq", "-1"),
        (f"{A57}/scaling_max_freq", "9" * 20),
        (f"{A57}/scaling_max_freq", "9" * 100_000),
        (f"{A57}/scaling_max_freq", "0x1f0000"),
        (f"{A57}/scaling_max_freq", "1e6"),
        (f"{A57}/scaling_governor", "turbo"),
        (f"{A57}/scaling_governor", "scaling_available_governors"),
        (f"{A57}/scaling_governor", "sched"),
        (f"{GPU_CLASS}/max_freq", "1300500001"),
        (f"{GPU_DEVICE}/power/control", "off"),
        (f"{EMC}/rate", "99999999999"),
        (f"{EMC}/mrq_rate_locked", "yes"),
        ("/sys/devices/pwm-fan/target_pwm", "256"),
        (f"{INA}/iio:device0/running_mode", "-2"),
    ],
)
def test_refuses(tree: FileTree, path: str, text: str) -> None:
    """Everything else is refused, however it is written."""
    with pytest.raises(RefusedError):
        rules.check_write(tree, path, text)


@pytest.mark.parametrize("target", ["/etc/shadow", f"{CPUS}/cpu0/online", "/../../../../../../../../etc/passwd"])
def test_links_are_followed_first(tmp_path: Path, target: str) -> None:
    """A link at an allowed path is judged by where it leads."""
    root = make_tree(tmp_path)
    make_link(root, f"{CPUS}/cpu7/online", target)
    with pytest.raises(RefusedError):
        rules.check_write(FileTree(root), f"{CPUS}/cpu7/online", "0")


def test_what_leads_out_or_has_no_bounds_is_refused(tmp_path: Path) -> None:
    """In a captured tree an absolute link would reach the machine's own files."""
    root = make_tree(tmp_path)
    (root / CPUS[1:] / "cpu7").symlink_to(f"{CPUS}/cpu1")
    with pytest.raises(RefusedError, match="leads out"):
        rules.check_write(FileTree(root), f"{CPUS}/cpu7/online", "0")


def test_bounds_that_cannot_be_read(tmp_path: Path) -> None:
    """Without bounds there is nothing to check a clock against: it is refused."""
    root = make_tree(tmp_path)
    Path(f"{root}{A57}/cpuinfo_max_freq").unlink()
    Path(f"{root}{GPU}/available_frequencies").write_text("garbage")
    for path, text in ((f"{A57}/scaling_max_freq", "960000"), (f"{GPU}/max_freq", "318750000")):
        with pytest.raises(RefusedError, match="cannot be read"):
            rules.check_write(FileTree(root), path, text)


@pytest.mark.parametrize(("name", "allowed"), [("pwmfan", True), ("coretemp", False)])
def test_only_board_fans(tmp_path: Path, name: str, allowed: bool) -> None:
    """`pwm1` is a fan of the board only where its driver says so; other hardware monitors are not touched."""
    folder = tmp_path / "sys/devices/platform/fan/hwmon/hwmon3"
    folder.mkdir(parents=True)
    (folder / "name").write_text(name)
    (folder / "pwm1").write_text("0")
    make_link(tmp_path, "/sys/class/hwmon/hwmon3", "/sys/devices/platform/fan/hwmon/hwmon3")
    try:
        rules.check_write(FileTree(tmp_path), "/sys/class/hwmon/hwmon3/pwm1", "128")
        written = True
    except RefusedError:
        written = False
    assert written is allowed


@pytest.mark.parametrize(
    "path",
    [
        "/sys/bus/i2c/devices/0-0040/iio:device0/rail_name_0",
        f"{EMC}/min_rate",
        f"{EMC}/rate",
        "/sys/kernel/debug/bpmp/debug/emc/possible_rates",
        "/sys/kernel/debug/bpmp/debug/clk/nafll_gpu/swlut",
        "/sys/kernel/debug/tegra_bwmgr/emc_rate",
        f"{A57}/cpuinfo_cur_freq",
    ],
)
def test_reads(tree: FileTree, path: str) -> None:
    """What only root may read is on the list."""
    assert rules.check_read(tree, path)


@pytest.mark.parametrize("path", ["/etc/shadow", "/proc/kcore", "/sys/kernel/debug/../../../etc/shadow", f"{INA}/name"])
def test_does_not_read(tree: FileTree, path: str) -> None:
    """Files that are world-readable or secret are not."""
    with pytest.raises(RefusedError):
        rules.check_read(tree, path)


@pytest.mark.parametrize("mode_id", [-1, 64, True, "2", "2; reboot", 1.0, None])
def test_power_modes_are_numbers(mode_id: object) -> None:
    """What goes onto nvpmodel's command line is a small number and nothing else."""
    with pytest.raises(RefusedError):
        rules.check_power_mode(mode_id)
