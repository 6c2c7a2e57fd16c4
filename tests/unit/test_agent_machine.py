"""What the agent reads of a machine, on trees of files as a kernel shows them."""

from __future__ import annotations

import pathlib

import pytest

from device_agent.platforms.evidence import Machine, Sensors
from device_agent.sysfs import FileTree


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """The root of a small ARM board: two of four cores online, one of them clocked, three thermal zones."""
    files = {
        "sys/devices/system/cpu/online": "0,2-3\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1479000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_min_freq": "102000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "1479000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "921600\n",
        "sys/devices/system/cpu/cpu2/cpufreq/scaling_cur_freq": "<unknown>\n",
        "sys/class/thermal/cooling_device0/type": "pwm-fan\n",
        "sys/class/thermal/cooling_device0/cur_state": "3\n",
        "sys/class/thermal/cooling_device1/type": "cpu-throttle-alert\n",
        "sys/class/thermal/cooling_device1/cur_state": "1\n",
        "sys/class/hwmon/hwmon3/name": "ina3221\n",
        "sys/class/hwmon/hwmon3/curr1_max_alarm": "0\n",
        "sys/class/hwmon/hwmon4/name": "soctherm_oc\n",
        "sys/class/hwmon/hwmon4/oc1_event_cnt": "7\n",
        "proc/stat": "cpu  100 10 50 9000 5 1 4 0 0 0\ncpu0 100 10 50 9000 5 1 4 0 0 0\n",
        "sys/class/thermal/thermal_zone0/type": "AO-therm\n",
        "sys/class/thermal/thermal_zone0/temp": "41500\n",
        "sys/class/thermal/thermal_zone1/type": "CPU-therm\n",
        "sys/class/thermal/thermal_zone10/type": "CPU-therm\n",
        "sys/class/thermal/thermal_zone10/temp": "-1000\n",
        "proc/loadavg": "0.50 0.40 0.30 1/200 1234\n",
        "proc/cpuinfo": "processor\t: 0\nCPU part\t: 0xd07\n",
        "proc/meminfo": "MemTotal:        4057000 kB\nMemFree: 1 kB\n",
        "proc/device-tree/model": "NVIDIA Jetson Nano Developer Kit\0",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_what_the_files_say_is_read(tree: pathlib.Path) -> None:
    """Clocks come in Hz and temperatures in degrees; an unreadable clock or zone is missing, not zero. A fan at work is
    no throttling; an active throttle alert and an over-current counter are. A board type's ignored zones (a constant
    placeholder) appear nowhere. A file that is gone when it is read does not raise.
    """
    evidence = Sensors(FileTree(tree)).read()
    assert evidence.cpu_freq_hz == {"0": 1_479_000_000}
    assert evidence.cpu_max_hz == {"0": 921_600_000}
    assert evidence.temperature_c == {"AO-therm": 41.5, "CPU-therm.10": -1.0}
    assert evidence.gpu_freq_hz is None
    assert evidence.busy_s == pytest.approx(1.65)
    assert evidence.load_1min == 0.5
    evidence = Sensors(FileTree(tree)).read()
    assert evidence.cooling == {"cpu-throttle-alert": 1}
    assert evidence.alarms == {"ina3221.curr1_max_alarm": 0, "soctherm_oc.oc1_event_cnt": 7}
    sensors = Sensors(FileTree(tree), ignore=("AO-therm",))
    assert sensors.thermal_zones == ("CPU-therm", "CPU-therm.10")
    assert "AO-therm" not in sensors.read().temperature_c
    sensors = Sensors(FileTree(tree))
    (tree / "sys/class/thermal/thermal_zone0/temp").unlink()
    assert "AO-therm" not in sensors.read().temperature_c


def test_a_board_is_described_from_its_files(tree: pathlib.Path) -> None:
    """Cores, clock range, memory, zones and the model's name are what the kernel says."""
    description = Machine(FileTree(tree)).describe("b", "jetson-nano", "1.0")
    assert description.cores_online == (0, 2, 3)
    assert description.cpu_freq_range_hz == {"0": (102_000_000, 1_479_000_000)}
    assert description.memory_bytes == 4_057_000 * 1024
    assert description.cpu_model == "NVIDIA Jetson Nano Developer Kit"
    assert not description.simulated


def test_a_machine_without_any_of_it_is_described_all_the_same(tmp_path: pathlib.Path) -> None:
    """On an empty tree everything unknown is empty, and nothing raises."""
    description = Machine(FileTree(tmp_path)).describe("b", "local", "1.0")
    assert description.cpu_freq_range_hz == {}
    assert description.memory_bytes == 0
    assert description.cpu_model == "unknown"
    assert Sensors(FileTree(tmp_path)).read().load_1min is None


def test_cpu_parts_stand_in_for_a_missing_model(tree: pathlib.Path) -> None:
    """An ARM machine without a device tree is named by its CPU part numbers."""
    (tree / "proc/device-tree/model").unlink()
    assert Machine(FileTree(tree)).read_cpu_model() == "CPU part 0xd07"
