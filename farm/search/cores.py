"""The cores of a target as latency estimates need them; the figures come from the inventory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.inventory.core_types import CoreType, find_core_type
from farm.values import is_for_gpu

# Out-of-order window where the core type names none, and the window of an in-order core.
_WINDOW, _IN_ORDER = 120.0, 2.0


@dataclasses.dataclass(frozen=True)
class Core:
    """One core of a target, `threads` of which run a function.

    Rates are per cycle: `fma_pipes` and `load_pipes` each work on `datapath_bits`. `lane_fma`: an FMA can take one lane
    of a vector as its factor (Arm), else each factor needs a load. Caches are in bytes; `l2_bytes` is one core's part
    with `threads` at work. `region_s` is the cost of a parallel region. `l2_wait` is the fraction of an L2 stream's
    time that FMAs do not hide. `held_bytes` is the part of L2 that keeps data written and read again. `window` is the
    out-of-order window in instructions. `line_wait` is the stall per line missing in L1 while all `threads` compute
    (cycles, as in the estimates of virtual boards); 0 where unknown.
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
    def prefetched_bytes(self) -> int:
        """The longest block of weights that tiles prefetch (`farm.search.codegen.prefetch`); 0 where they do not.

        It must fit in L2 beside the block in use.
        """
        return 0 if self.lane_fma else self.l2_bytes * 3 // 8

    def lanes(self, element_bytes: int) -> int:
        """Return the elements of one full vector."""
        return max(1, self.vector_bits // (8 * element_bytes))

    def fma_per_cycle(self, bits: int) -> float:
        """Return the FMAs per cycle on vectors of `bits`."""
        return self.fma_pipes * min(1.0, self.datapath_bits / bits)

    def loads_per_cycle(self, bits: int) -> float:
        """Return the loads per cycle of `bits` each."""
        return self.load_pipes * min(1.0, self.datapath_bits / bits)


def core_of(target: Mapping[str, Any], threads: int | None = None) -> Core:
    """Return the cores of a target in TVM's dict form, all that it names or `threads`.

    Raises UsageError for an architecture without a core type.
    """
    core = find_core(target, threads)
    if core is None:
        raise UsageError(f"no core type for targets of {_name_machine(target) or 'an unnamed architecture'}")
    return core


def find_core(target: Mapping[str, Any], threads: int | None = None) -> Core | None:
    """Like `core_of`, but return None for an architecture without a core type."""
    kind = find_core_type(str(target.get("mcpu", "")), _name_machine(target))
    return None if kind is None else _make_core(kind, threads or int(target.get("num-cores", 1)))


def find_clock_factor(target: Mapping[str, Any], kind: BoardType) -> float:
    """Return the factor from a predicted time to a board type's: the core type's clock over the type's highest.

    1 where either is unknown, and for GPUs, whose clock is the board type's own.
    """
    machine = _name_machine(target)
    core = None if is_for_gpu(kind.pipeline) else find_core_type(str(target.get("mcpu", "")), machine)
    # By type: a Cortex-A73 is estimated as an A72.
    clocks = (hz for each in kind.clusters if find_core_type(each.core, machine) is core for hz in each.freqs_hz)
    highest = max(clocks, default=0)
    return core.freq_hz / highest if core and highest else 1.0


def _name_machine(target: Mapping[str, Any]) -> str:
    return str(target.get("mtriple", "")).partition("-")[0]


def _make_core(kind: CoreType, threads: int) -> Core:
    sharing, pipeline = min(threads, kind.l2_cores), kind.pipeline
    # Most figures are one core's own.
    known = {each.name: getattr(kind, each.name) for each in dataclasses.fields(Core) if hasattr(kind, each.name)}
    known |= {
        "threads": threads,
        "l2_bytes": kind.l2_bytes // sharing,
        "held_bytes": (kind.l2_held_bytes or kind.l2_bytes) // sharing,
    }
    if pipeline is not None:
        known["line_wait"] = pipeline.wait_cycles * (1 + pipeline.crowding * (threads - 1))
        known["window"] = _IN_ORDER if pipeline.in_order else float(pipeline.window)
    return Core(**known)
