"""A virtual board's CUDA driver: where it is, and what GPU it stands for. Its code is in `gpu/`."""

from __future__ import annotations

import os
from pathlib import Path

from device_agent.board_types import BoardType
from device_agent.platforms import gpu

DRIVER = "libcuda_virtual.so"
# Read by gpu/driver.cc.
VARIABLE = "TVM_FARM_VIRTUAL_GPU"


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
