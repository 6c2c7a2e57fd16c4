"""A board's row and lease together: its state, whether the lease has lapsed, and its document."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from farm import foreign
from farm.errors import InternalError, UsageError
from farm.store import schema
from farm.store.clock import Instant
from farm.store.session import Statement
from farm.types import documents
from farm.values import Direct, Health, HealthHistory, Ssh, Standing, State, Transport, Virtual

_TRANSPORTS: dict[str, type[Direct] | type[Ssh] | type[Virtual]] = {kind.kind: kind for kind in (Direct, Ssh, Virtual)}
# The actions of a user's power commands.
POWER_ACTIONS = ("off", "on", "cycle")
_LEASE_PREFIX = "lease_"
# Boards run several trials a second; `seen_at` is written less often.
_SEEN_STEP_S = 1.0
_NOTE_SEEN = Statement(
    schema.boards.update()
    .where(schema.boards.c.name == sa.bindparam("board"))
    .where(schema.boards.c.seen_at.is_(None) | (schema.boards.c.seen_at < sa.bindparam("before")))
    .values(seen_at=sa.bindparam("at"))
)
_SHOWN = (
    *("name", "board_type", "simulated", "labels", "transport", "description"),
    *("health_reason", "health_since", "added_at", "seen_at"),
)


@functools.cache  # what it is made of takes longer than the read
def select_boards() -> sa.Select[Any]:
    """Boards with their leases, in columns `lease_…`, null without one."""
    leases = [column.label(_LEASE_PREFIX + column.name) for column in schema.leases.c if column.name != "board"]
    joined = schema.boards.outerjoin(schema.leases, schema.leases.c.board == schema.boards.c.name)
    return sa.select(schema.boards, *leases).select_from(joined)


def require_row(connection: sa.Connection, name: str) -> dict[str, Any]:
    """The row of `select_boards` for a board. Raises UsageError for an unknown one."""
    for row in _select_by_name().fetch(connection, board=name):
        return row
    raise unknown_board(name, connection.scalars(sa.select(schema.boards.c.name)).all())


@functools.cache
def _select_by_name() -> Statement:
    return Statement(select_boards().where(schema.boards.c.name == sa.bindparam("board")))


def unknown_board(name: str, known: Iterable[str] = ()) -> UsageError:
    """The error for an unregistered board; `known` are the registered ones."""
    hint = f"{foreign.suggest(name, known)} `farm board list` shows those that there are.".strip()
    return UsageError(f"there is no board {name!r}", hint)


def to_standing(row: Mapping[str, Any], now: Instant) -> Standing:
    """The standing in a row of `select_boards`."""
    is_leased = now.is_valid(row, _LEASE_PREFIX)
    return Standing(bool(row["reachable"]) or _is_on_demand(row), is_leased, Health(row["health"]))


def _is_on_demand(row: Mapping[str, Any]) -> bool:
    return bool(row["transport"].get("on_demand"))


def require_kept(board: documents.BoardInfo) -> None:
    """Refuse a board that the services do not connect to. Raises UsageError."""
    if board.on_demand:
        raise UsageError(
            f"{board.name} is this machine: its agent runs only while a command such as `farm tune` uses it",
            "`farm doctor` examines it.",
        )


def to_history(row: Mapping[str, Any], now: Instant) -> HealthHistory:
    """A board's history on the clock of `now`.

    Times of another clock cannot be converted and become now, the safe choice: a cool-down restarts, and faults count
    for another window.
    """
    stored = row["history"]
    history = HealthHistory(**(stored | {name: tuple(stored.get(name, ())) for name in ("faults_s", "cycles_s")}))
    if row["history_clock"] == now.clock:
        return history
    faults_s, cycles_s = ((now.seconds,) * len(times) for times in (history.faults_s, history.cycles_s))
    return dataclasses.replace(history, faults_s=faults_s, cycles_s=cycles_s, cooling_since_s=now.seconds)


def to_board(row: Mapping[str, Any], now: Instant) -> documents.BoardInfo:
    """A row of `select_boards` as a document."""
    standing, history, quarantine, lease = to_standing(row, now), to_history(row, now), None, None
    if standing.health is Health.QUARANTINED:
        quarantine = documents.Quarantine(cooling_s=now.seconds - history.cooling_since_s, held=history.held)
    if standing.leased:
        lease = documents.LeaseInfo(**{name: row[_LEASE_PREFIX + name] for name in documents.LeaseInfo.model_fields})
    reason, since = row["state_reason"], row["state_since"]
    if standing.state is State.OFFLINE and standing.health is Health.RETIRED:
        reason, since = "retired: the farm does not connect to it", row["health_since"]
    if lease is not None and standing.state is State.LEASED:
        reason, since = f"leased by {lease.owner}: {lease.purpose}", lease.acquired_at
    elif _is_on_demand(row):
        reason = "its agent runs only while a command uses it"
    elif standing.state is State.IDLE and row["lease_token"] is not None:
        reason, since = f"the lease of {row['lease_owner']} expired", row["lease_expires_at"]
    return documents.BoardInfo(
        **{name: row[name] for name in _SHOWN},
        state=standing.state,
        state_reason=reason,
        state_since=since,
        health=standing.health,
        quarantine=quarantine,
        lease=lease,
        power=[name for name in POWER_ACTIONS if name in (row["power"] or {})],
        power_cycled_s=[now.seconds - at for at in history.cycles_s],
    )


@dataclasses.dataclass(frozen=True)
class Cause:
    """What prevents a board's use (a state or a health), why, and since when (seconds since the epoch)."""

    what: str
    why: str
    since: float


def find_cause(board: documents.BoardInfo) -> Cause | None:
    """The one reason that every list and page shows for a board; None if it is usable.

    A decision about the board takes precedence over its connection, and that over a doubt.
    """
    by_health = Cause(board.health, board.health_reason, board.health_since)
    if board.health not in (Health.GOOD, Health.SUSPECT):
        return by_health
    if board.state is State.OFFLINE:
        return Cause(board.state, board.state_reason, board.state_since)
    return None if board.health is Health.GOOD else by_health


def note_seen(connection: sa.Connection, names: Collection[str], at: float) -> None:
    """Record that boards were seen: probes and descriptions are not the only signs of life."""
    _NOTE_SEEN.run(connection, [{"board": name, "at": at, "before": at - _SEEN_STEP_S} for name in names])


def to_document(transport: Transport) -> dict[str, Any]:
    """Encode a transport as the store keeps it."""
    document = {"kind": transport.kind, **dataclasses.asdict(transport)}
    # Boards registered before these fields existed lack them and must compare equal; JSON has no tuples.
    for key in ("faults", "live", "on_demand", "meter"):
        if value := document.pop(key, None):
            document[key] = list(value) if key == "faults" else value
    return document


def parse_transport(document: Mapping[str, Any]) -> Transport:
    """Decode a stored transport. Raises InternalError for an invalid one."""
    fields = dict(document)
    if "faults" in fields:
        fields["faults"] = tuple(fields["faults"])
    try:
        return _TRANSPORTS[fields.pop("kind")](**fields)
    except (KeyError, TypeError) as error:
        raise InternalError(f"the store holds a transport that nothing writes: {dict(document)}") from error


@dataclasses.dataclass(frozen=True)
class BoardFilters:
    """Which boards are shown; empty: all. `text` is searched in names, types, labels and holders."""

    text: str = ""
    board_type: str = ""
    state: str = ""
    health: str = ""
    made: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def chooses(self) -> bool:
        """Return whether the filters may leave a board out."""
        return self != BoardFilters()

    def matches(self, board: documents.BoardInfo) -> bool:
        """Return whether a board, as the store shows it, passes."""
        texts = [board.name, board.board_type]
        if board.lease is not None:
            texts += [board.lease.owner, board.lease.purpose]
        texts += [f"{key}={value}" for key, value in board.labels.items()]
        return (
            (not self.text or any(self.text.lower() in str(each).lower() for each in texts))
            and self.board_type in ("", board.board_type)
            and self.state in ("", board.state)
            and self.health in ("", board.health)
            and (not self.made or (self.made == "simulated") == board.simulated)
            and self.labels.items() <= board.labels.items()
        )
