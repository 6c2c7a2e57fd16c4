"""What sampling power costs: the highest rate, the share of a core at 100 Hz, one read of a kernel file, one integral.

The sensors' own cost is left out: their files are a table in this process. Default budget: half a minute.
"""

from __future__ import annotations

import time
from typing import Any

import _machine

from device_agent.board_types import load_board_types
from device_agent.power import energy
from device_agent.power.rail import open_reader
from device_agent.power.sampler import Sampler
from device_agent.power.sensors import PowerSensors, find_sensors
from device_agent.sysfs import FileTree

RATES_HZ = (100.0, 500.0, 1000.0)
KERNEL_FILE = "/proc/sys/kernel/pid_max"


class Table:
    """A board's power files as a table; values change every 10 ms."""

    simulated = True

    def __init__(self, chips: dict[str, tuple[str, ...]]) -> None:
        self._files: dict[str, str] = {}
        self._folders = {"/sys/bus/i2c/devices": list(chips)}
        for index, (chip, rails) in enumerate(chips.items()):
            folder = f"/sys/bus/i2c/devices/{chip}"
            self._folders[folder] = [f"iio:device{index}", "name"]
            self._files[f"{folder}/name"] = "ina3221x"
            for channel, rail in enumerate(rails):
                self._files[f"{folder}/iio:device{index}/rail_name_{channel}"] = rail
                self._files[f"{folder}/iio:device{index}/in_power{channel}_input"] = "3000"

    def read(self, path: str) -> str:
        text = self._files.get(path)
        if text is None:
            raise FileNotFoundError(2, "no such file", path)
        return text if text != "3000" else str(3000 + int(time.monotonic() * 100) % 7)

    def write(self, path: str, text: str) -> None:
        raise PermissionError(13, "read only", path)

    def names(self, folder: str) -> list[str]:
        if folder not in self._folders:
            raise FileNotFoundError(2, "no such folder", folder)
        return self._folders[folder]

    def exists(self, path: str) -> bool:
        return path in self._files or path in self._folders

    def run(self, command: list[str]) -> str:
        raise FileNotFoundError(2, "no tools", command[0])


def make_sensors(board_type: str) -> PowerSensors:
    """The sensors of a type's board, those of its carrier included."""
    known = load_board_types()[board_type]
    chips = {chip.address.replace("*", "0"): tuple(rail or "NC" for rail in chip.rails) for chip in known.power.chips}
    return find_sensors(Table(chips), known)


def sample(sensors: PowerSensors, rate_hz: float, seconds: float) -> dict[str, Any]:
    """Sample beside nothing: the rate reached, CPU time as a share of one core, the time of one integral."""
    sampler = Sampler(sensors, rate_hz)
    cpu_s, start_s = time.process_time(), time.monotonic()
    sampler.start()
    time.sleep(seconds)
    sampler.stop()
    end_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    trace = sampler.trace()
    began_s = time.perf_counter()
    energy.integrate(trace, start_s, end_s, sensors)
    integral_s = time.perf_counter() - began_s
    return {
        "asked_hz": rate_hz,
        "reached_hz": _machine.round_to(min(rail.reads for rail in trace.rails) / (end_s - start_s)),
        "share_of_a_core": _machine.round_to(cpu_s / (end_s - start_s)),
        "us_per_value": _machine.round_to(cpu_s / sum(rail.reads for rail in trace.rails) * 1e6),
        "ms_per_integral": _machine.round_to(integral_s * 1e3),
    }


def time_read(cached: bool, count: int) -> float:
    """Seconds per read of a kernel file, kept open or opened every time."""
    tree = FileTree()
    reader = open_reader(tree, KERNEL_FILE) if cached else lambda: tree.read(KERNEL_FILE)
    reader()
    began_s = time.perf_counter()
    for _ in range(count):
        reader()
    return (time.perf_counter() - began_s) / count


def main() -> None:
    """Print one JSON document."""
    options = _machine.parser(__doc__).parse_args()
    seconds, count = (0.5, 200) if options.quick else (4.0, 20_000)
    with _machine.only_json() as emit:
        _machine.wait_until_quiet(options.quick)
        boards = {}
        for name in ("jetson-nano", "jetson-tx2"):
            sensors = make_sensors(name)
            rows = []
            for rate_hz in RATES_HZ:
                _machine.say(f"{name}: {len(sensors.rails)} rails at {rate_hz:g} Hz")
                rows.append(sample(sensors, rate_hz, seconds))
            boards[name] = {"rails": len(sensors.rails), "rates": rows}
        emit(
            "sampling",
            {"seconds": seconds, "kernel_file": KERNEL_FILE},
            {
                "boards": boards,
                "us_per_read_kept_open": _machine.round_to(time_read(True, count) * 1e6),
                "us_per_read_opened": _machine.round_to(time_read(False, count) * 1e6),
            },
        )


if __name__ == "__main__":
    main()
