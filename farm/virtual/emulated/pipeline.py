"""A core's pipelines as data, and the cycles that a loop of instructions takes in them.

The numbers are in `inventory/core_types/*.yaml` under `pipeline`, with sources. Memory is in `estimate.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from device_agent.board_types import find_inventory_folders
from farm.virtual.emulated.isa import Instruction

FOLDER = "core_types"
# Names a folder with constants fitted to a board, one YAML file per core type; the farm reads the same one.
FITTED_FOLDER_VARIABLE = "FARM_CORE_TYPES"
FITTED = ("wait_cycles", "crowding")


def load_core(name: str, folders: Sequence[Path] | None = None) -> dict[str, Any] | None:
    """Load the core type `name` for the emulator; None if its pipes are not known.

    The constants in `FITTED` come from the user's folder if it has them. Raises OSError, YAMLError, KeyError.
    """
    for folder in folders or [each.parent / FOLDER for each in find_inventory_folders()]:
        path = folder / f"{name}.yaml"
        if path.is_file():
            data = yaml.safe_load(path.read_text())
            if pipeline := data.get("pipeline"):
                pipeline |= _read_fitted(name)
                # Two caches are simulated: L1d, and the last level, which cores share.
                last = data.get("l3_bytes") or data["l2_bytes"]
                return {
                    "name": name,
                    "freq_hz": data["freq_hz"],
                    "caches": [data["l1_bytes"], pipeline["l1_ways"], last, pipeline["l2_ways"]],
                    "wait_cycles": pipeline["wait_cycles"],
                    "crowding": pipeline["crowding"],
                    "math_cycles": pipeline["math_cycles"],
                    "call_cycles": pipeline["call_cycles"],
                    "region_cycles": pipeline["region_cycles"],
                    "architecture": pipeline.get("architecture", "armv8"),
                    "core_bytes_per_s": data["far_bytes_per_cycle"] * data["freq_hz"],
                    "memory_bytes_per_s": data["memory_bytes_per_s"],
                    "pipeline": pipeline,
                }
    return None


def _read_fitted(name: str) -> dict[str, float]:
    folder = os.environ.get(FITTED_FOLDER_VARIABLE)
    path = Path(folder).expanduser() / f"{name}.yaml" if folder else None
    if path is None or not path.is_file():
        return {}
    data = yaml.safe_load(path.read_text())
    return {each: float(data[each]) for each in FITTED if each in data}


# The steady state counts: this many instructions of later iterations are simulated.
_LOOKED_AT, _FEWEST, _MOST = 400, 4, 12


@dataclasses.dataclass(frozen=True)
class Cost:
    """The pipes of a kind's operations, its latency in cycles, the cycles from an FMA to the next on its accumulator
    (`forward`; None: the latency), and the cycles for which an operation blocks its pipe.
    """

    pipes: tuple[str, ...]
    latency: int
    forward: int | None = None
    busy: int = 1


class Pipeline:
    """How one core type executes. `dispatch` operations start per cycle, `window` may be in flight.

    `in_order`: operations start in program order. Some pipes of a kind can do more than the others: `parts` maps such a
    pipe to its kind, and an operation on it occupies one of that kind.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        """`data` as loaded from YAML. Raises KeyError."""
        self.dispatch, self.window = int(data["dispatch"]), int(data["window"])
        self.in_order = bool(data.get("in_order", False))
        self.pipes: dict[str, int] = dict(data["pipes"])
        self._parts: dict[str, str] = dict(data.get("parts", {}))
        self._costs = {
            kind: Cost(tuple(each["pipes"]), int(each["latency"]), each.get("forward"), int(each.get("busy", 1)))
            for kind, each in data["kinds"].items()
        }
        self._write_back = tuple(data["write_back"])

    def find_cost(self, kind: str) -> Cost:
        """The cost of a kind; a 128-bit kind without an entry costs as the narrower one."""
        found = self._costs.get(kind) or self._costs.get(kind.removesuffix("_q"))
        return found or self._costs["vector" if kind.endswith("_q") else "integer"]

    def expand(self, instruction: Instruction) -> tuple[tuple[str, ...], Cost]:
        """The pipes that an instruction uses, one operation each, and its cost."""
        cost = self.find_cost(instruction.kind)
        return cost.pipes * instruction.times + (self._write_back if instruction.writes_back else ()), cost

    def count_cycles(self, instructions: Sequence[Instruction]) -> float:
        """Cycles of one iteration of a loop, all data in L1d.

        Never below the throughput limits of the pipes or of dispatch.
        """
        if not instructions:
            return 0.0
        used: collections.Counter[str] = collections.Counter()
        operations = 0
        for each in instructions:
            pipes, cost = self.expand(each)
            operations += len(pipes)
            for pipe in pipes:
                used[pipe] += cost.busy
                if pipe in self._parts:
                    used[self._parts[pipe]] += cost.busy
        bound = max([operations / self.dispatch, *(used[pipe] / count for pipe, count in self.pipes.items())])
        return max(bound, self._simulate(instructions))

    def _simulate(self, instructions: Sequence[Instruction]) -> float:
        """Cycles per iteration in the steady state: dispatch in order, pipes take the first ready operation."""
        operations = [(*self.expand(each), each) for each in instructions]
        count = sum(len(pipes) for pipes, _, _ in operations)
        rounds = max(_FEWEST, min(_MOST, 1 + _LOOKED_AT // max(1, count)))
        taken: dict[str, collections.Counter[int]] = {pipe: collections.Counter() for pipe in self.pipes}
        ready: dict[str, tuple[float, float]] = {}  # when a register is ready, and when it is as an accumulator
        retired: list[float] = []
        dispatched, last_begin = 0, 0
        marks = []
        for _ in range(rounds):
            for pipes, cost, each in operations:
                begin = 0.0
                for name in each.reads:
                    if name in ready:
                        begin = max(begin, ready[name][1 if name == each.adds_to else 0])
                end = 0
                for pipe in pipes:
                    cycle = dispatched // self.dispatch
                    if dispatched >= self.window:
                        cycle = max(cycle, int(retired[dispatched - self.window]))
                    cycle = max(cycle + 1, int(begin))
                    if self.in_order:
                        cycle = max(cycle, last_begin)
                    names = (pipe, self._parts[pipe]) if pipe in self._parts else (pipe,)
                    while any(taken[name][cycle] >= self.pipes[name] for name in names):
                        cycle += 1
                    for name in names:
                        for later in range(cost.busy):
                            taken[name][cycle + later] += 1
                    last_begin = max(last_begin, cycle)
                    end = max(end, cycle)
                    retired.append(max(retired[-1] if retired else 0, cycle + cost.latency))
                    dispatched += 1
                for name in each.writes:
                    at = end + cost.latency
                    if each.writes_back and name in each.reads:
                        at = end + 1  # the updated address is ready at once
                    ready[name] = (at, end + cost.forward if cost.forward and each.adds_to == name else at)
            marks.append(retired[-1])
        half = rounds // 2
        return (marks[-1] - marks[half - 1]) / (rounds - half)
