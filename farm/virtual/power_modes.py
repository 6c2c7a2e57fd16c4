"""nvpmodel on a virtual board: its configuration file, generated from the type's power modes, and the command.

File syntax: LineageOS/android_device_nvidia_quill and _galen, nvpmodel/*.conf. Output of the command: public logs; exit
codes are assumed (255 on failure).
"""

from __future__ import annotations

import errno
import os

from device_agent.protocol import EVERY_CLUSTER
from device_agent.protocol.hardware import PowerMode
from farm.virtual.board import VirtualBoard
from farm.virtual.files import Files
from farm.virtual.files_clocks import DEFAULT_MEMORY_CAP, MEMORY_CAP

_FAILED = 255
CONFIGURATION = "/etc/nvpmodel.conf"
_CPU_NAMES = {
    "cortex-a57": "CPU_A57",
    "denver2": "CPU_DENVER",
    "carmel": "CPU_DENVER_{}",
    "cortex-a78ae": "CPU_A78_{}",
}


def add_power_mode_files(board: VirtualBoard, files: Files) -> None:
    """Add the configuration file, if the type has power modes."""
    if board.board_type.power_modes and board.parameters.release:
        files.fixed(CONFIGURATION, render_configuration(board))


def render_configuration(board: VirtualBoard) -> str:
    """The text of /etc/nvpmodel.conf."""
    lines = ["< PARAM TYPE=FILE NAME=CPU_ONLINE >"]
    lines += [f"CORE_{cpu} /sys/devices/system/cpu/cpu{cpu}/online" for cpu in board.cpus]
    gating = any(mode.power_gating for mode in board.board_type.power_modes)
    if gating:
        lines += ["", "< PARAM TYPE=FILE NAME=TPC_POWER_GATING >", "TPC_PG_MASK /sys/devices/gpu.0/tpc_pg_mask"]
    for index, cluster in enumerate(board.clusters.values()):
        folder = f"/sys/devices/system/cpu/cpu{cluster.cpus[0]}/cpufreq"
        lines += ["", f"< PARAM TYPE=CLOCK NAME={_cpu_name(index, cluster.core)} >"]
        lines += [f"FREQ_TABLE {folder}/scaling_available_frequencies"]
        lines += [f"MAX_FREQ {folder}/scaling_max_freq", f"MIN_FREQ {folder}/scaling_min_freq"]
    if board.gpu:
        folder = f"/sys/class/devfreq/{board.gpu_device}"
        lines += ["", "< PARAM TYPE=CLOCK NAME=GPU >", f"FREQ_TABLE {folder}/available_frequencies"]
        lines += [f"MAX_FREQ {folder}/max_freq", f"MIN_FREQ {folder}/min_freq"]
    lines += [
        "",
        "< PARAM TYPE=CLOCK NAME=EMC >",
        f"MAX_FREQ {MEMORY_CAP.get(board.parameters.release, DEFAULT_MEMORY_CAP)}",
    ]
    for mode in board.board_type.power_modes:
        lines += ["", f"< POWER_MODEL ID={mode.id} NAME={mode.name} >", *_render_mode(board, mode, gating)]
    boots_in = board.board_type.default_power_mode
    lines += ["", f"< PM_CONFIG DEFAULT={board.board_type.power_modes[0].id if boots_in is None else boots_in} >"]
    return "\n".join(lines)


def _render_mode(board: VirtualBoard, mode: PowerMode, gating: bool) -> list[str]:
    lines = []
    for cpu in board.cpus:
        lines.append(f"CPU_ONLINE CORE_{cpu} {int(mode.cores_online is None or cpu in mode.cores_online)}")
    if gating:
        lines.append(f"TPC_POWER_GATING TPC_PG_MASK {mode.power_gating}")
    for index, cluster in enumerate(board.clusters.values()):
        cap_hz = mode.cpu_max_hz.get(cluster.name, mode.cpu_max_hz.get(EVERY_CLUSTER))
        name = _cpu_name(index, cluster.core)
        lines += [f"{name} MIN_FREQ 0", f"{name} MAX_FREQ {int(cap_hz) // 1000 if cap_hz else -1}"]
    if board.gpu:
        lines += ["GPU MIN_FREQ 0", f"GPU MAX_FREQ {mode.gpu_max_hz or -1}"]
    lines.append(f"EMC MAX_FREQ {mode.memory_max_hz or 0}")
    return lines


def _cpu_name(index: int, core: str) -> str:
    """The file's name for a cluster: by core, numbered if all are alike. Carmel counts as Denver."""
    return _CPU_NAMES.get(core, "CPU_{}").format(index)


def run_nvpmodel(board: VirtualBoard, arguments: list[str], privileged: bool) -> str:
    """The command's output. Raises OSError with the exit code as `errno`, PermissionError for a change by a user.

    A mode with other power gating asks whether to reboot, gets no answer, and changes nothing.
    """
    modes = board.board_type.power_modes
    if not modes or not board.parameters.release:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "nvpmodel")
    match arguments:
        case ["-q" | "--query", *_]:
            now = board.power_mode or modes[0]
            return f"NV Power Mode: {now.name}\n{now.id}\n"
        case ["-p" | "--print", *_]:
            return "\n".join(f"POWER_MODEL: ID={mode.id} NAME={mode.name}" for mode in modes) + "\n"
        case ["-m" | "--mode", text, *_]:
            return _set_mode(board, text, privileged)
    raise OSError(_FAILED, "NVPM ERROR: Error parsing arguments", "nvpmodel")


def _set_mode(board: VirtualBoard, text: str, privileged: bool) -> str:
    if not privileged:
        raise PermissionError(errno.EPERM, "NVPM ERROR: Error opening file: Permission denied", "nvpmodel")
    mode = next((mode for mode in board.board_type.power_modes if str(mode.id) == text), None)
    if mode is None:
        raise OSError(_FAILED, f"NVPM ERROR: invalid power mode {text}", "nvpmodel")
    if board.power_mode and mode.power_gating != board.power_mode.power_gating:
        raise OSError(
            _FAILED,
            f"NVPM WARN: Reboot required for changing to this power mode: {mode.id}\n"
            "NVPM WARN: DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:\n"
            "NVPM ERROR: Reboot is rejected",
            "nvpmodel",
        )
    with board.change():
        board.apply_power_mode(mode)
    return ""
