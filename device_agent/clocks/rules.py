"""What the clock helper may write and read: an allow-list of kernel files with a check of every value.

This is the boundary between the unprivileged agent and root. It knows files, not operating points. Values are in the
kernel's units (kHz for the CPU, Hz elsewhere).
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Callable

from device_agent.errors import RefusedError
from device_agent.sysfs import Tree, read_int, read_ints, read_text

MAX_PATH_CHARS = 512
MAX_TEXT_CHARS = 40
# nvpmodel numbers its modes from 0; no published configuration has more than 9.
MAX_POWER_MODE = 63

_CPUS = "/sys/devices/system/cpu"
_DEBUG = "/sys/kernel/debug"
# Device-tree names of Tegra GPUs (rbonghi/jetson_stats, jtop/core/gpu.py).
GPU_NAMES = ("gpu", "gm20b", "gp10b", "gv11b", "ga10b")
FAN_NAMES = ("pwmfan", "pwm-fan")
# Averages that an INA3221 can take (TI INA3221 data sheet).
_SAMPLES = ("1", "4", "16", "64", "128", "256", "512", "1024")
_TEXT = re.compile(r"-?[A-Za-z0-9_]+(?:-[A-Za-z0-9_]+)*\Z", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,11}\Z", re.ASCII)

# Returns what is wrong with a value, "" if nothing.
Check = Callable[[Tree, str, str], str]


_POLICY = rf"{_CPUS}/(?:cpufreq/policy[0-9]+|cpu[0-9]+/cpufreq)"
# A GPU's devfreq folder as /sys/class lists it, and its target.
_DEVFREQ = r"/sys/(?:class|devices/(?:[^/]+/)*)/?devfreq/[^/]+"
_GPU_DEVICE = (
    rf"(?:{_DEVFREQ}/device|/sys/devices/(?:platform/(?:bus@0/)?)?(?:[0-9a-f]+\.(?:{'|'.join(GPU_NAMES)})|gpu\.0))"
)
_INA_IIO = r"/sys/(?:bus|devices)/(?:[^/]+/)*[0-9]+-00[0-9a-f]{2}/(?:iio:device[0-9]+|iio_device)"
_HWMON = r"/sys/(?:class|(?:bus|devices)/(?:[^/]+/)*)/?hwmon/hwmon[0-9]+"
_BPMP_EMC = rf"{_DEBUG}/bpmp/debug/clk/emc"
# Root-only files that may be read, beside everything writable.
_READABLE = re.compile(
    "(?:"
    + "|".join(
        (
            rf"{_INA_IIO}/(?:rail_name|warn_current_limit|crit_current_limit|polling_delay)_[0-9]",
            rf"{_POLICY}/cpuinfo_cur_freq",
            rf"{_DEBUG}/clk/(?:override\.)?emc/clk_(?:rate|min_rate|max_rate|possible_rates)",
            rf"{_DEBUG}/tegra_bwmgr/emc_(?:rate|min_rate|max_rate)",
            rf"{_BPMP_EMC}/(?:min_rate|max_rate|pto_counter)",
            rf"{_DEBUG}/bpmp/debug/emc/possible_rates",
            rf"{_DEBUG}/bpmp/debug/clk/nafll_[a-z0-9_]+/(?:swlut|pto_counter)",
            rf"{_DEBUG}/cactmon/mc_all",
            rf"{_DEBUG}/bpmp/debug/actmon/mc_all_avg_activity",
        )
    )
    + r")\Z",
    re.ASCII,
)


class Kind(enum.Enum):
    """What a file is, as far as restoring needs to know."""

    ONLINE = "online"
    MIN = "min"  # its MAX is in the same folder
    MAX = "max"
    GOVERNOR = "governor"
    SPEED = "speed"  # takes effect with the governor `userspace` only
    MEMORY_CAP = "memory cap"
    MEMORY_LOCK = "memory lock"
    MEMORY_RATE = "memory rate"  # a reading unless the lock beside it is on
    MEMORY_STATE = "memory state"
    POWER = "power"
    FAN_CONTROL = "fan control"
    FAN_SPEED = "fan speed"
    SENSOR = "sensor"


@dataclasses.dataclass(frozen=True)
class Rule:
    """The kind and the accepted values of files whose resolved path matches."""

    pattern: re.Pattern[str]
    kind: Kind
    check: Check


def _one_of(*values: str) -> Check:
    return lambda tree, path, text: "" if text in values else f"only {', '.join(values)}"


def _in_range(lowest: int, highest: int) -> Check:
    def check(tree: Tree, path: str, text: str) -> str:
        return "" if _NUMBER.match(text) and lowest <= int(text) <= highest else f"only {lowest} to {highest}"

    return check


def _cpu_freq(tree: Tree, path: str, text: str) -> str:
    folder = os.path.dirname(path)  # noqa: PTH120  a path on the board, not on this machine
    lowest, highest = read_int(tree, f"{folder}/cpuinfo_min_freq"), read_int(tree, f"{folder}/cpuinfo_max_freq")
    if lowest is None or highest is None:
        return "its bounds cannot be read"
    return _in_range(lowest, highest)(tree, path, text)


def _gpu_freq(tree: Tree, path: str, text: str) -> str:
    table = read_ints(tree, f"{_gpu_folder(path)}/available_frequencies")
    return _in_range(min(table), max(table))(tree, path, text) if table else "its table cannot be read"


def _gpu_folder(path: str) -> str:
    """The devfreq folder of a file, `.../devfreq/NAME`."""
    head, _, tail = path.rpartition("/devfreq/")
    return f"{head}/devfreq/{tail.partition('/')[0]}"


def is_gpu(tree: Tree, folder: str) -> bool:
    """Whether a devfreq folder is a GPU's: by its name, on newer kernels by its device's."""
    name = folder.rpartition("/")[2]
    return name.rpartition(".")[2] in GPU_NAMES or read_text(tree, f"{folder}/device/of_node/name") in GPU_NAMES


def _gpu_only(check: Check) -> Check:
    def check_both(tree: Tree, path: str, text: str) -> str:
        if "/devfreq/" in path and not is_gpu(tree, _gpu_folder(path)):
            return "not a GPU"
        return check(tree, path, text)

    return check_both


def _governor(available: str) -> Check:
    def check(tree: Tree, path: str, text: str) -> str:
        names = (read_text(tree, f"{os.path.dirname(path)}/{available}") or "").split()  # noqa: PTH120
        return "" if text in names else f"only {', '.join(names) or 'nothing: the list cannot be read'}"

    return check


def _named(names: tuple[str, ...], check: Check) -> Check:
    """Apply `check` only if the file `name` beside it names one of these drivers."""

    def check_both(tree: Tree, path: str, text: str) -> str:
        name = read_text(tree, f"{os.path.dirname(path)}/name")  # noqa: PTH120
        return check(tree, path, text) if name in names else f"not a driver of {', '.join(names)}"

    return check_both


_ANY_RATE = _in_range(0, 10**10)
_SWITCH = _one_of("0", "1")

_WRITABLE: tuple[tuple[str, Kind, Check], ...] = (
    (rf"{_CPUS}/cpu[1-9][0-9]*/online", Kind.ONLINE, _SWITCH),
    (rf"{_POLICY}/scaling_min_freq", Kind.MIN, _cpu_freq),
    (rf"{_POLICY}/scaling_max_freq", Kind.MAX, _cpu_freq),
    (rf"{_POLICY}/scaling_setspeed", Kind.SPEED, _cpu_freq),
    (rf"{_POLICY}/scaling_governor", Kind.GOVERNOR, _governor("scaling_available_governors")),
    (rf"{_DEVFREQ}/min_freq", Kind.MIN, _gpu_only(_gpu_freq)),
    (rf"{_DEVFREQ}/max_freq", Kind.MAX, _gpu_only(_gpu_freq)),
    (rf"{_DEVFREQ}/userspace/set_freq", Kind.SPEED, _gpu_only(_gpu_freq)),
    (rf"{_DEVFREQ}/governor", Kind.GOVERNOR, _gpu_only(_governor("available_governors"))),
    (rf"{_GPU_DEVICE}/railgate_enable", Kind.POWER, _gpu_only(_SWITCH)),
    (rf"{_GPU_DEVICE}/enable_3d_scaling", Kind.POWER, _gpu_only(_SWITCH)),
    (rf"{_GPU_DEVICE}/power/control", Kind.POWER, _gpu_only(_one_of("on", "auto"))),
    (rf"{_DEBUG}/clk/override\.emc/clk_update_rate", Kind.MEMORY_RATE, _ANY_RATE),
    (rf"{_DEBUG}/clk/override\.emc/clk_state", Kind.MEMORY_LOCK, _SWITCH),
    (rf"{_BPMP_EMC}/rate", Kind.MEMORY_RATE, _ANY_RATE),
    (rf"{_BPMP_EMC}/mrq_rate_locked", Kind.MEMORY_LOCK, _SWITCH),
    (rf"{_BPMP_EMC}/state", Kind.MEMORY_STATE, _SWITCH),
    (r"/sys/kernel/nvpmodel_emc_cap/emc_iso_cap", Kind.MEMORY_CAP, _ANY_RATE),
    (r"/sys/kernel/nvpmodel_clk_cap/emc", Kind.MEMORY_CAP, _ANY_RATE),
    (r"/sys/devices/pwm-fan/target_pwm", Kind.FAN_SPEED, _in_range(0, 255)),
    (r"/sys/devices/pwm-fan/temp_control", Kind.FAN_CONTROL, _SWITCH),
    (rf"{_HWMON}/pwm1", Kind.FAN_SPEED, _named(FAN_NAMES, _in_range(0, 255))),
    (rf"{_INA_IIO}/running_mode", Kind.SENSOR, _one_of("-1", "0", "1")),
    (rf"{_HWMON}/samples", Kind.SENSOR, _named(("ina3221",), _one_of(*_SAMPLES))),
    (rf"{_HWMON}/update_interval", Kind.SENSOR, _named(("ina3221",), _in_range(1, 10_000))),
)
RULES = tuple(Rule(re.compile(pattern + r"\Z", re.ASCII), kind, check) for pattern, kind, check in _WRITABLE)


def find_rule(real_path: str) -> Rule | None:
    """The rule for a resolved path; None: not writable."""
    return next((rule for rule in RULES if rule.pattern.match(real_path)), None)


def is_value(text: str) -> bool:
    """Whether a text may be a clock file's value: one short word."""
    return len(text) <= MAX_TEXT_CHARS and _TEXT.match(text) is not None


def resolve(tree: Tree, path: str) -> str:
    """Resolve a path's symbolic links, as on the board. Raises RefusedError if it leaves the tree.

    A virtual board's links stay inside it; its paths are taken as they are.
    """
    if not path.startswith("/") or len(path) > MAX_PATH_CHARS or not path.isascii() or not path.isprintable():
        raise RefusedError(f"not a path: {path[:MAX_TEXT_CHARS]!r}")
    if path != os.path.normpath(path) or path.startswith("//"):
        raise RefusedError(f"{path}: only plain absolute paths are taken")
    root = getattr(tree, "root", None)
    if root is None:
        return path
    base = os.path.realpath(root)
    real = os.path.realpath(f"{base.rstrip('/')}{path}")
    if base == "/":
        return real
    if not real.startswith(base + "/"):
        raise RefusedError(f"{path} leads out of the tree")
    return real[len(base) :]


def check_write(tree: Tree, path: str, text: str) -> tuple[str, Rule]:
    """The resolved path to write to, and its rule. Raises RefusedError for an unlisted path or value."""
    real = resolve(tree, path)
    rule = find_rule(real)
    if rule is None:
        raise RefusedError(f"{path} is not a file that the clock helper writes")
    if not is_value(text):
        raise RefusedError(f"{path}: not a value: {text[:MAX_TEXT_CHARS]!r}")
    if problem := rule.check(tree, real, text):
        raise RefusedError(f"{path} does not take {text!r}: {problem}")
    return real, rule


def check_read(tree: Tree, path: str) -> str:
    """The resolved path to read. Raises RefusedError for an unlisted one."""
    real = resolve(tree, path)
    if find_rule(real) is None and not _READABLE.match(real):
        raise RefusedError(f"{path} is not a file that the clock helper reads")
    return real


def check_power_mode(mode_id: object) -> int:
    """Check a power mode's number for nvpmodel's command line. Raises RefusedError."""
    if isinstance(mode_id, bool) or not isinstance(mode_id, int) or not 0 <= mode_id <= MAX_POWER_MODE:
        raise RefusedError(f"a power mode is a number from 0 to {MAX_POWER_MODE}, not {str(mode_id)[:20]}")
    return mode_id
