"""Kinds of processor cores, read from `inventory/core_types`: what predictions of speed know of them.

Figures measured on a board, and constants fitted to it, come from a folder of the user's.

Which core a board has is its target's `mcpu`; `farm.search.cores` uses the numbers.
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

# Names a folder with what was found out of boards' cores, one YAML file a core type; agents read the same one.
FITTED_FOLDER_VARIABLE = "FARM_CORE_TYPES"

# The figures of a core that an overlay may replace, with the least and the most that any core has.
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

# What is fitted to a board, of a core's pipeline; `device_agent/emulated/pipeline.py` has the same.
FITTED = ("wait_cycles", "crowding")

Count = Annotated[int, pydantic.Field(strict=True, gt=0)]
Rate = Annotated[float, pydantic.Field(gt=0)]


def find_impossible(name: str, value: float) -> str:
    """Why no core has such a figure, which one that was optimised away may say; empty where one may."""
    if name not in MEASURED:
        return f"{name!r} is not a figure of a core; there are {', '.join(MEASURED)}"
    least, most = MEASURED[name]
    return "" if least <= value <= most else f"{name} is {value:g}; cores have {least:g} to {most:g}"


class KindCost(documents.StrictModel):
    """What a kind of instruction does in a core: see `device_agent/emulated/pipeline.py`."""

    pipes: tuple[str, ...] = pydantic.Field(min_length=1)
    latency: Count
    forward: Count | None = None
    busy: Count = 1


class Pipeline(documents.StrictModel):
    """How a core executes, for boards that are emulated as such. `wait_cycles` are those of a line that the second
    cache has, alone and after its neighbour; `call_cycles` and `region_cycles` what a call by the virtual machine and a
    parallel region cost beside their code: the two that a real board may be asked for. `architecture` says which
    instructions there are: from armv8.2 on half precision and products of four bytes.
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

    `match` are beginnings of what LLVM calls it (`mcpu`), `machine` the architecture in a target's triple. A pipe works
    on `datapath_bits` per cycle; a wider vector takes several cycles of it. Latencies in cycles, caches and bandwidths
    in bytes (per cycle of one core but for memory, which all cores share). `l1_bytes` and `l2_bytes` are of the cache
    that a core sees, `l2_cores` how many share it. `region_s` is what a parallel region costs TVM's pool to start and
    to join, threads spinning: two to ten microseconds were seen.
    `l2_wait` is the share of L2 streaming time in which FMAs stall; Zen 4's by default.
    `l2_held_bytes` is how much of that cache data have that are written and read again, where streams are given less.
    `lane_fma`: an FMA may take one lane of a register as its factor. `freq_hz` is typical, for seconds.
    `compiled_as` is, by what LLVM calls it, another core with the same instructions whose code is better.
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
    """What boards told of a core type: the two constants of its pipeline, and figures in the place of its own.

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
    """All core types, by name, with what FARM_CORE_TYPES has of them. Raises UsageError where a file is wrong."""
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
    """The core that LLVM calls `mcpu`, the longest match winning; else the plain one of the architecture, if any."""
    found: list[tuple[int, CoreType]] = []
    for core in load_core_types():
        if core.machine == machine:
            found += [(len(start), core) for start in core.match if mcpu.lower().startswith(start)]
    return max(found, key=lambda pair: pair[0])[1] if found else None
