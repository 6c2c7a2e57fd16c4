"""A small board's clock files in a folder: enough of a TX2 for the clock helper, as plain files and relative links."""

from __future__ import annotations

import os
from pathlib import Path

CPUS = "/sys/devices/system/cpu"
A57, DENVER = f"{CPUS}/cpufreq/policy0", f"{CPUS}/cpufreq/policy1"
GPU_DEVICE = "/sys/devices/17000000.gp10b"
GPU = f"{GPU_DEVICE}/devfreq/17000000.gp10b"
GPU_CLASS = "/sys/class/devfreq/17000000.gp10b"
EMC = "/sys/kernel/debug/bpmp/debug/clk/emc"
EMC_CAP = "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
INA = "/sys/devices/3160000.i2c/i2c-0/0-0040"
_KHZ = (345600, 652800, 960000, 1267200, 1574400, 2035200)
_GPU_HZ = (114750000, 318750000, 624750000, 930750000, 1300500000)
GOVERNORS = "interactive conservative ondemand userspace powersave performance schedutil"
# A point that touches every domain, in the order in which a controller writes it.
PIN = (
    (f"{A57}/scaling_max_freq", "960000"),
    (f"{A57}/scaling_min_freq", "960000"),
    (f"{A57}/scaling_governor", "performance"),
    (f"{GPU_CLASS}/max_freq", "624750000"),
    (f"{GPU_CLASS}/min_freq", "624750000"),
    (f"{GPU_CLASS}/device/railgate_enable", "0"),
    (f"{EMC}/mrq_rate_locked", "1"),
    (f"{EMC}/rate", "800000000"),
    (f"{CPUS}/cpu1/online", "0"),
    (f"{CPUS}/cpu2/online", "0"),
)


def make_tree(root: Path) -> Path:
    files = {f"{CPUS}/cpu{cpu}/online": "1" for cpu in range(1, 6)}
    for policy in (A57, DENVER):
        files |= {
            f"{policy}/cpuinfo_min_freq": str(_KHZ[0]),
            f"{policy}/cpuinfo_max_freq": str(_KHZ[-1]),
            f"{policy}/scaling_available_frequencies": " ".join(map(str, _KHZ)),
            f"{policy}/scaling_available_governors": GOVERNORS,
            f"{policy}/scaling_min_freq": str(_KHZ[0]),
            f"{policy}/scaling_max_freq": str(_KHZ[-1]),
            f"{policy}/scaling_governor": "schedutil",
            f"{policy}/scaling_setspeed": "<unsupported>",
        }
    files |= {
        f"{GPU}/available_frequencies": " ".join(map(str, _GPU_HZ)),
        f"{GPU}/available_governors": "wmark_active nvhost_podgov userspace performance",
        f"{GPU}/min_freq": str(_GPU_HZ[0]),
        f"{GPU}/max_freq": str(_GPU_HZ[-1]),
        f"{GPU}/governor": "nvhost_podgov",
        f"{GPU_DEVICE}/of_node/name": "gp10b",
        f"{GPU_DEVICE}/railgate_enable": "1",
        f"{GPU_DEVICE}/power/control": "auto",
        f"{GPU_DEVICE}/enable_3d_scaling": "1",
        f"{EMC}/rate": "1600000000",
        f"{EMC}/state": "1",
        f"{EMC}/mrq_rate_locked": "0",
        f"{EMC}/min_rate": "40800000",
        f"{EMC}/max_rate": "1866000000",
        EMC_CAP: "0",
        "/sys/devices/pwm-fan/target_pwm": "80",
        "/sys/devices/pwm-fan/temp_control": "1",
        f"{INA}/name": "ina3221x",
        f"{INA}/iio:device0/running_mode": "1",
        f"{INA}/iio:device0/rail_name_0": "VDD_SYS_GPU",
        "/sys/class/devfreq/other/min_freq": "1",
        "/proc/sys/kernel/random/boot_id": "3a5f0d04-0000-0000-0000-000000000001",
        "/etc/shadow": "secret",
    }
    for path, text in files.items():
        file = Path(f"{root}{path}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    for link, target in (
        (GPU_CLASS, GPU),
        (f"{GPU}/device", GPU_DEVICE),
        (f"{CPUS}/cpu0/cpufreq", A57),
        (f"{CPUS}/cpu1/cpufreq", DENVER),
        ("/sys/bus/i2c/devices/0-0040", INA),
    ):
        make_link(root, link, target)
    return root


def make_link(root: Path, link: str, target: str) -> None:
    at = Path(f"{root}{link}")
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(os.path.relpath(f"{root}{target}", at.parent))


def read_all(root: Path) -> dict[str, str]:
    paths = [f"{CPUS}/cpu{cpu}/online" for cpu in range(1, 6)]
    paths += [f"{p}/scaling_{name}" for p in (A57, DENVER) for name in ("min_freq", "max_freq", "governor")]
    paths += [f"{GPU}/{name}" for name in ("min_freq", "max_freq", "governor")]
    paths += [f"{GPU_DEVICE}/{name}" for name in ("railgate_enable", "power/control")]
    paths += [f"{EMC}/mrq_rate_locked", EMC_CAP]
    return {path: Path(f"{root}{path}").read_text().strip() for path in paths if Path(f"{root}{path}").is_file()}
