"""What is known of a core that is emulated, read from `inventory/core_types/*.yaml`, and how long segments take it.

The farm checks those files strictly (`farm/inventory/core_types.py`); here they are only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from device_agent.board_types import find_inventory_folders
from device_agent.plan import Segment

FOLDER = "core_types"
# Of a cache, on all cores.
_LINE_BYTES = 64


def load_core(name: str, folders: Sequence[Path] | None = None) -> dict[str, Any] | None:
    """The core type called `name`, as the emulator takes it; None where its pipes are not known."""
    for folder in folders or [each.parent / FOLDER for each in find_inventory_folders()]:
        path = folder / f"{name}.yaml"
        if path.is_file():
            data = yaml.safe_load(path.read_text())
            if pipeline := data.get("pipeline"):
                # Two caches are followed: a core's first one, and the last one, which cores share.
                last = data.get("l3_bytes") or data["l2_bytes"]
                return {
                    "name": name,
                    "caches": [data["l1_bytes"], pipeline["l1_ways"], last, pipeline["l2_ways"]],
                    "wait_cycles": pipeline["wait_cycles"],
                    "crowding": pipeline["crowding"],
                    "math_cycles": pipeline["math_cycles"],
                    "call_cycles": pipeline["call_cycles"],
                    "region_cycles": pipeline["region_cycles"],
                    "core_bytes_per_s": data["far_bytes_per_cycle"] * data["freq_hz"],
                    "memory_bytes_per_s": data["memory_bytes_per_s"],
                    "pipeline": pipeline,
                }
    return None


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
