"""A board's row and lease put together: which state follows, whether the lease has lapsed, what people are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from farm import foreign
from farm.errors import InternalError, UsageError
from farm.store import schema
from farm.store.clock import Instant
from farm.values import Direct, Health, HealthHistory, Ssh, Standing, State, Transport, Virtual, WorkKind

_TRANSPORTS: dict[str, type[Direct] | type[Ssh] | type[Virtual]] = {kind.kind: kind for kind in (Direct, Ssh, Virtual)}
# What commands of the user's may do to a board's power.
POWER_ACTIONS = ("off", "on", "cycle")
_LEASE_PREFIX = "lease_"
# Boards do several trials in a second; when they were last seen is written less often.
_SEEN_STEP_S = 1.0
_SHOWN_OF_LEASE = ("token", "owner", "purpose", "ttl_s", "acquired_at", "expires_at", "kind")


def select_boards() -> sa.Select[Any]:
    """Boards with their leases, whose columns are called `lease_…` and are null where there is none."""
    leases = [column.label(_LEASE_PREFIX + column.name) for column in schema.leases.c if column.name != "board"]
    joined = schema.boards.outerjoin(schema.leases, schema.leases.c.board == schema.boards.c.name)
    return sa.select(schema.boards, *leases).select_from(joined)


def require_row(connection: sa.Connection, name: str) -> dict[str, Any]:
    """The row of `select_boards` for the board called `name`. Raises UsageError where there is none."""
    row = connection.execute(select_boards().where(schema.boards.c.name == name)).mappings().first()
    if row is None:
        raise unknown_board(name, connection.scalars(sa.select(schema.boards.c.name)).all())
    return dict(row)


def unknown_board(name: str, known: Iterable[str] = ()) -> UsageError:
    """The error for a board that is not registered; `known` are those that are."""
    hint = f"{foreign.suggest(name, known)} `farm board list` shows those that there are.".strip()
    return UsageError(f"there is no board {name!r}", hint)


def has_lapsed(row: Mapping[str, Any], now: Instant) -> bool:
    """Whether the lease in a row of `select_boards` is over.

    One of another clock was taken before this kernel started: whoever took it is gone.
    """
    return bool(row["lease_clock"] != now.clock or row["lease_expires_s"] <= now.seconds)


def is_leased(row: Mapping[str, Any], now: Instant) -> bool:
    """Whether a row of `select_boards` holds a lease that is not over."""
    return row["lease_token"] is not None and not has_lapsed(row, now)


def to_standing(row: Mapping[str, Any], now: Instant) -> Standing:
    """The standing that a row of `select_boards` tells."""
    return Standing(bool(row["reachable"]) or is_on_demand(row), is_leased(row, now), Health(row["health"]))


def is_on_demand(row: Mapping[str, Any]) -> bool:
    """Whether a board's agent runs only while a command of this machine uses it, so that nobody keeps it in reach."""
    return bool((row.get("transport") or {}).get("on_demand"))


def is_reserved_by(row: Mapping[str, Any] | None, person: str) -> bool:
    """Whether a board is reserved for a person, by its row as `Store.fetch_boards` shows it."""
    lease = (row or {}).get("lease") or {}
    return bool(lease.get("kind") == WorkKind.RESERVED and lease.get("owner") == person)


def require_kept(row: Mapping[str, Any]) -> None:
    """Refuse a board that the services do not keep in reach, by a row as `fetch_boards` shows it. Raises UsageError."""
    if is_on_demand(row):
        raise UsageError(
            f"{row['name']} is this machine: its agent runs only while a command such as `farm tune` uses it",
            "`farm doctor` examines it.",
        )


def to_history(row: Mapping[str, Any], now: Instant) -> HealthHistory:
    """A board's history, on the clock of `now`.

    Times of another clock cannot be placed on this one and are taken for now, the careful choice: a cool-down starts
    over, and faults count for a whole window more.
    """
    stored = row["history"]
    history = HealthHistory(**(stored | {name: tuple(stored.get(name, ())) for name in ("faults_s", "cycles_s")}))
    if row["history_clock"] == now.clock:
        return history
    faults_s, cycles_s = ((now.seconds,) * len(times) for times in (history.faults_s, history.cycles_s))
    return dataclasses.replace(history, faults_s=faults_s, cycles_s=cycles_s, cooling_since_s=now.seconds)


def to_shown(row: Mapping[str, Any], now: Instant) -> dict[str, Any]:
    """What people and programs are shown of a row of `select_boards`: plain JSON, the lease as a mapping or None.

    `quarantine` is None unless the board is quarantined: `cooling_s`, for how long it has stayed without a fault, and
    `held`, whether an operator ordered it. `power` names what can be done to its power, and `power_cycled_s` for how
    long the farm has not cycled it, once for each time that counts.
    """
    standing = to_standing(row, now)
    shown = {
        column.name: row[column.name]
        for column in schema.boards.c
        if column.name not in ("core", "reachable", "history", "history_clock")
    }
    shown["state"] = str(standing.state)
    # The commands themselves may hold what is not for everybody who may look.
    shown["power"] = [name for name in POWER_ACTIONS if name in (row["power"] or {})]
    shown["power_cycled_s"] = [now.seconds - at for at in to_history(row, now).cycles_s]
    shown["quarantine"] = None
    if standing.health is Health.QUARANTINED:
        history = to_history(row, now)
        shown["quarantine"] = {"cooling_s": now.seconds - history.cooling_since_s, "held": history.held}
    shown["lease"] = None
    if standing.leased:
        shown["lease"] = {name: row[_LEASE_PREFIX + name] for name in _SHOWN_OF_LEASE}
    if standing.state is State.OFFLINE and standing.health is Health.RETIRED:
        shown["state_reason"], shown["state_since"] = "retired: nobody keeps the way to it", row["health_since"]
    if standing.state is State.LEASED:
        shown["state_reason"] = f"leased by {row['lease_owner']}: {row['lease_purpose']}"
        shown["state_since"] = row["lease_acquired_at"]
    elif is_on_demand(row):
        shown["state_reason"] = "its agent is started by whatever command uses it"
    elif standing.state is State.IDLE and row["lease_token"] is not None:
        shown["state_reason"] = f"the lease of {row['lease_owner']} expired"
        shown["state_since"] = row["lease_expires_at"]
    return shown


@dataclasses.dataclass(frozen=True)
class Cause:
    """What keeps a board from being used (a state or a health), why, and since when (seconds since the epoch)."""

    what: str
    why: str
    since: float


def find_cause(row: Mapping[str, Any]) -> Cause | None:
    """The one reason that every list and page shows for a board, by its row in the store; None where it can be used.

    What an operator or the farm decided about the board counts before its connection, and that before a doubt.
    """
    health = Health(row["health"])
    if health not in (Health.GOOD, Health.SUSPECT):
        return _by_health(row)
    if row["state"] == State.OFFLINE:
        return Cause(str(row["state"]), str(row["state_reason"]), float(row.get("state_since") or 0.0))
    return None if health is Health.GOOD else _by_health(row)


def _by_health(row: Mapping[str, Any]) -> Cause:
    return Cause(str(row["health"]), str(row["health_reason"]), float(row.get("health_since") or 0.0))


def note_seen(connection: sa.Connection, names: Collection[str], at: float) -> None:
    """Note that boards did something at a moment: a probe or a description is not the only sign of life."""
    table = schema.boards
    older = table.c.seen_at.is_(None) | (table.c.seen_at < at - _SEEN_STEP_S)
    if names:
        connection.execute(table.update().where(table.c.name.in_(names), older).values(seen_at=at))


def to_document(transport: Transport) -> dict[str, Any]:
    """A transport as the store keeps it."""
    document = {"kind": transport.kind, **dataclasses.asdict(transport)}
    # Boards that were registered before there were these have none, and must stay equal to what they were; JSON has no
    # tuples.
    for key in ("faults", "live", "on_demand"):
        if value := document.pop(key, None):
            document[key] = list(value) if key == "faults" else value
    return document


def parse_transport(document: Mapping[str, Any]) -> Transport:
    """The transport in the column of that name. Raises InternalError where nothing of ours wrote it."""
    fields = dict(document)
    if "faults" in fields:
        fields["faults"] = tuple(fields["faults"])
    try:
        return _TRANSPORTS[fields.pop("kind")](**fields)
    except (KeyError, TypeError) as error:
        raise InternalError(f"the store holds a transport that nothing writes: {dict(document)}") from error
