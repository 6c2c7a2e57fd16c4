"""What an executed program costs on a core: cycles in its pipes, lines that come from memory. Pure.

The rule: a segment (the calling thread alone, or a parallel region) takes the longest of its lanes; a lane takes its
instructions' cycles and what it waits for lines that its first cache lacks, longer where others wait as well; all lanes
together take no less than memory needs for their lines. So nothing beats the pipes or the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from device_agent.emulated.isa import Decoder, Instruction
from device_agent.emulated.pipeline import Pipeline

# Lines of a cache, in bytes: of all cores here.
LINE_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Block:
    """A basic block that was executed: its address, its bytes, how often by each lane.

    Lane 0 is the calling thread; 1 + region x tasks + task is a task of a parallel region.
    """

    address: int
    code: bytes
    times: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Segment:
    """`cycles` and `lines` (from memory) of its longest lane, and of all its lanes."""

    cycles: float
    lines: int
    all_cycles: float
    all_lines: int


@dataclasses.dataclass(frozen=True)
class Misses:
    """Lines that a lane's first cache lacked, and the second. And what it called of the C library's mathematics, of
    which the board's own code is not at hand.
    """

    first: int
    second: int
    math_calls: int = 0


class Pricer:
    """Prices programs for one kind of core; remembers what blocks cost."""

    def __init__(self, pipeline: Pipeline, wait_cycles: float, crowding: float, math_cycles: float) -> None:
        """Cycles that a core waits for a line which its first cache lacks, by what part of them longer for each other
        core that computes, and those of a function such as `expf`.
        """
        self._pipeline, self._wait_cycles, self._crowding = pipeline, wait_cycles, crowding
        self._math_cycles = math_cycles
        self._decoder = Decoder()
        self._known: dict[bytes, float] = {}

    def price(
        self,
        blocks: Iterable[Block],
        misses: Sequence[Misses],
        tasks: int,
        most_lines: int | None = None,
        *,
        first_only: bool = False,
    ) -> list[Segment]:
        """The segments of a run: of `blocks`, by address, and each lane's misses.

        A region's lanes share what they read, of `most_lines` in all; one lane alone may read some again.
        `first_only`: of each region only the first lane was run, and the others cost as much.
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
        """The instructions of a block."""
        return self._decoder.read(code)


def merge(blocks: Iterable[Block]) -> list[Block]:
    """Blocks by address: the emulator ends one wherever it likes, so what is only run after it belongs to it.

    Where a loop is parted, its rest follows both the loop's beginning and what went before the first time round, so
    that it is run as often as these together, and is a part of each.
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
