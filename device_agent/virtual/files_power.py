"""Power sensor files of a virtual board: INA3221 as iio device (R32) and as hwmon device (later releases)."""

from __future__ import annotations

import errno
from collections.abc import Callable

from device_agent.virtual.board import VirtualBoard
from device_agent.virtual.clocks import refuse
from device_agent.virtual.files import Files, parse_number
from device_agent.virtual.sensors import BUS_STEP_V, SAMPLES, SHUNT_STEP_V, Chip

# Limits that nothing has set, as the drivers print them.
_NO_LIMIT_MA = 32760
# hwmon numbers go by the order in which drivers come up.
_FIRST_HWMON = 1


def make_chips(board: VirtualBoard) -> list[Chip]:
    """The board's INA3221s. One that only some carriers have is there where the type's simulation says so."""
    chips: list[Chip] = []
    for chip in board.board_type.power.chips:
        if chip.fitted or board.parameters.optional_sensors:
            bus = chips[0].address.partition("-")[0] if chips else "0"
            chips.append(Chip(board, chip, chip.address.replace("*", bus)))
    return chips


def add_power_files(board: VirtualBoard, files: Files, chips: list[Chip]) -> None:
    """The files of every chip, in the form of the board's release."""
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
        # -1 lets the driver choose, and it chooses continuous while the CPU is up.
        chip.triggered = mode == 0

    return write


def _add_hwmon(board: VirtualBoard, files: Files, chip: Chip, folder: str) -> None:
    files.fixed(f"{folder}/name", "ina3221")

    def set_samples(text: str) -> None:
        wanted = parse_number(text)
        chip.samples = min(SAMPLES, key=lambda samples: abs(samples - wanted))

    def set_interval(text: str) -> None:
        # The driver finds the conversion time that comes nearest; any is taken here.
        chip.conversion_s = max(140e-6, min(parse_number(text) / 1000 / (6 * chip.samples), 8.244e-3))

    files.add(f"{folder}/samples", lambda: str(chip.samples), set_samples)
    files.add(f"{folder}/update_interval", lambda: str(round(chip.update_period_s * 1000)), set_interval)
    for index, rail in enumerate(chip.rails):
        number = index + 1
        label = rail.name if rail else "NC"
        files.fixed(f"{folder}/in{number}_label", label)
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
            # The supply's alarm shows on the first channel, which is the input on most boards.
            first = index == 0 and limit == "max"
            files.add(
                f"{folder}/curr{number}_{limit}_alarm",
                lambda first=first: str(int(first and board.over_current)),  # type: ignore[misc]
            )
    files.fixed(f"{folder}/in7_label", "sum of shunt voltages")
    connected = [index for index, rail in enumerate(chip.rails) if rail]
    files.add(f"{folder}/in7_input", lambda: str(round(sum(chip.read(i)[1] for i in connected) * SHUNT_STEP_V * 1000)))
