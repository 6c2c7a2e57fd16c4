"""A model of a Jetson GPU's streaming multiprocessor, by architecture: its resources, resident blocks and cycles.

Predictions of schedules and virtual boards share it; each counts a block's work itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# Of a cache, on all cores.
_LINE_BYTES = 64

# Emulated code: cycles and memory lines of the longest lane, cycles and lines of all lanes.
Segment = tuple[float, int, float, int]


WARP = 32
# A kernel's launch on the device (Jia et al. 2018, arXiv 1804.06826), and the achievable share of the peak memory
# bandwidth. Assumed.
START_S, REACHED = 3e-6, 0.8


def count_seconds(
    segments: Sequence[Segment], core: Mapping[str, Any], hz: float, cores: int, memory_s: float = 1.0
) -> tuple[float, float]:
    """Seconds that segments take at a clock, and the CPU time of all cores together.

    A segment takes at least its longest lane's cycles, its lines on one core, and all lanes' lines on the memory, which
    is `memory_s` times slower than at its highest clock. More threads than cores share the cores.
    """
    one_line_s = _LINE_BYTES / core["core_bytes_per_s"] * memory_s
    all_lines_s = _LINE_BYTES / core["memory_bytes_per_s"] * memory_s
    base_s = busy_s = 0.0
    for cycles, lines, all_cycles, all_lines in segments:
        is_region = (all_cycles, all_lines) != (cycles, lines)
        beside = core["region_cycles"] if is_region else core["call_cycles"]
        longest = max(cycles, all_cycles / max(1, cores)) + beside
        base_s += max(longest / hz, lines * one_line_s, all_lines * all_lines_s)
        busy_s += (all_cycles + beside) / hz
    return base_s, busy_s


@dataclasses.dataclass(frozen=True)
class Processor:
    """float32 lanes, FMA latency in cycles, and the resources that blocks share; registers have 32 bits.

    `cache_bytes` is the GPU's L2, shared by its processors.
    """

    lanes: int
    fma_cycles: float
    registers: int
    shared_bytes: int
    threads: int
    blocks: int
    cache_bytes: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Latencies: Jia et al. 2018 (arXiv
# 1804.06826). L2 of Nano and TX2: deviceQuery; Xavier's and Orin's are unconfirmed.
_PROCESSORS = {
    "sm_53": Processor(128, 6.0, 65536, 64 << 10, 2048, 32, 256 << 10),
    "sm_62": Processor(128, 6.0, 65536, 64 << 10, 2048, 32, 512 << 10),
    "sm_72": Processor(64, 4.0, 65536, 96 << 10, 2048, 32, 512 << 10),
    "sm_87": Processor(128, 4.0, 65536, 164 << 10, 1536, 16, 4 << 20),
}


def find_processor(arch: str) -> Processor:
    """The processor of an architecture such as sm_53; the simplest for an unknown one."""
    return _PROCESSORS.get(arch, _PROCESSORS["sm_53"])
