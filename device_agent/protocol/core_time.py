"""How long a core takes for what was counted of a program: cycles, waits for lines, lines from memory. Pure.

Virtual boards are priced by this, and so are a real board's programs when it is certified. What is counted, and how:
`device_agent/emulated/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Of a cache, on all cores.
_LINE_BYTES = 64

# Of emulated code: cycles and lines from memory of the longest lane, cycles and lines of all lanes.
Segment = tuple[float, int, float, int]


@dataclasses.dataclass(frozen=True)
class CountedSegment:
    """A segment before it is known how long a core waits: its longest lane's cycles in the pipes, lines that the first
    cache lacked, lines from memory; the same of all lanes; how many lanes were at work.
    """

    cycles: float
    waits: int
    lines: int
    all_cycles: float
    all_waits: int
    all_lines: int
    lanes: int

    def price(self, wait_cycles: float, crowding: float) -> Segment:
        """With so many cycles for each line waited for, and by what part longer for each other core at work."""
        each = wait_cycles * (1 + crowding * (self.lanes - 1))
        return self.cycles + self.waits * each, self.lines, self.all_cycles + self.all_waits * each, self.all_lines


def split_waits(
    segments: Iterable[Segment], waits: Iterable[Sequence[int]], wait_cycles: float, crowding: float
) -> list[CountedSegment]:
    """The same segments with their waits taken out, of which `waits` has those of the longest lane, of all, and lanes
    at work.
    """
    found = []
    for (cycles, lines, all_cycles, all_lines), (own, together, lanes) in zip(segments, waits, strict=True):
        each = wait_cycles * (1 + crowding * (lanes - 1))
        rest = (cycles - own * each, all_cycles - together * each)
        found.append(CountedSegment(rest[0], own, lines, rest[1], together, all_lines, lanes))
    return found


def count_seconds(
    segments: Sequence[Segment], core: Mapping[str, Any], hz: float, cores: int, memory_s: float = 1.0
) -> tuple[float, float]:
    """How long segments take at a clock, and what all cores compute together, both in s.

    No segment takes less than its longest lane's cycles, than its lines from memory one core, or than those of all
    lanes the memory, which takes `memory_s` times as long as at its highest clock. More threads than cores take turns.
    """
    one_line_s = _LINE_BYTES / core["core_bytes_per_s"] * memory_s
    all_lines_s = _LINE_BYTES / core["memory_bytes_per_s"] * memory_s
    base_s = busy_s = 0.0
    for cycles, lines, all_cycles, all_lines in segments:
        is_region = (all_cycles, all_lines) != (cycles, lines)
        beside = core["region_cycles"] if is_region else core["call_cycles"]
        longest = max(cycles, all_cycles / max(1, cores)) + beside
        base_s += max(longest / hz, lines * one_line_s, all_lines * all_lines_s)
        busy_s += (all_cycles + beside) / hz
    return base_s, busy_s
