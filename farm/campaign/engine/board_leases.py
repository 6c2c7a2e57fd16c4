"""Freeing the leases of an engine that was killed."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from farm.boards.leased_board import name_owner
from farm.errors import TransientError
from farm.store import Store

_OWNER = re.compile(r"@(\S+) pid (\d+)$")


def free_orphans(
    store: Store, rows: Mapping[str, Mapping[str, Any]], names: Collection[str], purpose: str
) -> list[str]:
    """End the leases on boards among `names` whose owner was killed, instead of waiting for them to expire.

    Only one engine per home gives leases this `purpose`, and it is us: a process of that number that is gone was one
    before us. Whatever session it had ended with it; what may be left is fenced off. Returns the boards that are free.
    """
    freed = []
    for name in names:
        lease = rows[name]["lease"] if name in rows else None
        if lease is None or lease["purpose"] != purpose:
            continue
        found = _OWNER.search(lease["owner"])
        # In a store that hosts share, another host's processes cannot be seen from here: their leases expire.
        if found is None or found.group(1) != socket.gethostname() or Path(f"/proc/{found.group(2)}").exists():
            continue
        try:
            if store.force_release(name, name_owner(), f"its process {found.group(2)} is gone"):
                freed.append(name)
        except TransientError:  # the store is busy: at the next look
            continue
    return freed
