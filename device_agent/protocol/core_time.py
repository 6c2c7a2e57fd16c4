"""Turn counted cycles and lines from memory into the seconds that a core takes. Pure.

Virtual boards take their times from this. `device_agent/emulated/` does the counting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Of a cache, on all cores.
_LINE_BYTES = 64

# Of emulated code: cycles and lines from memory of the longest lane, cycles and lines of all lanes.
Segment = tuple[float, int, float, int]


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
