"""Processor core types, read from `inventory/core_types`, for predictions of speed.

A folder of the user's overrides figures measured on a board and constants fitted to it. A board's core is its target's
`mcpu`; `farm.search.cores` interprets the numbers.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Annotated, Literal

import pydantic

from farm.errors import UsageError
from farm.inventory import documents

# Names a folder with measured and fitted figures, one YAML file per core type; agents read the same one.
FITTED_FOLDER_VARIABLE = "FARM_CORE_TYPES"

# The figures of a core that an overlay may replace, with the bounds of all cores.
MEASURED: Mapping[str, tuple[float, float]] = {
    "fma_latency": (1.5, 16),
    "fma_pipes": (0.25, 8),
    "load_pipes": (0.25, 8),
    "l1_bytes": (4 << 10, 1 << 20),
    "l2_bytes": (32 << 10, 64 << 20),
    "l2_bytes_per_cycle": (0.5, 256),
    "far_bytes_per_cycle": (0.1, 128),
    "memory_bytes_per_s": (1e8, 2e12),
    "region_s": (1e-8, 1e-2),
}

# The fitted constants of a core's pipeline; `farm/virtual/emulated/pipeline.py` has the same list.
FITTED = ("wait_cycles", "crowding")

Count = Annotated[int, pydantic.Field(strict=True, gt=0)]
Rate = Annotated[float, pydantic.Field(gt=0)]


def find_impossible(name: str, value: float) -> str:
    """Why a figure is impossible for a core, as from a probe that was optimised away; empty if it is possible."""
    if name not in MEASURED:
        return f"{name!r} is not a figure of a core; there are {', '.join(MEASURED)}"
    least, most = MEASURED[name]
    return "" if least <= value <= most else f"{name} is {value:g}; cores have {least:g} to {most:g}"


class KindCost(documents.StrictModel):
    """What a kind of instruction does in a core: see `farm/virtual/emulated/pipeline.py`."""

    pipes: tuple[str, ...] = pydantic.Field(min_length=1)
    latency: Count
    forward: Count | None = None
    busy: Count = 1


class Pipeline(documents.StrictModel):
    """How a core executes, for emulated boards. `wait_cycles` are those of an L1d miss that hits L2, alone and after
    its neighbour; `call_cycles` and `region_cycles` are the cost of a virtual machine's call and of a parallel region
    beside their code: the two that can be measured on a real board. `architecture` selects the instructions: armv8.2
    adds half precision and int8 dot products.
    """

    architecture: Literal["armv8", "armv8.2"] = "armv8"
    dispatch: Count
    window: Count
    in_order: bool = False
    pipes: dict[str, Count] = pydantic.Field(min_length=1)
    parts: dict[str, str] = pydantic.Field(default_factory=dict)
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
        named |= {*self.parts, *self.parts.values()}
        if unknown := sorted(named - self.pipes.keys()):
            raise ValueError(f"there is no pipe {unknown[0]!r}; there are {', '.join(self.pipes)}")
        if missing := {"integer", "vector"} - self.kinds.keys():
            raise ValueError(
                f"what {sorted(missing)[0]!r} costs is missing: it is the default for operations that are not named"
            )
        return self


class CoreType(documents.StrictModel):
    """One kind of core.

    `match` lists prefixes of LLVM's name (`mcpu`), `machine` is the architecture in a target's triple. A pipe processes
    `datapath_bits` per cycle; a wider vector takes several cycles. Latencies are in cycles, caches and bandwidths in
    bytes (per cycle of one core, except memory, which all cores share). `l1_bytes` and `l2_bytes` are the caches seen
    by one core, `l2_cores` how many share L2. `region_s` is the cost for TVM's pool to start and join a parallel
    region, threads spinning: two to ten microseconds were measured. `l2_wait` is the share of an L2 stream for which
    FMAs stall; Zen 4's by default. `l2_held_bytes` is the part of L2 kept by data that are written and read again, if
    streams get less. `lane_fma`: an FMA may take one lane of a register as a factor. `freq_hz` is typical, for seconds.
    `compiled_as` is the LLVM name of another core with the same instructions and better code.
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
    l2_held_bytes: Count | None = None
    l2_cores: Count = 1
    l3_bytes: int = pydantic.Field(default=0, strict=True, ge=0)
    l2_bytes_per_cycle: Rate
    far_bytes_per_cycle: Rate
    memory_bytes_per_s: Rate
    region_s: Rate = 5e-6
    l2_wait: float = pydantic.Field(default=0.15, ge=0, le=2)
    compiled_as: Mapping[str, str] = pydantic.Field(default_factory=dict)
    pipeline: Pipeline | None = None


class FittedCore(documents.StrictModel):
    """Figures from boards for a core type: the two constants of its pipeline, and measured figures.

    `measured` has fields of `CoreType` that are in `MEASURED`.
    """

    name: str
    sources: tuple[str, ...] = pydantic.Field(min_length=1)
    wait_cycles: Rate | None = None
    crowding: float | None = pydantic.Field(default=None, ge=0)
    measured: Mapping[str, float] = pydantic.Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _check_measured(self) -> FittedCore:
        for name, value in self.measured.items():
            if reason := find_impossible(name, value):
                raise ValueError(f"measured: {reason}")
        return self


@functools.cache
def load_core_types() -> tuple[CoreType, ...]:
    """All core types by name, with the overlay in FARM_CORE_TYPES. Raises UsageError for a wrong file."""
    folder = documents.require_inventory_folder() / "core_types"
    found = tuple(documents.read_document(path, CoreType) for path in sorted(folder.glob("*.yaml")))
    fitted = {each.name: each for each in _read_fitted({core.name: core for core in found})}
    return tuple(_apply(core, fitted.get(core.name)) for core in found)


def _read_fitted(known: Mapping[str, CoreType]) -> list[FittedCore]:
    if not (setting := os.environ.get(FITTED_FOLDER_VARIABLE)):
        return []
    folder = pathlib.Path(setting).expanduser()
    if not folder.is_dir():
        raise UsageError(f"{FITTED_FOLDER_VARIABLE} names {setting!r}, which is not a folder")
    found = []
    for path in sorted(folder.glob("*.yaml")):
        fitted = documents.read_document(path, FittedCore)
        if fitted.name != path.stem or fitted.name not in known:
            raise UsageError(
                f"{path}: name is {fitted.name!r}; it must be the file's, and one of {', '.join(sorted(known))}"
            )
        constants = [name for name in FITTED if getattr(fitted, name) is not None]
        if constants and known[fitted.name].pipeline is None:
            raise UsageError(
                f"{path}: {' and '.join(constants)} cannot be used: the core type {fitted.name} has no pipeline",
                "Leave them out; figures below `measured` are used for every core.",
            )
        found.append(fitted)
    return found


def _apply(core: CoreType, fitted: FittedCore | None) -> CoreType:
    if fitted is None:
        return core
    pipeline = core.pipeline
    if pipeline is not None:
        constants = {name: value for name in FITTED if (value := getattr(fitted, name)) is not None}
        pipeline = pipeline.model_copy(update=constants)
    integers = {name: int(value) for name, value in fitted.measured.items() if name in ("l1_bytes", "l2_bytes")}
    changes = {**fitted.measured, **integers, "pipeline": pipeline, "sources": (*core.sources, *fitted.sources)}
    return core.model_copy(update=changes)


def find_core_type(mcpu: str, machine: str) -> CoreType | None:
    """The core of LLVM's name `mcpu`, by the longest match; else the architecture's generic one, if any."""
    found: list[tuple[int, CoreType]] = []
    for core in load_core_types():
        if core.machine == machine:
            found += [(len(start), core) for start in core.match if mcpu.lower().startswith(start)]
    return max(found, key=lambda pair: pair[0])[1] if found else None
