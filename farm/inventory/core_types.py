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


class KindCost(documents.StrictModel):
    """What a kind of instruction does in a core: see `device_agent/emulated/pipeline.py`."""

    pipes: tuple[str, ...] = pydantic.Field(min_length=1)
    latency: Count
    forward: Count | None = None
    busy: Count = 1


class Pipeline(documents.StrictModel):
    """How a core executes, for boards that are emulated as such. `wait_cycles` are those of a line that the second
    cache has, alone and after its neighbour; `call_cycles` and `region_cycles` what a call by the virtual machine and a
    parallel region cost beside their code: the two that a real board may be asked for.
    """

    dispatch: Count
    window: Count
    in_order: bool = False
    pipes: dict[str, Count] = pydantic.Field(min_length=1)
    write_back: tuple[str, ...]
    l1_ways: Count
    l2_ways: Count
    wait_cycles: Rate
    crowding: float = pydantic.Field(ge=0)
    math_cycles: Rate
    call_cycles: Rate
    region_cycles: Rate
    kinds: dict[str, KindCost]

    @pydantic.model_validator(mode="after")
    def _check_pipes(self) -> Pipeline:
        named = {pipe for cost in self.kinds.values() for pipe in cost.pipes} | set(self.write_back)
        if unknown := sorted(named - self.pipes.keys()):
            raise ValueError(f"there is no pipe {unknown[0]!r}; there are {', '.join(self.pipes)}")
        if missing := {"integer", "vector"} - self.kinds.keys():
            raise ValueError(f"what {sorted(missing)[0]!r} costs is missing: it stands for whatever is not named")
        return self


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
    pipeline: Pipeline | None = None


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
