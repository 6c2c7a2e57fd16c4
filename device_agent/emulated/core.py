"""What is known of a core that is emulated, read from `inventory/core_types/*.yaml` and from a folder of the user's.

The farm checks those files strictly (`farm/inventory/core_types.py`); here they are only read. How long what was
counted takes such a core: `device_agent/protocol/core_time.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from device_agent.board_types import find_inventory_folders

FOLDER = "core_types"
# Names a folder with constants that were fitted to a board, one YAML file a core type; the farm reads the same one.
FITTED_FOLDER_VARIABLE = "FARM_CORE_TYPES"
FITTED = ("wait_cycles", "crowding")


def load_core(name: str, folders: Sequence[Path] | None = None) -> dict[str, Any] | None:
    """The core type called `name`, as the emulator takes it; None where its pipes are not known.

    The constants in `FITTED` are those of the user's folder, where it has them. Raises OSError, YAMLError, KeyError.
    """
    for folder in folders or [each.parent / FOLDER for each in find_inventory_folders()]:
        path = folder / f"{name}.yaml"
        if path.is_file():
            data = yaml.safe_load(path.read_text())
            if pipeline := data.get("pipeline"):
                pipeline |= _read_fitted(name)
                # Two caches are followed: a core's first one, and the last one, which cores share.
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
