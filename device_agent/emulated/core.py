"""What is known of a core that is emulated, read from `inventory/core_types/*.yaml`: all that a price needs.

The farm checks those files strictly (`farm/inventory/core_types.py`); here they are only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from device_agent.board_types import find_inventory_folders

FOLDER = "core_types"


def load_core(name: str, folders: Sequence[Path] | None = None) -> dict[str, Any] | None:
    """The core type called `name`, as the emulator takes it; None where its pipes are not known."""
    for folder in folders or [each.parent / FOLDER for each in find_inventory_folders()]:
        path = folder / f"{name}.yaml"
        if path.is_file():
            data = yaml.safe_load(path.read_text())
            if pipeline := data.get("pipeline"):
                return {
                    "name": name,
                    "caches": [data["l1_bytes"], pipeline["l1_ways"], data["l2_bytes"], pipeline["l2_ways"]],
                    "wait_cycles": pipeline["wait_cycles"],
                    "math_cycles": pipeline["math_cycles"],
                    "call_cycles": pipeline["call_cycles"],
                    "region_cycles": pipeline["region_cycles"],
                    "core_bytes_per_s": data["far_bytes_per_cycle"] * data["freq_hz"],
                    "memory_bytes_per_s": data["memory_bytes_per_s"],
                    "pipeline": pipeline,
                }
    return None
