"""A board's core for people and programs: what a certificate found of it, beside its type's file and other boards.

What is compared, and how, is in `farm.inventory.core_figures`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farm.inventory.core_figures import CLOCK, SIZED, list_others
from farm.inventory.core_types import load_core_types, load_plain_core_types
from farm.store import Store

HEADS = ("Core", "Measured", "Between", "Type's file", "In use", "Others")


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


def list_rows(core: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What `fetch_core` returned as lines of a table with `HEADS`: the clock, then each figure of its type."""
    found = {CLOCK: {"value": core[CLOCK]}} | core["found"]
    rows = []
    for name in (CLOCK, *core["type"]):
        figure = found.get(name)
        spread = f"{_say(name, figure['low'])} to {_say(name, figure['high'])}" if figure and "low" in figure else "–"
        compared = (
            _say(name, core[whose][name]) if name in core[whose] else "–" for whose in ("type", "used", "others")
        )
        rows.append((name, _say(name, figure["value"]) if figure else "not told", spread, *compared))
    return rows


def _say(name: str, value: float) -> str:
    return f"{value:.0f}" if name in SIZED else f"{value:.4g}"
