"""The remaining files of a virtual board: power sensors, device tree, /proc, thermal zones, fan, kernel log."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable

from farm.virtual.board import VirtualBoard
from farm.virtual.clocks import refuse
from farm.virtual.files import Files, parse_number
from farm.virtual.sensors import BUS_STEP_V, SAMPLES, SHUNT_STEP_V, Chip, uniform

# Unset limits, as the drivers print them.
_NO_LIMIT_MA = 32760
# hwmon numbers follow the order in which drivers start.
_FIRST_HWMON = 1

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
# Share of memory reserved by firmware and kernel.
_KERNEL_SHARE = 0.03


def make_chips(board: VirtualBoard) -> list[Chip]:
    """Make the board's INA3221s. Optional ones exist if the type's simulation says so."""
    chips: list[Chip] = []
    for chip in board.board_type.power.chips:
        if chip.fitted or board.parameters.optional_sensors:
            bus = chips[0].address.partition("-")[0] if chips else "0"
            chips.append(Chip(board, chip, chip.address.replace("*", bus)))
    return chips


def add_power_files(board: VirtualBoard, files: Files, chips: list[Chip]) -> None:
    """Add the files of every chip, in the form of the board's release."""
    old = board.parameters.release in ("R28", "R32")
    driver = "ina3221x" if old else "ina3221"
    for index, chip in enumerate(chips):
        device = f"/sys/bus/i2c/devices/{chip.address}"
        files.link(f"/sys/bus/i2c/drivers/{driver}/{chip.address}", device)
        files.fixed(f"{device}/name", driver)
        if old:
            _add_iio(files, chip, f"{device}/iio:device{index}")
            files.link(f"/sys/bus/iio/devices/iio:device{index}", f"{device}/iio:device{index}")
        else:
            number = _FIRST_HWMON + board.seed % 4 + index
            _add_hwmon(board, files, chip, f"{device}/hwmon/hwmon{number}")
            files.link(f"/sys/class/hwmon/hwmon{number}", f"{device}/hwmon/hwmon{number}")


def _millivolt(chip: Chip, channel: int) -> int:
    return round(chip.read(channel)[0] * BUS_STEP_V * 1000)


def _milliampere(chip: Chip, channel: int) -> int:
    rail = chip.rails[channel]
    assert rail is not None
    return round(chip.read(channel)[1] * SHUNT_STEP_V / chip.shunt_of(rail) * 1000)


def _add_iio(files: Files, chip: Chip, folder: str) -> None:
    files.fixed(f"{folder}/name", "ina3221x")
    files.add(f"{folder}/running_mode", lambda: str(int(not chip.triggered)), _write_mode(chip), private=True)
    for channel, rail in enumerate(chip.rails):
        name = rail.name if rail else "NC"
        files.add(f"{folder}/rail_name_{channel}", lambda name=name: name, private=True)  # type: ignore[misc]
        for limit in ("warn", "crit"):
            path = f"{folder}/{limit}_current_limit_{channel}"
            files.add(path, lambda: f"{_NO_LIMIT_MA} ma", lambda text: None, private=True)
        files.add(f"{folder}/polling_delay_{channel}", lambda: "0 ms", lambda text: None)
        quantities: dict[str, Callable[[Chip, int], int]] = {
            "voltage": _millivolt,
            "current": _milliampere,
            "power": lambda chip, channel: _millivolt(chip, channel) * _milliampere(chip, channel) // 1000,
        }
        for quantity, read in quantities.items():
            text = "0" if rail is None else None
            files.add(
                f"{folder}/in_{quantity}{channel}_input",
                lambda read=read, channel=channel, text=text: text or str(read(chip, channel)),  # type: ignore[misc]
            )


def _write_mode(chip: Chip) -> Callable[[str], None]:
    def write(text: str) -> None:
        mode = parse_number(text, lowest=-1)
        if mode > 1:
            raise refuse(errno.EINVAL)
        # -1 lets the driver choose: continuous while the CPU is up.
        chip.triggered = mode == 0

    return write


def _add_hwmon(board: VirtualBoard, files: Files, chip: Chip, folder: str) -> None:
    files.fixed(f"{folder}/name", "ina3221")

    def set_samples(text: str) -> None:
        wanted = parse_number(text)
        chip.samples = min(SAMPLES, key=lambda samples: abs(samples - wanted))

    def set_interval(text: str) -> None:
        # The driver picks the nearest conversion time; the model accepts any.
        chip.conversion_s = max(140e-6, min(parse_number(text) / 1000 / (6 * chip.samples), 8.244e-3))

    files.add(f"{folder}/samples", lambda: str(chip.samples), set_samples)
    files.add(f"{folder}/update_interval", lambda: str(round(chip.update_period_s * 1000)), set_interval)
    for index, rail in enumerate(chip.rails):
        number = index + 1
        files.fixed(f"{folder}/in{number}_label", rail.name if rail else "NC")
        files.fixed(f"{folder}/in{number}_enable", "1")
        unread: Callable[[Chip, int], int] = lambda chip, channel: 0  # noqa: E731
        volt, ampere = (_millivolt, _milliampere) if rail else (unread, unread)
        files.add(f"{folder}/in{number}_input", lambda i=index, f=volt: str(f(chip, i)))  # type: ignore[misc]
        files.add(f"{folder}/curr{number}_input", lambda i=index, f=ampere: str(f(chip, i)))  # type: ignore[misc]
        shunt = f"{folder}/in{number + 3}_input"
        files.add(shunt, lambda i=index, r=rail: str(round(chip.read(i)[1] * SHUNT_STEP_V * 1000) if r else 0))  # type: ignore[misc]
        files.fixed(f"{folder}/shunt{number}_resistor", str(round((chip.shunt_of(rail) if rail else 0.005) * 1e6)))
        for limit in ("max", "crit"):
            files.add(f"{folder}/curr{number}_{limit}", lambda: str(_NO_LIMIT_MA), lambda text: None)
            # The supply's alarm shows on the first channel, the input on most boards.
            first = index == 0 and limit == "max"
            files.add(
                f"{folder}/curr{number}_{limit}_alarm",
                lambda first=first: str(int(first and board.over_current)),  # type: ignore[misc]
            )
    files.fixed(f"{folder}/in7_label", "sum of shunt voltages")
    connected = [index for index, rail in enumerate(chip.rails) if rail]
    files.add(f"{folder}/in7_input", lambda: str(round(sum(chip.read(i)[1] for i in connected) * SHUNT_STEP_V * 1000)))


def add_machine_files(board: VirtualBoard, files: Files) -> None:
    """Add all of these files."""
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
        files.fixed(f"{folder}/compatible", " ".join(compatible))  # NULs become spaces
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
    # Zones differ a little, by their place on the die; they read in steps of half a degree.
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
