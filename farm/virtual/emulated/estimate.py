"""Estimate what an executed program costs on a core: cycles in its pipes, cache lines from memory. Pure.

A segment (the calling thread, or a parallel region) takes as long as its longest lane. A lane takes its instructions'
cycles plus its stalls on L1d misses, which grow while other lanes miss too. All lanes together take at least the memory
time of their lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from farm.virtual.emulated.isa import Decoder, Instruction
from farm.virtual.emulated.pipeline import Pipeline

# Cache line size in bytes, of all cores here.
LINE_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Block:
    """An executed basic block: address, bytes, executions by lane.

    Lane 0 is the calling thread; 1 + region x tasks + task is a task of a parallel region.
    """

    address: int
    code: bytes
    times: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Segment:
    """`cycles` and memory `lines` of the longest lane, and of all lanes."""

    cycles: float
    lines: int
    all_cycles: float
    all_lines: int


@dataclasses.dataclass(frozen=True)
class Misses:
    """A lane's L1d and L2 misses in lines, and its calls of C math functions, whose board code is not available."""

    first: int
    second: int
    math_calls: int = 0


class Estimator:
    """Estimates programs for one core type; caches the cycles of blocks."""

    def __init__(self, pipeline: Pipeline, wait_cycles: float, crowding: float, math_cycles: float) -> None:
        """Cycles of a stall on an L1d miss, its relative growth per other busy core, and cycles of a function as
        `expf`.
        """
        self._pipeline, self._wait_cycles, self._crowding = pipeline, wait_cycles, crowding
        self._math_cycles = math_cycles
        self._decoder = Decoder()
        self._known: dict[bytes, float] = {}

    def estimate(
        self,
        blocks: Iterable[Block],
        misses: Sequence[Misses],
        tasks: int,
        most_lines: int | None = None,
        *,
        first_only: bool = False,
    ) -> list[Segment]:
        """Estimate the segments of a run from its `blocks`, by address, and each lane's misses.

        A region's lanes share their reads, `most_lines` in all; a single lane may read some again. `first_only`: only
        each region's first lane was run, and the others cost the same.
        """
        lanes = [each.math_calls * self._math_cycles for each in misses]
        for block in merge(blocks):
            cycles = self.count_cycles(block.code)
            for lane, each in enumerate(block.times):
                lanes[lane] += cycles * each
        alone = lanes[0] + misses[0].first * self._wait_cycles
        segments = [Segment(alone, misses[0].second, alone, misses[0].second)]
        for start in range(1, len(lanes), tasks):
            own, lacked = lanes[start : start + tasks], list(misses[start : start + tasks])
            if first_only:
                own, lacked = own[:1] * tasks, lacked[:1] * tasks
            at_work = sum(each > 0 for each in own)
            wait_cycles = self._wait_cycles * (1 + self._crowding * (at_work - 1))
            own = [cycles + each.first * wait_cycles for cycles, each in zip(own, lacked, strict=True)]
            lines = [each.second for each in lacked]
            all_lines = sum(lines) if most_lines is None else max(max(lines), min(sum(lines), most_lines))
            if any(own):
                segments.append(Segment(max(own), max(lines), sum(own), all_lines))
        return segments

    def count_cycles(self, code: bytes) -> float:
        """Cycles of a block, as a loop's body."""
        if (found := self._known.get(code)) is None:
            found = self._known[code] = self._pipeline.count_cycles(self._decoder.read(code))
        return found

    def read(self, code: bytes) -> list[Instruction]:
        return self._decoder.read(code)


def merge(blocks: Iterable[Block]) -> list[Block]:
    """Merge blocks by address: the emulator may end a block anywhere, so one that always follows belongs to it.

    The rest of a split loop follows both the loop's start and the code before the first iteration: it runs as often as
    these together, and is part of each.
    """
    merged: list[Block] = []
    ending: dict[int, list[int]] = {}
    for each in blocks:
        before = ending.pop(each.address, [])
        if before and each.times == tuple(map(sum, zip(*(merged[at].times for at in before), strict=True))):
            for at in before:
                merged[at] = dataclasses.replace(merged[at], code=merged[at].code + each.code)
        else:
            before = [len(merged)]
            merged.append(each)
        if not _ends(each.code):
            ending.setdefault(each.address + len(each.code), []).extend(before)
    return merged


def _ends(code: bytes) -> bool:
    """Whether the last instruction is a branch (Arm ARM, C4.1.89: branches, exception generating, system)."""
    word = int.from_bytes(code[-4:], "little")
    return (word >> 26) & 0x7 == 0x5 and (word >> 24) & 0xFF != 0xD5
