"""Clock files as a whole: find them, save their content to disk, restore it in an order that the kernel accepts.

Who holds them, and when they are put back, is in `transaction.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from device_agent.clocks import rules
from device_agent.clocks.rules import Kind
from device_agent.errors import ClockError, RefusedError
from device_agent.sysfs import Tree, list_names, read_text

# Drivers need milliseconds; one that has not recovered by then will not.
RESTORE_DEADLINE_S = 2.0
_PAUSE_S = 0.02
# In so many passes writes wait for their prerequisites; later passes write every file, so that none blocks another.
_PATIENT_PASSES = 5
_CPUS = "/sys/devices/system/cpu"
_VERSION = 1

# Values that change by themselves (fan speed, sensor mode, an unlocked memory clock) are restored, not compared.
_NOT_COMPARED = {Kind.FAN_SPEED, Kind.SENSOR, Kind.MEMORY_STATE, Kind.MEMORY_RATE, Kind.SPEED}
# The order in which files are written, pass by pass; cores online come before and cores offline after all of it.
_ORDER = (
    Kind.GOVERNOR, Kind.MIN, Kind.MAX, Kind.SPEED, Kind.MEMORY_CAP, Kind.MEMORY_LOCK, Kind.MEMORY_RATE,
    Kind.MEMORY_STATE, Kind.POWER, Kind.FAN_CONTROL, Kind.FAN_SPEED, Kind.SENSOR,
)  # fmt: skip
_POLICY_FILES = ("scaling_governor", "scaling_min_freq", "scaling_max_freq", "scaling_setspeed")
_GPU_FILES = (
    *("governor", "min_freq", "max_freq", "userspace/set_freq"),
    *(f"device/{name}" for name in ("railgate_enable", "enable_3d_scaling", "power/control")),
)
_FIXED = (
    "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap",
    "/sys/kernel/nvpmodel_clk_cap/emc",
    *(f"/sys/kernel/debug/clk/override.emc/{name}" for name in ("clk_update_rate", "clk_state")),
    *(f"/sys/kernel/debug/bpmp/debug/clk/emc/{name}" for name in ("rate", "state", "mrq_rate_locked")),
    *(f"/sys/devices/pwm-fan/{name}" for name in ("target_pwm", "temp_control")),
)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The content of every clock file by resolved path; the holder, and the boot."""

    files: dict[str, str]
    power_mode: int | None = None
    power_mode_set: bool = False  # restored only if set: nvpmodel is slow
    holder: str = ""
    boot_id: str = ""

    def save(self, path: Path) -> None:
        """Write to disk so that a power cut leaves the old file or the new one. Raises OSError."""
        save_json(path, dataclasses.asdict(self) | {"version": _VERSION})

    @staticmethod
    def load(path: Path) -> Snapshot | None:
        """Load the snapshot from disk; None without one.

        Raises ClockError for an unreadable one, which is kept as `*.corrupt`.
        """
        try:
            document = json.loads(path.read_bytes())
            if document.pop("version") != _VERSION:
                raise ValueError("of another version")
            snapshot = Snapshot(**document)
            for file, text in snapshot.files.items():
                if not isinstance(text, str) or len(text) > rules.MAX_TEXT_CHARS or rules.find_rule(file) is None:
                    raise ValueError(f"{str(file)[:80]!r} is not a clock file")
            if snapshot.power_mode is not None:
                rules.check_power_mode(snapshot.power_mode)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RefusedError) as error:
            aside = path.with_name(path.name + ".corrupt")
            with contextlib.suppress(OSError):
                path.replace(aside)
            raise ClockError(f"the snapshot of the clocks cannot be read ({error}); kept as {aside}") from error
        return snapshot


def save_json(path: Path, document: object) -> None:
    """Replace a file atomically and durably. Raises OSError."""
    unfinished = path.with_name(path.name + ".part")
    try:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:  # noqa: PTH123  there is a file descriptor already
            file.write(json.dumps(document, indent=1).encode())
            file.flush()
            os.fsync(fd)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's added and removed names to disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def find_clock_files(tree: Tree) -> list[str]:
    """Every writable clock file that this board may have, as resolved paths."""
    paths = [f"{_CPUS}/{cpu}/online" for cpu in list_names(tree, _CPUS, "cpu[0-9]*")]
    for policy in list_names(tree, f"{_CPUS}/cpufreq", "policy*"):
        paths += [f"{_CPUS}/cpufreq/{policy}/{name}" for name in _POLICY_FILES]
    for device in list_names(tree, "/sys/class/devfreq"):
        folder = f"/sys/class/devfreq/{device}"
        if rules.is_gpu(tree, folder):
            paths += [f"{folder}/{name}" for name in _GPU_FILES]
    paths += _FIXED
    for hwmon in list_names(tree, "/sys/class/hwmon"):
        name = read_text(tree, f"/sys/class/hwmon/{hwmon}/name")
        if name in rules.FAN_NAMES:
            paths.append(f"/sys/class/hwmon/{hwmon}/pwm1")
        elif name == "ina3221":
            paths += [f"/sys/class/hwmon/{hwmon}/{file}" for file in ("samples", "update_interval")]
    for device in list_names(tree, "/sys/bus/i2c/devices", "*-00*"):
        folder = f"/sys/bus/i2c/devices/{device}"
        paths += [f"{folder}/{child}/running_mode" for child in list_names(tree, folder, "iio[:_]device*")]
    found = []
    for path in paths:
        with contextlib.suppress(RefusedError):
            real = rules.resolve(tree, path)
            if rules.find_rule(real) is not None:
                found.append(real)
    return list(dict.fromkeys(found))


def take_snapshot(tree: Tree, holder: str = "") -> Snapshot:
    """Read every readable clock file, offline cores included."""
    return Snapshot(
        read_files(tree, find_clock_files(tree)),
        read_power_mode(tree),
        holder=holder,
        boot_id=read_text(tree, "/proc/sys/kernel/random/boot_id") or "",
    )


def read_files(tree: Tree, paths: Iterable[str]) -> dict[str, str]:
    """Read valid values; others are left out (`<unsupported>`, an offline core's folder)."""
    texts = {path: read_text(tree, path) for path in paths}
    return {path: text for path, text in texts.items() if text is not None and rules.is_value(text)}


def read_power_mode(tree: Tree) -> int | None:
    """The power mode that nvpmodel reports; None without nvpmodel."""
    with contextlib.suppress(OSError):
        lines = tree.run(["nvpmodel", "-q"]).split("\n")
        return next((int(line) for line in lines if re.fullmatch(r"\s*[0-9]{1,2}\s*", line)), None)
    return None


def plan_restore(wanted: Mapping[str, str], current: Mapping[str, str], patient: bool = True) -> list[tuple[str, str]]:
    """Plan the next writes, in order; empty when everything is as wanted.

    Cores go online first, alone, because their files appear with them; they go offline last. Not `patient`: all at
    once, in the same order.
    """
    kinds = {path: rule.kind for path in wanted if (rule := rules.find_rule(path))}
    different = [path for path in kinds if path in current and current[path] != wanted[path]]
    online = [path for path in different if kinds[path] is Kind.ONLINE]
    to_online = [(path, "1") for path in online if wanted[path] == "1"]
    if to_online and patient:
        return to_online
    changes = [
        (path, wanted[path])
        for kind in _ORDER
        for path in different
        if kinds[path] is kind and not _moves_by_itself(path, kind, wanted)
    ]
    changes = _order_limits(changes, current)
    to_offline = [(path, "0") for path in online if wanted[path] == "0"]
    return (changes or to_offline) if patient else [*to_online, *changes, *to_offline]


def _moves_by_itself(path: str, kind: Kind, wanted: Mapping[str, str]) -> bool:
    """Whether the file's saved content is a reading of a value that other files control."""
    folder = path.rpartition("/")[0]
    if kind is Kind.MEMORY_RATE:
        return wanted.get(f"{folder}/mrq_rate_locked", "1") == "0"
    if kind is Kind.FAN_SPEED:
        return wanted.get(f"{folder}/temp_control", "0") == "1"
    return False


def _order_limits(changes: list[tuple[str, str]], current: Mapping[str, str]) -> list[tuple[str, str]]:
    """Order bounds so that min never exceeds max: upward the upper one first, downward the lower."""
    ordered: list[tuple[str, str]] = []
    for path, text in changes:
        ordered.append((path, text))
        lower = path.replace("max_freq", "min_freq")
        if lower != path and text.isdecimal() and current[path].isdecimal() and int(text) > int(current[path]):
            position = next((i for i, (before, _) in enumerate(ordered) if before == lower), None)
            if position is not None:
                ordered.insert(position, ordered.pop())
    return ordered


def restore(
    tree: Tree, snapshot: Snapshot, deadline_s: float = RESTORE_DEADLINE_S, pause: Callable[[float], None] = time.sleep
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Restore the snapshot; retry until `deadline_s`, with a minimum of passes.

    Returns notes, and the files that did not go back (empty: all did). Never raises OSError.
    """
    started = time.monotonic()
    notes: list[str] = []
    refused: dict[str, str] = {}
    if snapshot.power_mode_set and snapshot.power_mode is not None and read_power_mode(tree) != snapshot.power_mode:
        try:
            tree.run(["nvpmodel", "-m", str(snapshot.power_mode)])
            notes.append(f"power mode {snapshot.power_mode} set again")
        except OSError as error:
            refused["nvpmodel"] = error.strerror or str(error)
    # A boot resets the kernel's values, and may change its files.
    same_boot = snapshot.boot_id == (read_text(tree, "/proc/sys/kernel/random/boot_id") or "")
    written: dict[str, None] = {}
    passes = 0
    while True:
        passes += 1
        current = read_files(tree, snapshot.files)
        missing = _find_missing(snapshot.files, current) if same_boot else []
        # Even on a slow board, one pass runs in which no file blocks another.
        late = passes > _PATIENT_PASSES + 1 and time.monotonic() - started > deadline_s
        changes = plan_restore(snapshot.files, current, passes <= _PATIENT_PASSES)
        compared = [(path, text) for path, text in changes if not _is_free(path, snapshot.files)]
        free_tries_left = passes <= _PATIENT_PASSES and len(compared) < len(changes)
        if late or not (compared or missing or free_tries_left):
            break
        for path, text in changes:
            try:
                tree.write(path, text)
                written[path] = None
                refused.pop(path, None)
            except OSError as error:
                refused[path] = error.strerror or str(error)
        if passes > 2:
            pause(_PAUSE_S)
    problems = [f"{path} is gone" for path in missing]
    for path, text in compared:
        why = f": {refused[path]}" if path in refused else ""
        problems.append(f"{path} holds {current[path]!r}, should hold {text!r}{why}")
    if snapshot.power_mode_set and (mode := read_power_mode(tree)) != snapshot.power_mode:
        problems.append(f"the power mode is {mode}, should be {snapshot.power_mode}: {refused.get('nvpmodel', '')}")
    notes += [f"{path} did not go back to {text!r}" for path, text in changes if (path, text) not in compared]
    if written:
        notes.append(f"{len(written)} files put back in {(time.monotonic() - started) * 1000:.0f} ms")
    return tuple(notes), tuple(problems)


def _is_free(path: str, wanted: Mapping[str, str]) -> bool:
    rule = rules.find_rule(path)
    if rule is None or rule.kind not in _NOT_COMPARED:
        return rule is None
    folder = path.rpartition("/")[0]
    if rule.kind is Kind.MEMORY_RATE:
        return "1" not in (wanted.get(f"{folder}/mrq_rate_locked"), wanted.get(f"{folder}/clk_state"))
    if rule.kind is Kind.SPEED:
        return wanted.get(f"{folder}/scaling_governor") != "userspace"
    return True


def _find_missing(wanted: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Compared files that are unreadable. A policy may disappear with the core that it is named after."""
    missing = []
    for path in wanted:
        if path not in current and not _is_free(path, wanted):
            policy = re.match(rf"{_CPUS}/cpufreq/policy([0-9]+)/", path)
            if not (policy and wanted.get(f"{_CPUS}/cpu{policy[1]}/online") == "0"):
                missing.append(path)
    return missing
