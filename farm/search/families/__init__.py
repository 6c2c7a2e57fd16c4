"""Families of schedules, one module each: what stock MetaSchedule's space does not contain.

A function belongs to the first family that reads it.
"""

from __future__ import annotations

from farm.search.families.batched import Batched, Grouped
from farm.search.families.dense import Dense
from farm.search.families.depthwise import Depthwise
from farm.search.families.dots import Dots
from farm.search.families.elementwise import Elementwise
from farm.search.families.family import Family, Unit
from farm.search.families.gpu_flat import GpuFlat, GpuSums
from farm.search.families.gpu_norm import GpuNorms
from farm.search.families.gpu_tiles import GpuTiles
from farm.search.families.norm import Norms
from farm.search.families.pooled import Pooled
from farm.search.families.reduce import Reduce
from farm.search.families.separable import Separable
from farm.search.families.winograd import Winograd
from farm.search.gpus import TargetGpu

FAMILIES: tuple[Family, ...] = (
    Dots(),
    Dense(),
    Pooled(),
    Separable(),
    Winograd(),
    Depthwise(),
    Grouped(),
    Batched(),
    Reduce(),
    Norms(),
    Elementwise(),
)

GPU_FAMILIES: tuple[Family, ...] = (GpuTiles(), GpuNorms(), GpuSums(), GpuFlat())


def list_families(unit: Unit) -> tuple[Family, ...]:
    """Those for cores, or for a GPU."""
    return GPU_FAMILIES if isinstance(unit, TargetGpu) else FAMILIES
