"""Boards as the store returns them, for rules that need no store."""

from __future__ import annotations

from typing import Any

from farm.types.documents import BoardInfo, LeaseInfo, Quarantine

NANO = "jetson-nano"


def make_row(name: str = "board", board_type: str = NANO, **changes: Any) -> BoardInfo:
    """A real, good, idle board with these fields changed."""
    usual: dict[str, Any] = {
        "simulated": False,
        "labels": {},
        "transport": {"kind": "direct"},
        "description": {},
        "state": "idle",
        "state_reason": "",
        "state_since": 0.0,
        "health": "good",
        "health_reason": "",
        "health_since": 0.0,
        "added_at": 0.0,
        "seen_at": None,
        "quarantine": None,
        "lease": None,
        "power": [],
        "power_cycled_s": [],
    }
    return BoardInfo(name=name, board_type=board_type, **usual | changes)


def make_lease(owner: str = "owner", purpose: str = "tuning", **changes: Any) -> LeaseInfo:
    """A lease for trials with these fields changed."""
    usual = {"token": 1, "ttl_s": 60.0, "acquired_at": 0.0, "expires_at": 60.0, "kind": "trials"}
    return LeaseInfo(owner=owner, purpose=purpose, **usual | changes)


def make_quarantine(cooling_s: float = 0.0, held: bool = False) -> Quarantine:
    """A quarantine, by default one that has just begun."""
    return Quarantine(cooling_s=cooling_s, held=held)
