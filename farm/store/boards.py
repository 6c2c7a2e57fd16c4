"""Boards: register, change, remove and list them, and record observations.

`farm.crew.health` decides what an observation changes; the decision is stored here, with its event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from device_agent.protocol import NAME_RULE, is_name
from farm.errors import TransientError, UsageError
from farm.store import schema
from farm.store.clock import Instant
from farm.store.session import Statement, StorePart
from farm.store.standing import (
    require_row,
    select_boards,
    to_board,
    to_document,
    to_history,
    to_standing,
    unknown_board,
)
from farm.types import documents
from farm.values import Board, Direct, Health, HealthHistory, Standing, Transition, Transport, Virtual

_BY_NAME = Statement(select_boards().order_by(schema.boards.c.name))
_ADD_EVENT = Statement(schema.board_events.insert(), ("board", "at", "kind", "before", "after", "reason", "by"))

Decide = Callable[[Standing, HealthHistory, float], Transition]


class Boards(StorePart):
    """Queries on `boards` and `board_events`."""

    def register(
        self,
        name: str,
        board_type: str,
        transport: Transport,
        labels: Mapping[str, str] | None = None,
        by: str = "operator",
        power: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a board that was never reached: offline, and suspect until it passes a probe.

        `power` holds its power commands, as in `farm.inventory.power_commands`.
        Raises UsageError for a taken or invalid name.
        """
        if not is_name(name):
            raise UsageError(f"{name!r} cannot be a board's name", f"A name is {NAME_RULE}.")
        with self._db.writing() as connection:
            if connection.execute(select_boards().where(schema.boards.c.name == name)).first():
                raise UsageError(f"there is a board {name!r} already", "Remove it first, or give another name.")
            self._insert_board(
                connection,
                name=name,
                board_type=board_type,
                simulated=isinstance(transport, Virtual),
                labels=dict(labels or {}),
                transport=to_document(transport),
                description={},
                reachable=False,
                state_reason="not reached yet",
                health=str(Health.SUSPECT),
                health_reason="not probed yet",
                seen_at=None,
                power=dict(power) if power else None,
            )
            self.add_event(connection, name, "registered", None, str(Health.SUSPECT), "not probed yet", by)

    def update(
        self,
        name: str,
        *,
        board_type: str | None = None,
        transport: Transport | None = None,
        labels: Mapping[str, str] | None = None,
        by: str = "operator",
        power: Mapping[str, Any] | None = None,
    ) -> bool:
        """Change the given fields; return whether anything changed. Labels and power commands are replaced as a whole;
        an empty `power` removes them.

        A new type or transport may mean another machine: the board becomes offline and, if it was good, suspect. Raises
        UsageError for an unknown board, TransientError for a new type or transport under a lease.
        """
        with self._db.writing() as connection:
            row = require_row(connection, name)
            wanted: dict[str, Any] = {} if labels is None else {"labels": dict(labels)}
            if board_type is not None:
                wanted["board_type"] = board_type
            if transport is not None:
                wanted["transport"] = to_document(transport)
            if power is not None:
                wanted["power"] = dict(power) or None
            changes = {key: value for key, value in wanted.items() if row[key] != value}
            if not changes:
                return False
            text = "changed: " + ", ".join(changes)
            before = after = row["health"]
            if changes.keys() & {"board_type", "transport"}:
                self._require_free(row, "be changed")
                if transport is not None:
                    changes["simulated"] = isinstance(transport, Virtual)
                changes |= {"reachable": False, "state_reason": text, "state_since": self._db.wall_clock()}
                if before == Health.GOOD:
                    after = str(Health.SUSPECT)
                    changes |= {"health": after, "health_reason": text, "health_since": self._db.wall_clock()}
            self.change(connection, name, changes)
            self.add_event(connection, name, "updated", before, after, text, by)
        return True

    def remove(self, *names: str, by: str = "operator") -> None:
        """Remove boards, all or none, with their golden-kernel history. Trials and events stay.

        Raises UsageError for an unknown board, TransientError while one is leased.
        """
        with self._db.writing() as connection:
            for name in names:
                row = require_row(connection, name)
                self._require_free(row, "be removed")
                for table in (schema.leases, schema.golden_samples, schema.board_ways):
                    connection.execute(table.delete().where(table.c.board == name))
                connection.execute(schema.boards.delete().where(schema.boards.c.name == name))
                was = f"was a {row['board_type']}"
                self.add_event(connection, name, "removed", row["health"], None, was, by)

    def replace(
        self,
        name: str,
        *,
        transport: Transport | None = None,
        labels: Mapping[str, str] | None = None,
        reason: str = "",
        by: str = "operator",
    ) -> None:
        """Record that another machine has a board's name: the old machine's history no longer counts.

        Forgets description, golden-kernel history, faults and calibration. Trials and events stay, separated by an
        event `replaced`. The board is offline and suspect. Raises UsageError for an unknown board, TransientError while
        it is leased.
        """
        samples, now = schema.golden_samples, self._db.wall_clock()
        with self._db.writing() as connection:
            row = require_row(connection, name)
            self._require_free(row, "be replaced")
            connection.execute(samples.delete().where(samples.c.board == name))
            text = f"another machine has its name now{f': {reason}' if reason else ''}"
            changes: dict[str, Any] = {
                "description": {},
                "seen_at": None,
                "reachable": False,
                "state_reason": text,
                "state_since": now,
                "health": str(Health.SUSPECT),
                "health_reason": text,
                "health_since": now,
                "history": {},
                "history_clock": self._db.clock().clock,
            }
            if transport is not None:
                changes |= {"transport": to_document(transport), "simulated": isinstance(transport, Virtual)}
            if labels is not None:
                changes["labels"] = dict(labels)
            self.change(connection, name, changes)
            self.add_event(connection, name, "replaced", row["health"], str(Health.SUSPECT), text, by)

    def save(self, board: Board) -> None:
        """Record that a board was seen, with its description; add an unregistered one as good.

        For boards that a command started itself.
        """
        now = self._db.wall_clock()
        values = {
            "board_type": board.board_type,
            "simulated": board.simulated,
            "description": dict(board.description),
            "seen_at": now,
        }
        with self._db.writing() as connection:
            known = connection.execute(select_boards().where(schema.boards.c.name == board.name)).mappings().first()
            if known is not None:
                self.change(connection, board.name, values)
            else:
                self._insert_board(
                    connection,
                    name=board.name,
                    labels={},
                    transport=to_document(Direct(on_demand=True)),
                    reachable=True,
                    state_reason="first seen at work",
                    health=str(Health.GOOD),
                    health_reason="first seen at work",
                    **values,
                )

    def save_description(self, name: str, description: Mapping[str, Any], *, simulated: bool) -> None:
        """Store a registered board's description, and that it was seen; its type stays the registered one.

        Raises UsageError for an unknown board.
        """
        values = {"description": dict(description), "simulated": simulated, "seen_at": self._db.wall_clock()}
        with self._db.writing() as connection:
            if not self.change(connection, name, values):
                raise unknown_board(name)

    def fetch(self) -> list[documents.BoardInfo]:
        """All boards by name."""
        return self._list(_BY_NAME)

    def require(self, name: str) -> documents.BoardInfo:
        """One board, as in `fetch`. Raises UsageError for an unknown one."""
        for board in self._list(select_boards().where(schema.boards.c.name == name)):
            return board
        raise unknown_board(name)

    def fetch_some(self, names: Collection[str]) -> list[documents.BoardInfo]:
        """The boards of these names that exist, as in `fetch`."""
        table = schema.boards.c
        return self._list(select_boards().where(table.name.in_(sorted(names))).order_by(table.name))

    def _list(self, query: sa.Select[Any] | Statement) -> list[documents.BoardInfo]:
        rows, now = self._db.rows(query), self._db.clock()
        return self._db.read_each("the board", rows, lambda row: to_board(row, now))

    def fetch_power(self) -> dict[str, dict[str, Any]]:
        """Power commands by board; boards without any are left out."""
        query = sa.select(schema.boards.c.name, schema.boards.c.power).where(schema.boards.c.power.is_not(None))
        return {row["name"]: row["power"] for row in self._db.rows(query)}

    def observe(self, name: str, kind: str, by: str, decide: Decide) -> Transition:
        """Apply `decide` to an observation of `kind` and store its decision with an event, in one transaction.

        `decide` gets the board's standing, its history and the present in seconds of the history's clock; it must be
        pure. Its lease is ignored: leases have their own calls. Raises UsageError for an unknown board, and what
        `decide` raises; then nothing is stored.
        """
        return self.observe_several([name], kind, by, decide)[name]

    def observe_several(self, names: Sequence[str], kind: str, by: str, decide: Decide) -> dict[str, Transition]:
        """As `observe`, for several boards in one transaction: an error for one stores nothing."""
        with self._db.writing() as connection:
            return {name: self._observe(connection, name, kind, by, decide) for name in names}

    def note_unreachable(self, name: str, reason: str) -> None:
        """Store why an offline board is unreachable now, which may differ from the reason of its loss."""
        table = schema.boards
        with self._db.writing() as connection:
            mine = (table.c.name == name) & ~table.c.reachable
            connection.execute(table.update().where(mine).values(state_reason=reason))

    def _observe(self, connection: sa.Connection, name: str, kind: str, by: str, decide: Decide) -> Transition:
        row = require_row(connection, name)
        now, wall = self._db.clock(), self._db.wall_clock()
        before, history = to_standing(row, now), to_history(row, now)
        transition = decide(before, history, now.seconds)
        after, reason = transition.standing, transition.reason
        changes: dict[str, Any] = {}
        if transition.history != history or row["history_clock"] != now.clock:
            changes |= {"history": dataclasses.asdict(transition.history), "history_clock": now.clock}
        events: list[tuple[str, str]] = []
        if after.reachable != before.reachable:
            changes |= {"reachable": after.reachable, "state_reason": reason, "state_since": wall}
            events.append((before.state, dataclasses.replace(after, leased=before.leased).state))
        if after.health is not before.health:
            changes |= {"health": str(after.health), "health_reason": reason, "health_since": wall}
            events.append((before.health, after.health))
        elif reason and not events:
            if after.health is Health.SUSPECT:  # a quarantine keeps its first reason
                changes["health_reason"] = reason
            events.append((before.health, after.health))
        if changes:
            self.change(connection, name, changes)
        for old, new in events:
            self.add_event(connection, name, kind, str(old), str(new), reason, by)
        return transition

    def _require_free(self, row: Mapping[str, Any], what: str) -> None:
        if self._db.clock().is_valid(row, "lease_"):
            name = row["name"]
            raise TransientError(
                f"board {name!r} cannot {what}: {row['lease_owner']} holds it for {row['lease_purpose']}",
                f"Wait until it is free, or end the lease: farm board release {name} --force",
            )

    def _insert_board(self, connection: sa.Connection, **values: Any) -> None:
        now = self._db.wall_clock()
        clock: Instant = self._db.clock()
        connection.execute(
            schema.boards.insert().values(
                added_at=now, state_since=now, health_since=now, history={}, history_clock=clock.clock, **values
            )
        )

    def change(self, connection: sa.Connection, name: str, values: Mapping[str, Any]) -> bool:
        boards = schema.boards
        return connection.execute(boards.update().where(boards.c.name == name).values(**values)).rowcount == 1

    def add_event(
        self,
        connection: sa.Connection,
        board: str,
        kind: str,
        before: str | None,
        after: str | None,
        reason: str,
        by: str,
    ) -> None:
        about = {"board": board, "at": self._db.wall_clock(), "kind": kind, "before": before, "after": after}
        _ADD_EVENT.run(connection, [about | {"reason": reason, "by": by}])
