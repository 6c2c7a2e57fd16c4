"""Virtual boards for who has none: registered where a command asks for one of a type."""

from __future__ import annotations

import itertools

from farm import emulation
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.store import Store
from farm.values import Virtual

# As many as leave the host something to search and compile on.
_COUNT = 2


def require_model(kind: BoardType) -> None:
    """Refuse a type of which there are no virtual boards. Raises UsageError."""
    if not kind.simulation:
        raise UsageError(f"there are no virtual boards of type {kind.name}", "`farm board types` says which.")


def require_virtual(store: Store, kind: BoardType, by: str) -> list[str]:
    """Register virtual boards of a type where there are none; returns the names of new ones.

    Raises UsageError for a type that has no model, UnavailableError where they would run their own code and cannot.
    """
    require_model(kind)
    if emulation.runs_own_code(kind):
        emulation.require_installed()
    rows = store.fetch_boards()
    if any(row["simulated"] and row["board_type"] == kind.name for row in rows):
        return []
    taken = {row["name"] for row in rows}
    names = (name for n in itertools.count(1) if (name := f"virtual-{kind.name}-{n}") not in taken)
    added = list(itertools.islice(names, _COUNT))
    for seed, name in enumerate(added):
        store.register_board(name, kind.name, Virtual(seed), {}, by=by)
    return added
