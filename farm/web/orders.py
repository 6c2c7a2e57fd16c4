"""What operators change through the page and the API: the same calls that the command line makes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from farm.campaign.engine import client, control
from farm.crew.health import Kind, Observation, decide_by
from farm.errors import UsageError
from farm.settings import Settings
from farm.store import Store
from farm.values import FleetCampaign
from farm.web.tokens import Person

CAMPAIGN_ORDERS = ("pause", "resume", "cancel")
BOARD_ORDERS = (Kind.DRAIN, Kind.UNDRAIN, Kind.QUARANTINE, Kind.CLEAR)


def order_campaign(settings: Settings, store: Store, name: str, order: str, by: str) -> FleetCampaign:
    """Pause, resume or cancel a campaign; returns it as it is then. Raises what the command does."""
    if order == "pause":
        return control.pause(settings, store, name, by)
    if order == "cancel":
        return control.cancel(settings, store, name, by)
    if order == "resume":
        control.resume(store, name, by)
        client.ensure_engine(settings)
        return store.fetch_fleet_campaign(name)
    raise UsageError(f"a campaign cannot be told {order!r}", f"It can: {', '.join(CAMPAIGN_ORDERS)}.")


def change_budget(store: Store, name: str, changes: Mapping[str, Any], by: str) -> FleetCampaign:
    """Change limits of a campaign; returns it as it is then. Raises UsageError."""
    if not changes:
        raise UsageError("no limit was given", "Give trials, per_workload, wall_clock_s or board_s.")
    control.change_budget(store, name, changes, by)
    return store.fetch_fleet_campaign(name)


def order_board(store: Store, name: str, order: str, reason: str, by: str) -> dict[str, Any]:
    """Give an order for a board; returns it as it is then. Raises UsageError where the order does not fit it."""
    if order not in BOARD_ORDERS:
        raise UsageError(f"a board cannot be told {order!r}", f"It can: {', '.join(BOARD_ORDERS)}.")
    store.observe_board(name, order, by, decide_by(Observation(Kind(order), reason)))
    return store.require_board(name)


def read_budget(form: Mapping[str, str]) -> dict[str, Any]:
    """The limits in a form's fields `trials`, `per_workload`, `wall_clock_h` and `board_h`. Raises UsageError."""
    changes: dict[str, Any] = {}
    for field, key, factor in (
        ("trials", "trials", None),
        ("per_workload", "per_workload", None),
        ("wall_clock_h", "wall_clock_s", 3600.0),
        ("board_h", "board_s", 3600.0),
    ):
        given = form.get(field, "").strip()
        if not given:
            continue
        try:
            value = float(given) if factor else int(given)
        except ValueError:
            value = 0
        if not 0 < value < 1e9:
            raise UsageError(f"{given[:40]!r} is no limit", "Give a number above 0.")
        changes[key] = value * factor if factor else value
    return changes


def list_fields(campaign: FleetCampaign) -> dict[str, Any]:
    """What such a form begins with."""
    budget = dict(campaign.budget)
    hours = {name: None if budget.get(key) is None else budget[key] / 3600 for name, key in _HOURS.items()}
    return {"trials": budget.get("trials"), "per_workload": budget.get("per_workload"), **hours}


_HOURS = {"wall_clock_h": "wall_clock_s", "board_h": "board_s"}


def name_person(person: Person) -> str:
    """Who gave an order, for events: a person by a named token is named with the host that took the order."""
    name = person.name if "@" in person.name else f"{person.name}@{socket.gethostname()}"
    return f"{name} (web)"
