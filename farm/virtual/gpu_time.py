"""A virtual board's GPU: its driver (code in `gpu/`), and a model of its time for kernel launches, by clock.

The stand-in driver emulates machine code and estimates each launch's cycles and memory traffic (`gpu/play.cc`).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from device_agent.board_types import BoardType
from device_agent.platforms import gpu
from device_agent.protocol.processors import REACHED, START_S

# Assumed: the CPU takes 2 us to submit a launch.
ASKING_S = 2e-6
# Seconds until DRAM answers; assumed, and of little effect.
_DRAM_S = 180e-9
DRIVER = "libcuda_virtual.so"
# Compute and memory time of a kernel overlap in part: their power mean. Fitted to two networks on a TX2
# (`benchmarks/published_power.py`); 1 would be their sum, infinity the longer one.
OVERLAP = 2.5
# Read by gpu/driver.cc.
VARIABLE = "TVM_FARM_VIRTUAL_GPU"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's cost in one run of a program: GPU cycles and memory bytes per launch, launched `times` times."""

    cycles: float
    moved_bytes: float
    times: int = 1
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU for `estimate`: multiprocessors, their clock, the memory's bandwidth, and the fitted constants.

    `port_bytes` come from L2 each cycle; a pair of instructions takes `pair_slots`; each word of a vector takes
    `vector_turns` of shared memory.
    """

    processors: int
    freq_hz: float
    memory_bytes_per_s: float
    l2_bytes: int
    port_bytes: float = 16.0
    pair_slots: int = 2
    vector_turns: float = 1.0


def take_launches() -> list[Kernel]:
    """Take what this process's virtual GPU has run since the last call, a kernel for each launch."""
    if (library := _find_driver()) is None:
        return []
    library.farm_gpu_launches.restype = ctypes.c_char_p
    words = (line.split() for line in library.farm_gpu_launches().decode().splitlines())
    return [Kernel(float(cycles), float(moved), 1, name) for name, cycles, moved in words]


def _find_driver() -> Any | None:
    path = os.environ.get(gpu.DRIVER_VARIABLE)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(path, os.RTLD_NOLOAD) if path else None
    return None


def open_driver(path: str) -> ctypes.CDLL:
    """Load the stand-in driver for `estimate` in a process without TVM."""
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(path)


def sum_up(launches: Iterable[Kernel], calls: int) -> tuple[Kernel, ...]:
    """The cost of one of `calls` equal calls on the GPU, per kernel."""
    counted = collections.Counter(launches)
    return tuple(
        dataclasses.replace(launch, times=times // calls) for launch, times in counted.items() if times >= calls
    )


def estimate(
    driver: ctypes.CDLL,
    cubin: bytes,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[int],
    device: Gpu,
    shared_bytes: int = 0,
) -> float:
    """Estimate the seconds of one launch of a cubin's kernel, with the start; `driver` is the stand-in's library.

    `arguments` are the bytes behind each pointer, or values. Raises ValueError for what cannot be emulated.
    """
    driver.farm_gpu_estimate.restype = ctypes.c_char_p
    sizes = (ctypes.c_uint * 7)(*grid, *block, shared_bytes)
    given = (ctypes.c_double * 6)(
        device.processors,
        device.l2_bytes,
        _DRAM_S * device.freq_hz,
        device.port_bytes,
        device.pair_slots,
        device.vector_turns,
    )
    found = (ctypes.c_double * 2)()
    values = (ctypes.c_ulonglong * len(arguments))(*arguments)
    size = ctypes.c_size_t(len(cubin))
    count = len(arguments)
    if message := driver.farm_gpu_estimate(cubin, size, kernel.encode(), sizes, count, values, given, found):
        raise ValueError(f"{kernel}: {message.decode()}")
    return max(found[0] / device.freq_hz, found[1] / (REACHED * device.memory_bytes_per_s)) + START_S


def compute_seconds(
    kernels: Sequence[Kernel], facts: Mapping[str, Any], gpu_hz: float, memory_share: float
) -> tuple[float, float, float]:
    """The GPU's time at a clock and a share of the memory's highest clock, and the busy shares of its processors and
    of the memory.
    """
    bandwidth = REACHED * max(float(facts["memory_bytes_per_s"]), 1e9) * memory_share
    total = computing = moving = 0.0
    for kernel in kernels:
        compute_s, move_s = kernel.cycles / max(gpu_hz, 1.0), kernel.moved_bytes / bandwidth
        total += kernel.times * ((compute_s**OVERLAP + move_s**OVERLAP) ** (1 / OVERLAP) + START_S)
        computing += kernel.times * compute_s
        moving += kernel.times * move_s
    return total * float(facts["stretch"]), computing / max(total, 1e-12), moving / max(total, 1e-12)


def use_folder(folder: Path | None, facts: BoardType | None) -> None:
    """Set the folder of the plug-in and of the driver for forked processes; None: the board offers no GPU."""
    if folder is None:
        return
    os.environ[gpu.DRIVER_VARIABLE] = str(folder / DRIVER)
    if facts is None or facts.gpu is None:
        os.environ[gpu.PLUGIN_VARIABLE] = ""
        return
    gpu.use_folder(folder, facts)
    # Existing settings come last: they inject failures.
    os.environ[VARIABLE] = f"{_describe(facts)};{os.environ.get(VARIABLE, '')}"


def _describe(facts: BoardType) -> str:
    """Describe the driver; half of the memory belongs to the system and the CPU."""
    gpu_facts = facts.gpu
    assert gpu_facts is not None
    cuda = next(iter(gpu_facts.cuda.values()), "10.2")
    major, minor = map(int, cuda.split("."))
    values = {
        "name": f"{facts.soc} GPU, virtual",
        "capability": gpu_facts.arch.removeprefix("sm_"),
        "processors": gpu_facts.processors or 1,
        "driver": 1000 * major + 10 * minor,
        "memory": (facts.memory_bytes or 4 << 30) // 2,
        "registers": gpu_facts.registers_per_block or 65536,
        "shared": gpu_facts.shared_bytes_per_block or 49152,
        "clock_khz": max(gpu_facts.freqs_hz, default=0) // 1000,
    }
    return ";".join(f"{key}={value}" for key, value in values.items())
