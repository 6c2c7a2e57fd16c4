"""Kinds of processor cores, read from `inventory/core_types`: what predictions of speed know of them.

Which core a board has is its target's `mcpu`; what the numbers lead to is `farm.search.cores`' business.
"""

from __future__ import annotations

import functools
from typing import Annotated

import pydantic

from farm.inventory import documents, paths

Count = Annotated[int, pydantic.Field(strict=True, gt=0)]
Rate = Annotated[float, pydantic.Field(gt=0)]


class CoreType(documents.StrictModel):
    """One kind of core.

    `match` are beginnings of what LLVM calls it (`mcpu`), `machine` the architecture in a target's triple. A pipe works
    on `datapath_bits` per cycle; a wider vector takes several cycles of it. Latencies in cycles, caches and bandwidths
    in bytes (per cycle of one core but for memory, which all cores share). `l1_bytes` and `l2_bytes` are of the cache
    that a core sees, `l2_cores` how many share it.
    `lane_fma`: a multiply-add may take one lane of a register as its factor. `freq_hz` is typical, for seconds.
    """

    name: str
    title: str
    sources: tuple[str, ...] = pydantic.Field(min_length=1)
    machine: str
    match: tuple[str, ...]
    vector_bits: Count
    vector_registers: Count
    datapath_bits: Count
    fma_pipes: Rate
    fma_latency: Rate
    load_pipes: Rate
    issue_width: Rate
    lane_fma: bool
    freq_hz: Rate
    l1_bytes: Count
    l2_bytes: Count
    l2_cores: Count = 1
    l3_bytes: int = pydantic.Field(default=0, strict=True, ge=0)
    l2_bytes_per_cycle: Rate
    far_bytes_per_cycle: Rate
    memory_bytes_per_s: Rate


@functools.cache
def load_core_types() -> tuple[CoreType, ...]:
    """All core types, by name. Raises UsageError where a file is wrong."""
    folder = paths.require_inventory_folder() / "core_types"
    return tuple(documents.read_document(path, CoreType) for path in sorted(folder.glob("*.yaml")))


def find_core_type(mcpu: str, machine: str) -> CoreType | None:
    """The core that LLVM calls `mcpu`, the longest match winning; else the plain one of the architecture, if any."""
    found: list[tuple[int, CoreType]] = []
    for core in load_core_types():
        if core.machine == machine:
            found += [(len(start), core) for start in core.match if mcpu.lower().startswith(start)]
    return max(found, key=lambda pair: pair[0])[1] if found else None
