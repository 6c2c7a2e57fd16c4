"""What a board's files tell: evidence for a measurement (clocks, temperatures, throttling, load); its description.

Only reads kernel files; `session/measurement.py` judges. Unreadable values are missing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from device_agent.platforms import gpu
from device_agent.protocol import PROTOCOL_VERSION, Description, Engine, Evidence, texts
from device_agent.sysfs import FileTree, Tree, list_names, parse_int, read_int, read_text, read_texts

_CPUS = "/sys/devices/system/cpu"
_THERMAL = "/sys/class/thermal"
_HWMON = "/sys/class/hwmon"
_LOAD, _STAT = "/proc/loadavg", "/proc/stat"
# Cooling devices that cool, rather than slow the board down.
_FAN = re.compile("fan|pwm", re.IGNORECASE)
# INA3221 limits (Linux, Documentation/hwmon/ina3221.rst) and the counters of Tegra's over-current throttling.
_ALARM = re.compile(r"curr\d+_(max|crit)_alarm|oc\d+_event_cnt")
# The only place where an R32 kernel reports clocks reduced by under-voltage or over-current.
_KERNEL_LOG = "/dev/kmsg"
_KERNEL_ALARM = b"soctherm: OC ALARM"
_MAX_MESSAGES = 10_000
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Reader = Callable[[], "int | None"]


class Sensors:
    """The readable files of `tree`, found once. `gpu` and `memory` read those clocks in Hz, `gpu_load` the GPU's load.

    Zones in `ignore` have meaningless values (PMIC-Die).
    """

    def __init__(
        self,
        tree: Tree | None = None,
        ignore: tuple[str, ...] = (),
        gpu: Reader | None = None,
        memory: Reader | None = None,
        gpu_load: Callable[[], float | None] | None = None,
    ) -> None:
        self.tree = tree or FileTree()
        self._gpu, self._memory, self._gpu_load = gpu, memory, gpu_load
        self._cores = [
            name.removeprefix("cpu")
            for name in list_names(self.tree, _CPUS, "cpu[0-9]*")
            if name.removeprefix("cpu").isdecimal()
        ]
        self._zones = {
            zone: path for zone, path in self._find(_THERMAL, "thermal_zone*", "temp").items() if zone not in ignore
        }
        cooling = self._find(_THERMAL, "cooling_device*", "cur_state")
        self._cooling = {kind: path for kind, path in cooling.items() if not _FAN.search(kind)}
        self._alarms = {
            f"{read_text(self.tree, f'{_HWMON}/{chip}/name') or chip}.{name}": f"{_HWMON}/{chip}/{name}"
            for chip in list_names(self.tree, _HWMON)
            for name in list_names(self.tree, f"{_HWMON}/{chip}")
            if _ALARM.fullmatch(name)
        }
        of_this_machine = isinstance(self.tree, FileTree) and str(self.tree.root) == "/"
        self._log = _KernelLog() if of_this_machine else None

    @property
    def thermal_zones(self) -> tuple[str, ...]:
        """Names of the thermal zones, as they appear in `Evidence.temperature_c`."""
        return tuple(self._zones)

    def read(self) -> Evidence:
        cores = {
            name: {core: f"{_CPUS}/cpu{core}/cpufreq/{name}" for core in self._cores}
            for name in ("scaling_cur_freq", "scaling_max_freq")
        }
        wanted = [_LOAD, _STAT, *self._alarms.values(), *self._zones.values(), *self._cooling.values()]
        wanted += [path for paths in cores.values() for path in paths.values()]
        texts = self._look(wanted)
        load = (texts[_LOAD] or "").split()
        alarms = _parse(self._alarms, texts)
        if self._log is not None and (logged := self._log.count()) is not None:
            alarms["kernel log"] = logged
        return Evidence(
            cpu_freq_hz={core: khz * 1000 for core, khz in _parse(cores["scaling_cur_freq"], texts).items()},
            cpu_max_hz={core: khz * 1000 for core, khz in _parse(cores["scaling_max_freq"], texts).items()},
            gpu_freq_hz=self._gpu() if self._gpu else None,
            gpu_load=self._gpu_load() if self._gpu_load else None,
            memory_freq_hz=self._memory() if self._memory else None,
            temperature_c={zone: milli / 1000 for zone, milli in _parse(self._zones, texts).items()},
            cooling=_parse(self._cooling, texts),
            alarms=alarms,
            load_1min=float(load[0]) if load else None,
            busy_s=_parse_busy_s(texts[_STAT]),
        )

    def read_temperatures(self) -> dict[str, float]:
        return {zone: milli / 1000 for zone, milli in _parse(self._zones, self._look(self._zones.values())).items()}

    def read_busy_s(self) -> float | None:
        """CPU time used since boot over all cores and processes, in ticks of 10 ms."""
        return _parse_busy_s(read_text(self.tree, _STAT))

    def _look(self, paths: Iterable[str]) -> dict[str, str | None]:
        """Read the paths, in one request if the tree supports that."""
        wanted = list(paths)
        return dict(zip(wanted, read_texts(self.tree, wanted), strict=True))

    def _find(self, folder: str, pattern: str, name: str) -> dict[str, str]:
        """The file `name` of every matching folder, by the folder's `type`; equal types are numbered."""
        found: dict[str, str] = {}
        for entry in list_names(self.tree, folder, pattern):
            kind = read_text(self.tree, f"{folder}/{entry}/type") or entry
            if kind in found:
                kind = f"{kind}.{re.sub('^[a-z_]*', '', entry)}"
            found[kind] = f"{folder}/{entry}/{name}"
        return found


def _parse(paths: Mapping[str, str], texts: Mapping[str, str | None]) -> dict[str, int]:
    """The integers, by name; others are dropped."""
    values = {name: parse_int(texts[path]) for name, path in paths.items()}
    return {name: value for name, value in values.items() if value is not None}


def _parse_busy_s(text: str | None) -> float | None:
    words = (text or "").split("\n", 1)[0].split()
    if len(words) < 8 or words[0] != "cpu":
        return None
    user, nice, system, _idle, _iowait, irq, soft, *_ = map(int, words[1:])
    return (user + nice + system + irq + soft) * _TICK_S


class _KernelLog:
    """Counts the kernel's over-current messages, per process from its first read.

    A worker closes every inherited file, so each process opens the log itself.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._fd = -1
        self._count = 0

    def count(self) -> int | None:
        """Alarms logged since the first read; None if the log is closed to this user."""
        if self._pid != os.getpid():
            self._pid, self._fd, self._count = os.getpid(), -1, 0
            with contextlib.suppress(OSError):
                self._fd = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._fd, 0, os.SEEK_END)
        if self._fd < 0:
            return None
        for _ in range(_MAX_MESSAGES):
            try:
                message = os.read(self._fd, 8192)
            except BrokenPipeError:  # unread messages were overwritten; continue with the next
                continue
            except OSError:
                break
            if not message:
                break
            self._count += _KERNEL_ALARM in message
        return self._count


# The modules and their distributions that serve each engine; the first that is installed counts.
_DISTRIBUTIONS = {
    Engine.RELAX_VM: (("tvm", "apache-tvm"),),
    Engine.KERNEL: (("tvm", "apache-tvm"),),
    Engine.ONNXRUNTIME: (("onnxruntime", "onnxruntime"),),
    Engine.NCNN: (("ncnn", "ncnn"),),
    Engine.PYTORCH: (("torch", "torch"),),
    Engine.TFLITE: (("ai_edge_litert", "ai-edge-litert"), ("tflite_runtime", "tflite-runtime")),
}
# Where Debian's packages put TensorRT's library.
_LIBRARIES = ("/usr/lib/aarch64-linux-gnu", "/usr/lib/x86_64-linux-gnu")


class Machine:
    """One machine, whose /sys and /proc are in `tree`. `board.py` adds a board's clocks and sensors."""

    def __init__(self, tree: Tree | None = None) -> None:
        self._tree = tree or FileTree()

    def describe(self, name: str, board_type: str, version: str) -> Description:
        """Read everything now; fields for missing hardware are empty. Never raises for a missing file."""
        cores = self.read_cores_online()
        versions = find_engine_versions()
        engines = tuple(versions)
        cuda, lack = gpu.describe()
        return Description(
            name=name,
            board_type=board_type,
            agent_version=version,
            protocol_version=PROTOCOL_VERSION,
            simulated=self._tree.simulated,
            architecture=platform.machine(),
            cpu_model=self.read_cpu_model(),
            cores_online=cores,
            cpu_freq_range_hz=self.read_cpu_freq_ranges(cores),
            memory_bytes=self.read_memory_bytes(),
            engines=engines,
            engine_versions=versions | ({"cuda": cuda} if cuda else {}),
            rails=(),
            thermal_zones=(),
            notes=(lack,) if lack else (),
        )

    def read_cores_online(self) -> tuple[int, ...]:
        """Online cores, from the kernel's list such as `0,3-5`."""
        text = read_text(self._tree, "/sys/devices/system/cpu/online")
        return tuple(range(os.cpu_count() or 1)) if text is None else texts.parse_cpus(text)

    def read_cpu_freq_ranges(self, cores: tuple[int, ...]) -> dict[str, tuple[int, int]]:
        """Lowest and highest clock in Hz of each core with cpufreq."""
        ranges = {}
        for core in cores:
            folder = f"/sys/devices/system/cpu/cpu{core}/cpufreq"
            lowest, highest = (
                read_int(self._tree, f"{folder}/{name}") for name in ("cpuinfo_min_freq", "cpuinfo_max_freq")
            )
            if lowest is not None and highest is not None:
                ranges[str(core)] = (lowest * 1000, highest * 1000)
        return ranges

    def read_cpu_model(self) -> str:
        """The CPU's name: `model name` on x86, the device tree's model or the CPU part numbers on ARM."""
        cpuinfo = read_text(self._tree, "/proc/cpuinfo") or ""
        if found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
            return found.group(1)
        if model := read_text(self._tree, "/proc/device-tree/model"):
            return model
        parts = sorted(set(re.findall(r"^CPU part\s*:\s*(\S+)$", cpuinfo, re.MULTILINE)))
        return f"CPU part {', '.join(parts)}" if parts else "unknown"

    def read_memory_bytes(self) -> int:
        """Memory usable by Linux in bytes; 0 if unreadable."""
        meminfo = read_text(self._tree, "/proc/meminfo") or ""
        found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
        return int(found.group(1)) * 1024 if found else 0


def find_engine_versions() -> dict[str, str]:
    """The engines that this board can run, with versions."""
    versions = {}
    for engine, choices in _DISTRIBUTIONS.items():
        found = [distribution for module, distribution in choices if importlib.util.find_spec(module) is not None]
        if found:
            try:
                versions[engine.value] = importlib.metadata.version(found[0])
            except importlib.metadata.PackageNotFoundError:  # unpacked without metadata, as in a bundle
                versions[engine.value] = "unknown"
    if find_trtexec() is not None:
        names = [path.name for folder in _LIBRARIES for path in Path(folder).glob("libnvinfer.so.*.*.*")]
        versions[Engine.TENSORRT.value] = names[0].removeprefix("libnvinfer.so.") if names else "unknown"
    return versions


def find_trtexec() -> str | None:
    """The command of TensorRT, on PATH or where JetPack has it."""
    return shutil.which("trtexec") or shutil.which("trtexec", path="/usr/src/tensorrt/bin")
