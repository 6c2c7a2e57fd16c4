"""The rest of a virtual board's files: device tree, /proc, release, thermal zones, cooling, fan, kernel log."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from device_agent.virtual.board import VirtualBoard
from device_agent.virtual.clocks import refuse
from device_agent.virtual.files import Files, parse_number
from device_agent.virtual.noise import uniform

_THERMAL = "/sys/class/thermal"
_EAGAIN = 11
_TICKS_PER_S = 100
_REVISIONS = {"t210": "t210ref", "t186": "t186ref", "t194": "t186ref", "t234": "t186ref"}
# MIDR part numbers: (implementer, part). Arm's from Linux, arch/arm64/include/asm/cputype.h.
_PARTS = {
    "cortex-a57": ("0x41", "0xd07"),
    "cortex-a72": ("0x41", "0xd08"),
    "cortex-a78ae": ("0x41", "0xd42"),
    "denver2": ("0x4e", "0x003"),
    "carmel": ("0x4e", "0x004"),
}
_DEFAULT_MEMORY_BYTES = 4 << 30
# What firmware and kernel keep of the memory for themselves.
_KERNEL_SHARE = 0.03


def add_machine_files(board: VirtualBoard, files: Files) -> None:
    """Everything here."""
    _add_identity(board, files)
    _add_proc(board, files)
    _add_thermal(board, files)
    _add_fan(board, files)


def _add_identity(board: VirtualBoard, files: Files) -> None:
    simulation, detect = board.parameters, board.board_type.detect
    compatible = simulation.compatible or (*detect.compatible[:1], f"nvidia,tegra{board.board_type.soc[1:]}")
    model = simulation.model or (detect.models[0] if detect.models else board.board_type.title)
    for folder in ("/proc/device-tree", "/sys/firmware/devicetree/base"):
        files.fixed(f"{folder}/model", model)
        files.fixed(f"{folder}/compatible", " ".join(compatible))  # NULs, as a tree shows them
    if simulation.release:
        soc = _REVISIONS.get(board.board_type.soc, "")
        files.fixed(
            "/etc/nv_tegra_release",
            f"# {simulation.release} (release), REVISION: {simulation.revision or '0.0'}, GCID: 0, BOARD: {soc}, "
            "EABI: aarch64, DATE: Sat Feb 19 17:05:08 UTC 2022",
        )


def _add_proc(board: VirtualBoard, files: Files) -> None:
    def cpuinfo() -> str:
        blocks = []
        for cpu in sorted(board.online):
            implementer, part = _PARTS.get(board.cluster_of(cpu).core, ("0x41", "0x000"))
            lines = [
                f"processor\t: {cpu}",
                "BogoMIPS\t: 38.40",
                "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32",
                f"CPU implementer\t: {implementer}",
                "CPU architecture: 8",
                f"CPU part\t: {part}",
                "CPU revision\t: 1",
            ]
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks)

    total_kb = round((board.board_type.memory_bytes or _DEFAULT_MEMORY_BYTES) * (1 - _KERNEL_SHARE) / 1024)
    files.add("/proc/cpuinfo", cpuinfo)
    files.fixed("/proc/meminfo", f"MemTotal:       {total_kb} kB\nMemFree:        {total_kb // 2} kB\n"
                f"MemAvailable:   {total_kb * 3 // 4} kB")  # fmt: skip
    files.add("/proc/loadavg", lambda: f"{board.load_average:.2f} {board.load_average:.2f} 0.00 1/200 1000")
    files.add("/proc/uptime", lambda: f"{board.uptime_s:.2f} {board.uptime_s:.2f}")

    def stat() -> str:
        busy = round(board.busy_core_s * _TICKS_PER_S)
        idle = max(0, round(board.uptime_s * len(board.online) * _TICKS_PER_S) - busy)
        return f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\nbtime 0"

    files.add("/proc/stat", stat)
    files.add(
        "/proc/sys/kernel/random/boot_id",
        lambda: str(uuid.uuid5(uuid.NAMESPACE_OID, f"{board.board_type.name} {board.seed} {board.boots}")),
    )
    files.add("/dev/kmsg", lambda: "\n".join(["soctherm: OC ALARM 0x00000001"] * board.over_currents), private=True)


def _add_thermal(board: VirtualBoard, files: Files) -> None:
    thermal = board.parameters.thermal
    constants = dict(thermal.constant_c)
    for index, zone in enumerate(board.board_type.thermal.zones or ("cpu-thermal",)):
        folder = f"{_THERMAL}/thermal_zone{index}"
        files.fixed(f"{folder}/type", zone)
        files.fixed(f"{folder}/mode", "enabled")
        if zone in constants:
            files.fixed(f"{folder}/temp", str(round(constants[zone] * 1000)))
        elif zone in thermal.unpowered:
            files.add(f"{folder}/temp", _refuse_reading)
        else:
            files.add(f"{folder}/temp", _read_zone(board, index))
            for number, (kind, trip_c) in enumerate((("passive", thermal.trip_c), ("critical", thermal.critical_c))):
                files.fixed(f"{folder}/trip_point_{number}_type", kind)
                files.fixed(f"{folder}/trip_point_{number}_temp", str(round(trip_c * 1000)))
                files.fixed(f"{folder}/trip_point_{number}_hyst", str(round(thermal.hysteresis_c * 1000)))
    for index, kind in enumerate((*thermal.cooling, "pwm-fan")):
        folder = f"{_THERMAL}/cooling_device{index}"
        files.fixed(f"{folder}/type", kind)
        fan = kind == "pwm-fan"
        files.fixed(f"{folder}/max_state", "10" if fan else "1")
        files.add(
            f"{folder}/cur_state",
            (lambda: str(board.fan_pwm * 10 // 255)) if fan else (lambda: str(int(board.throttled))),
        )
    if board.parameters.release in ("R35", "R36"):
        files.fixed("/sys/class/hwmon/hwmon0/name", "soctherm_oc")
        files.add("/sys/class/hwmon/hwmon0/oc1_event_cnt", lambda: str(board.over_currents))


def _refuse_reading() -> str:
    raise refuse(_EAGAIN)


def _read_zone(board: VirtualBoard, index: int) -> Callable[[], str]:
    # Zones differ a little, by where on the die they sit; they are read in steps of half a degree.
    offset_c = 2.0 * (uniform(board.seed, index) - 0.5)
    return lambda: str(round((board.temperature_c + offset_c) * 2) * 500)


def _add_fan(board: VirtualBoard, files: Files) -> None:
    fan = board.board_type.fan

    def set_pwm(text: str) -> None:
        board.fan_pwm = min(parse_number(text), 255)

    if board.parameters.release in ("R35", "R36"):
        folder = "/sys/class/hwmon/hwmon9"
        files.fixed(f"{folder}/name", "pwmfan")
        files.add(f"{folder}/pwm1", lambda: str(board.fan_pwm), set_pwm)
    elif fan.pwm:
        files.add(fan.pwm, lambda: str(board.fan_pwm), set_pwm)
        if fan.control:
            files.add(fan.control, lambda: "0", lambda text: None)
        if fan.rpm:
            files.add(fan.rpm, lambda: str(board.fan_pwm * 20))
