"""What a board's CPU is to a cost model: a few numbers, so that trials of one board type can teach another.

Names of boards and cores end here. Which board and which operating point are meant is the caller's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from farm.inventory.core_types import find_core_type


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


def derive_traits(
    target: Mapping[str, Any], cores: int | None = None, cpu_freq_hz: float = 0.0, memory_freq_hz: float = 0.0
) -> Traits:
    """What TVM's target, in dict form, says of a CPU; the clocks are those of the operating point, 0 where unknown.

    `cores`: how many run a candidate, where it is not all that the target names.
    """
    known = int(target.get("num-cores", 0)) if cores is None else cores
    machine = str(target.get("mtriple", "")).partition("-")[0]
    kind = find_core_type(str(target.get("mcpu", "")), machine)
    if kind is None:
        return Traits(known, cpu_freq_hz, memory_freq_hz)
    return Traits(known, cpu_freq_hz, memory_freq_hz, kind.vector_bits, kind.l1_bytes, kind.l2_bytes, kind.l3_bytes)
