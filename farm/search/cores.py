"""What a core can do per cycle and how much its caches hold, as predictions of schedules need it.

The numbers are data, one file per core type in `inventory/core_types`; which core a board has is its target's `mcpu`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Core:
    """One core of a target, `threads` of which run a function.

    `fma_per_cycle` and `loads_per_cycle` are of full vectors of `vector_bits`; `fma_latency` in cycles; `lane_fma` says
    whether a multiply-add can take one lane of a vector as its factor (Arm), else each factor is a load of its own.
    Caches in bytes: `l2_bytes` is what one core may use with `threads` of them at work. Bandwidths in bytes per cycle
    of one core, `memory_bytes_per_s` of all together. `region_s` is what a parallel region costs to start and to join.
    """

    name: str
    threads: int
    freq_hz: float
    vector_bits: int
    vector_registers: int
    fma_per_cycle: float
    fma_latency: float
    loads_per_cycle: float
    lane_fma: bool
    issue_width: float
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    l2_bytes_per_cycle: float
    l3_bytes_per_cycle: float
    memory_bytes_per_s: float
    region_s: float = 5e-6

    def lanes(self, element_bytes: int) -> int:
        """Elements of one full vector."""
        return self.vector_bits // (8 * element_bytes)


def core_of(target: Mapping[str, Any]) -> Core:
    """The core of a target in TVM's dict form; one that is not known is taken for the plainest of its kind."""
    name = str(target.get("mcpu", ""))
    threads = int(target.get("num-cores", 1))
    if str(target.get("mtriple", "")).startswith("x86_64"):
        if name.startswith(("znver4",)):
            return Core(name, threads, 3.5e9, 512, 32, 1, 4, 1, False, 6, 32768, 1 << 20, 32 << 20, 32, 12, 25e9)
        return Core(name, threads, 3e9, 256, 16, 2, 4, 2, False, 4, 32768, 1 << 18, 8 << 20, 32, 12, 20e9)
    return Core(name, threads, 1.5e9, 128, 32, 1, 5, 1, True, 3, 32768, 1 << 19, 0, 8, 4, 10e9)
