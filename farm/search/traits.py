"""What a board's CPU is to a cost model: a few numbers, so that trials of one board type can teach another.

Names of boards and cores end here. Which board and which operating point are meant is the caller's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Traits:
    """A CPU at an operating point. Zero stands for what is not known.

    `cores` run a candidate; caches are per core (`l1_bytes`, data) or shared by its cluster (`l2_bytes`, `l3_bytes`).
    """

    cores: int = 0
    cpu_freq_hz: float = 0.0
    memory_freq_hz: float = 0.0
    vector_bits: int = 0
    l1_bytes: int = 0
    l2_bytes: int = 0
    l3_bytes: int = 0

    def to_vector(self) -> tuple[float, ...]:
        """The same as features: logarithms to base 2, since halves and doubles are what matters; unknown is 0."""
        return tuple(math.log2(value) if value > 0 else 0.0 for value in dataclasses.astuple(self))


TRAIT_COUNT = len(dataclasses.fields(Traits))

# Data caches per core, then what its cluster shares, in bytes; last the width of its vectors in bits.
# Arm's technical reference manuals, and NVIDIA's for how a Jetson's cores are configured.
_KIB, _MIB = 1 << 10, 1 << 20
_CORES: Mapping[str, tuple[int, int, int, int]] = {
    "cortex-a57": (32 * _KIB, 2 * _MIB, 0, 128),
    "cortex-a72": (32 * _KIB, 1 * _MIB, 0, 128),
    "cortex-a78": (64 * _KIB, 256 * _KIB, 2 * _MIB, 128),
    "cortex-a78ae": (64 * _KIB, 256 * _KIB, 2 * _MIB, 128),
    "denver2": (64 * _KIB, 2 * _MIB, 0, 128),
    "carmel": (64 * _KIB, 2 * _MIB, 4 * _MIB, 128),
}
# What a target names of x86 with AVX-512; caches differ between models of one name.
_WIDE = ("x86-64-v4", "skylake-avx512", "cascadelake", "cooperlake", "icelake", "sapphirerapids", "granite", "znver4")
_NARROW = ("", "x86-64", "x86-64-v2", "nehalem", "westmere", "silvermont", "goldmont")


def derive_traits(
    target: Mapping[str, Any], cores: int | None = None, cpu_freq_hz: float = 0.0, memory_freq_hz: float = 0.0
) -> Traits:
    """What TVM's target, in dict form, says of a CPU; the clocks are those of the operating point, 0 where unknown.

    `cores`: how many run a candidate, where it is not all that the target names.
    """
    name = str(target.get("mcpu", "")).lower()
    known = int(target.get("num-cores", 0)) if cores is None else cores
    if name in _CORES:
        l1, l2, l3, bits = _CORES[name]
        return Traits(known, cpu_freq_hz, memory_freq_hz, bits, l1, l2, l3)
    bits = 128
    if str(target.get("mtriple", "")).startswith("x86_64"):
        bits = 512 if name.startswith(_WIDE) else 128 if name in _NARROW else 256
    return Traits(known, cpu_freq_hz, memory_freq_hz, bits)
