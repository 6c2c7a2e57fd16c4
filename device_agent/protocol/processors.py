"""What one streaming multiprocessor of a Jetson's GPU has, by architecture, and how many blocks it takes at a time."""

from __future__ import annotations

import dataclasses
import math

WARP = 32


@dataclasses.dataclass(frozen=True)
class Processor:
    """Lanes for float32, cycles until a multiply-add's result is there, and what blocks share; registers of 32 bits.

    `cache_bytes` is the GPU's second cache, which its processors share.
    """

    lanes: int
    fma_cycles: float
    registers: int
    shared_bytes: int
    threads: int
    blocks: int
    cache_bytes: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Latencies: Jia et al. 2018 (arXiv
# 1804.06826). Second caches of Nano and TX2: deviceQuery; those of Xavier and Orin are unconfirmed.
_PROCESSORS = {
    "sm_53": Processor(128, 6.0, 65536, 64 << 10, 2048, 32, 256 << 10),
    "sm_62": Processor(128, 6.0, 65536, 64 << 10, 2048, 32, 512 << 10),
    "sm_72": Processor(64, 4.0, 65536, 96 << 10, 2048, 32, 512 << 10),
    "sm_87": Processor(128, 4.0, 65536, 164 << 10, 1536, 16, 4 << 20),
}


def find_processor(arch: str) -> Processor:
    """That of an architecture such as sm_53; the plainest for one that is not known."""
    return _PROCESSORS.get(arch, _PROCESSORS["sm_53"])


def count_resident(unit: Processor, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that one processor has at a time. Registers go by 256 to a warp, shared memory by 256 bytes."""
    warps = math.ceil(threads / WARP)
    held = warps * math.ceil(max(registers, 16) * WARP / 256) * 256
    shared = math.ceil(shared_bytes / 256) * 256
    by_shared = unit.shared_bytes // shared if shared else unit.blocks
    return max(1, min(unit.blocks, unit.threads // (warps * WARP), unit.registers // held, by_shared))
