"""What operators change through the page and the API: the same calls that the command line makes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from typing import Any

from farm.campaign.engine import control
from farm.campaign.spec import check_campaign
from farm.campaign.submit import submit
from farm.crew import queue_entry
from farm.crew.health import Kind, Observation, decide_by
from farm.errors import UsageError
from farm.settings import Settings
from farm.store import Store
from farm.types import campaigns
from farm.types.documents import BoardInfo
from farm.values import WorkKind
from farm.web.access import Person, Refused, Role

CAMPAIGN_ORDERS = ("pause", "resume", "cancel")
BOARD_ORDERS = (Kind.DRAIN, Kind.UNDRAIN, Kind.QUARANTINE, Kind.CLEAR)
# A campaign gives a board up after the trial under way. Who waits has a thread of the server's eight, so few may.
_WAIT_S, _MOST_WAITING = 10.0, 3
# A form's fields, the limits that they change, and how many of these are one of the field's.
_FIELDS = (
    ("trials", "trials", None), ("per_workload", "per_workload", None),
    ("wall_clock_h", "wall_clock_s", 3600.0), ("board_h", "board_s", 3600.0),
)  # fmt: skip
_planning = threading.Lock()
_waiting = threading.BoundedSemaphore(_MOST_WAITING)


def order_campaign(settings: Settings, store: Store, name: str, order: str, person: Person) -> campaigns.FleetCampaign:
    """Pause, resume or cancel a campaign; return its row. Raises what the command raises; Refused."""
    by = _check_own(store, name, person)
    if order == "pause":
        return control.pause(settings, store, name, by)
    if order == "cancel":
        return control.cancel(settings, store, name, by)
    if order == "resume":
        control.resume(store, name, by)
        control.ensure_engine(settings)
        return store.campaigns.require(name)
    raise UsageError(f"invalid campaign command {order!r}", f"Known: {', '.join(CAMPAIGN_ORDERS)}.")


def submit_campaign(
    settings: Settings, store: Store, document: Mapping[str, Any], person: Person
) -> campaigns.FleetCampaign:
    """Submit a campaign of the zoo's models for a person; return its row. Raises what the command raises; Refused."""
    file = check_campaign(document, "campaign")
    if any(model.path for model in file.spec.models):
        raise UsageError("models are of the zoo here", "`farm campaign run FILE` reads files of its own machine.")
    if not _planning.acquire(blocking=False):
        raise Refused(503, "another campaign is being planned", "Try again in a minute.")
    with contextlib.ExitStack() as stack:
        stack.callback(_planning.release)
        engine = stack.enter_context(control.EnginePrestart(settings))
        command = "POST /api/v1/campaigns"
        submit(file, store, settings, _name_holder(person), command, lambda text: None, engine.begin)
        engine.ensure()
    return store.campaigns.require(file.spec.name)


def change_budget(store: Store, name: str, changes: Mapping[str, Any], person: Person) -> campaigns.FleetCampaign:
    """Change limits of a campaign; return its row. Raises UsageError, Refused."""
    by = _check_own(store, name, person)
    if not changes:
        raise UsageError("no limit was given", "Give trials, per_workload, wall_clock_s or board_s.")
    control.change_budget(store, name, changes, by)
    return store.campaigns.require(name)


def order_board(store: Store, name: str, order: str, reason: str, person: Person) -> BoardInfo:
    """Give an order for a board; return its row. Raises UsageError where the order does not fit."""
    if order not in BOARD_ORDERS:
        raise UsageError(f"invalid board command {order!r}", f"Known: {', '.join(BOARD_ORDERS)}.")
    store.boards.observe(name, order, name_person(person), decide_by(Observation(Kind(order), reason)))
    return store.boards.require(name)


def reserve_board(store: Store, name: str, for_s: float, why: str, person: Person) -> BoardInfo:
    """Reserve a board for the caller, or prolong the reservation; return the board's row.

    Raises UsageError, UnavailableError where it is not free within some seconds.
    """
    waits = _waiting.acquire(blocking=False)
    try:
        wait_s = _WAIT_S if waits else 0.0
        queue_entry.reserve(store, name, for_s, why, wait_s, lambda text: None, _name_holder(person))
    finally:
        if waits:
            _waiting.release()
    return store.boards.require(name)


def end_reservation(store: Store, name: str, reason: str, person: Person) -> BoardInfo:
    """End a reservation; return the board's row. Its holder may, and an operator.

    Raises UsageError where there is none, Refused.
    """
    lease = store.boards.require(name).lease
    if lease is None or lease.kind != WorkKind.RESERVED:
        raise UsageError(f"{name} is not reserved", "`farm queue` shows who has it.")
    if not may_change(person, lease.owner):
        raise _refuse(person, f"the reservation of {lease.owner}")
    store.leases.force_release(name, name_person(person), reason or "ended before its time")
    return store.boards.require(name)


def may_change(person: Person | None, owner: str) -> bool:
    """Return whether a person may change what `owner` (`name@host`) owns: a user only what has the user's name."""
    if person is None or not person.role.covers(Role.USER):
        return False
    return person.role is Role.OPERATOR or owner.partition("@")[0] == person.name


def _check_own(store: Store, name: str, person: Person) -> str:
    """Refuse a person who may not change a campaign; return the person's name for events."""
    owner = store.campaigns.require(name).owner
    if not may_change(person, owner):
        raise _refuse(person, f"the campaign of {owner}")
    return name_person(person)


def _refuse(person: Person, what: str) -> Refused:
    return Refused(
        403,
        f"{person.name} is a {person.role}; changing {what} needs the role {Role.OPERATOR}",
        "A user changes what carries the user's own name.",
    )


def read_budget(form: Mapping[str, str]) -> dict[str, Any]:
    """Read the limits in a form's fields `trials`, `per_workload`, `wall_clock_h` and `board_h`. Raises UsageError."""
    changes: dict[str, Any] = {}
    for field, key, factor in _FIELDS:
        given = form.get(field, "").strip()
        if not given:
            continue
        value = read_number(given, float if factor else int)
        changes[key] = value * factor if factor else value
    return changes


def read_number(given: str, kind: type[int] | type[float]) -> float:
    """Read a number above 0 of a form's field. Raises UsageError."""
    try:
        value = kind(given)
    except ValueError:
        value = 0
    if not 0 < value < 1e9:
        raise UsageError(f"{given[:40]!r} is no number of these", "Give one above 0.")
    return value


def list_fields(campaign: campaigns.FleetCampaign) -> dict[str, Any]:
    """Return the form's initial values."""
    budget = campaign.budget.model_dump()
    return {
        field: budget[key] / factor if factor and budget[key] is not None else budget[key]
        for field, key, factor in _FIELDS
    }


def name_person(person: Person) -> str:
    """Name who gave an order, for events: the person of a named token, with the host that took the order."""
    return f"{_name_holder(person)} (web)"


def _name_holder(person: Person) -> str:
    """Name the person as the command line does on this host, so that its commands work on the reservation."""
    return person.name if "@" in person.name else f"{person.name}@{socket.gethostname()}"
