"""Describe a board from its machine: cores, clocks, memory, sensors, engines."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from pathlib import Path

from device_agent.platforms import gpu
from device_agent.protocol import PROTOCOL_VERSION, Description, Engine, texts
from device_agent.sysfs import FileTree, Tree, read_int, read_text

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
