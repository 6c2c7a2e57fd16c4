"""A board's core for people and programs: what a certificate found of it, beside its type's file and other boards.

What is compared, and how, is in `farm.inventory.core_figures`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farm.inventory.core_figures import list_others
from farm.inventory.core_types import load_core_types, load_plain_core_types
from farm.store import Store


def fetch_core(store: Store, board: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was found of the core of a row of `Store.fetch_boards`; None where no certificate asked it.

    `type` has the figures of the inventory's file, `used` those that predictions go by, `others` the medians of its
    type's other boards. Raises UsageError where FARM_CORE_TYPES is wrong.
    """
    core = board["core"]
    if not core:
        return None
    plain, used = (
        next((each.list_figures() for each in types if each.name == core["core"]), {})
        for types in (load_plain_core_types(), load_core_types())
    )
    return {**core, "type": plain, "used": used, "others": list_others(store.fetch_boards()).get(board["name"], {})}
