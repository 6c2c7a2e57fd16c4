"""A search's tasks and candidates, in a form that travels between processes; the engine's process loads no TVM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from farm.inventory.core_types import find_core_type
from farm.values import Workload


@dataclasses.dataclass(frozen=True)
class Traits:
    """A CPU at an operating point; zero stands for unknown.

    `cores` run a candidate. Caches are per core (`l1_bytes`, data) or per cluster (`l2_bytes`, `l3_bytes`).
    """

    cores: int = 0
    cpu_freq_hz: float = 0.0
    memory_freq_hz: float = 0.0
    vector_bits: int = 0
    l1_bytes: int = 0
    l2_bytes: int = 0
    l3_bytes: int = 0

    def to_vector(self) -> tuple[float, ...]:
        """Return the traits as features: log2, since ratios matter; unknown is 0."""
        return tuple(math.log2(value) if value > 0 else 0.0 for value in dataclasses.astuple(self))


def derive_traits(
    target: Mapping[str, Any], cores: int | None = None, cpu_freq_hz: float = 0.0, memory_freq_hz: float = 0.0
) -> Traits:
    """Derive traits from TVM's target in dict form and the clocks of the operating point, 0 where unknown.

    `cores` is the number that runs a candidate where it is not all of the target's.
    """
    known = int(target.get("num-cores", 0)) if cores is None else cores
    machine = str(target.get("mtriple", "")).partition("-")[0]
    kind = find_core_type(str(target.get("mcpu", "")), machine)
    if kind is None:
        return Traits(known, cpu_freq_hz, memory_freq_hz)
    return Traits(known, cpu_freq_hz, memory_freq_hz, kind.vector_bits, kind.l1_bytes, kind.l2_bytes, kind.l3_bytes)


@dataclasses.dataclass(frozen=True)
class SearchTask:
    """A workload for boards of one type at one operating point, with the `traits` of both."""

    workload: Workload
    board_type: str
    point: str
    traits: Traits


@dataclasses.dataclass(frozen=True)
class ForeignTrial:
    """A good trial of another task: another shape, operating point or board type. `median_s` is its latency."""

    workload: Workload
    board_type: str
    point: str
    traits: Traits
    candidate: str
    trace_json: str = dataclasses.field(repr=False)
    median_s: float


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One scheduled version of a workload.

    `arguments` are the (shape, dtype) of its function's arguments; a weight that the schedule packs has its packed
    shape. `hash` is over the scheduled function, so two traces that give the same code are one candidate. `trace_json`
    replays it; `module_json` is the scheduled function, ready to build.
    """

    workload: str
    hash: str
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    trace_json: str = dataclasses.field(repr=False)
    module_json: str = dataclasses.field(repr=False)
