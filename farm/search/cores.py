"""What the cores of a target can do per cycle, as predictions of schedules need it; the numbers are the inventory's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.inventory.core_types import CoreType, find_core_type
from farm.values import is_for_gpu

# Instructions that a core looks ahead where its type does not say how many, and one that executes in order.
_WINDOW, _IN_ORDER = 120.0, 2.0


@dataclasses.dataclass(frozen=True)
class Core:
    """One core of a target, `threads` of which run a function.

    Rates are per cycle: `fma_pipes` and `load_pipes` each work on `datapath_bits`. `lane_fma` says whether a
    multiply-add can take one lane of a vector as its factor (Arm), else each factor is a load of its own. Caches in
    bytes: `l2_bytes` is what one core has with `threads` of them at work. `region_s` is what a parallel region costs.
    `l2_wait`: the share of a stream from the second cache that is waited for beside multiply-adds. `held_bytes`: what
    that cache holds of data that a function writes and reads again. `window` is how many instructions a core looks
    ahead. `line_wait`: cycles that it waits for each line that its first cache lacks while all `threads` compute, as
    boards are priced; 0 where that is not known.
    """

    name: str
    threads: int
    freq_hz: float
    vector_bits: int
    vector_registers: int
    datapath_bits: int
    fma_pipes: float
    fma_latency: float
    load_pipes: float
    lane_fma: bool
    issue_width: float
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    l2_bytes_per_cycle: float
    far_bytes_per_cycle: float
    memory_bytes_per_s: float
    region_s: float
    held_bytes: int
    l2_wait: float = 0.15
    window: float = _WINDOW
    line_wait: float = 0.0

    @property
    def fetched_bytes(self) -> int:
        """The longest block of weights that tiles ask for ahead (`farm.search.build.fetching`); 0 where they do not.

        There has to be room in the second cache beside the block that they read.
        """
        return 0 if self.lane_fma else self.l2_bytes * 3 // 8

    def lanes(self, element_bytes: int) -> int:
        """Elements of one full vector."""
        return max(1, self.vector_bits // (8 * element_bytes))

    def fma_per_cycle(self, bits: int) -> float:
        """Multiply-adds on vectors of so many bits that one cycle takes."""
        return self.fma_pipes * min(1.0, self.datapath_bits / bits)

    def loads_per_cycle(self, bits: int) -> float:
        """Loads of so many bits that one cycle takes."""
        return self.load_pipes * min(1.0, self.datapath_bits / bits)


def core_of(target: Mapping[str, Any], threads: int | None = None) -> Core:
    """The cores of a target in TVM's dict form, all that it names or `threads`.

    Raises UsageError for an architecture without any core type.
    """
    core = find_core(target, threads)
    if core is None:
        raise UsageError(f"no core type for targets of {_name_machine(target) or 'an unnamed architecture'}")
    return core


def find_core(target: Mapping[str, Any], threads: int | None = None) -> Core | None:
    """As `core_of`; None for an architecture without any core type."""
    kind = find_core_type(str(target.get("mcpu", "")), _name_machine(target))
    return None if kind is None else _make_core(kind, threads or int(target.get("num-cores", 1)))


def find_clock_factor(target: Mapping[str, Any], kind: BoardType) -> float:
    """By what a predicted time is multiplied for boards of a type: the core type's clock over the type's highest.

    1 where either is not known, and for GPUs, whose clock is the board type's own.
    """
    core = None if is_for_gpu(kind.pipeline) else find_core(target)
    clocks = (hz for each in kind.clusters if core and each.core == core.name for hz in each.freqs_hz)
    highest = max(clocks, default=0)
    return core.freq_hz / highest if core and highest else 1.0


def _name_machine(target: Mapping[str, Any]) -> str:
    return str(target.get("mtriple", "")).partition("-")[0]


def _make_core(kind: CoreType, threads: int) -> Core:
    sharing, pipeline = min(threads, kind.l2_cores), kind.pipeline
    return Core(
        name=kind.name,
        threads=threads,
        freq_hz=kind.freq_hz,
        vector_bits=kind.vector_bits,
        vector_registers=kind.vector_registers,
        datapath_bits=kind.datapath_bits,
        fma_pipes=kind.fma_pipes,
        fma_latency=kind.fma_latency,
        load_pipes=kind.load_pipes,
        lane_fma=kind.lane_fma,
        issue_width=kind.issue_width,
        l1_bytes=kind.l1_bytes,
        l2_bytes=kind.l2_bytes // sharing,
        l3_bytes=kind.l3_bytes,
        l2_bytes_per_cycle=kind.l2_bytes_per_cycle,
        far_bytes_per_cycle=kind.far_bytes_per_cycle,
        memory_bytes_per_s=kind.memory_bytes_per_s,
        region_s=kind.region_s,
        held_bytes=(kind.l2_held_bytes or kind.l2_bytes) // sharing,
        l2_wait=kind.l2_wait,
        line_wait=0.0 if pipeline is None else pipeline.wait_cycles * (1 + pipeline.crowding * (threads - 1)),
        window=_WINDOW if pipeline is None else _IN_ORDER if pipeline.in_order else float(pipeline.window),
    )
