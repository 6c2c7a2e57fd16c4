"""The queue for boards: who requests some, since when, and each owner's past use.

`farm.crew.queue_rules` decides who gets a board next; `leases` takes it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from farm.errors import UsageError
from farm.store import schema
from farm.store.clock import Instant
from farm.store.routes import list_bars
from farm.store.session import Statement, StorePart
from farm.values import BoardRequest, WorkKind

# A waiting command renews every third of it: a killed one leaves the queue within seconds.
REQUEST_TTL_S = 10.0
# Use this long ago counts half as much as use now (as in the fair shares of batch systems: Slurm's
# PriorityDecayHalfLife, https://slurm.schedmd.com/priority_multifactor.html). Half an hour: a few visits of a sweep.
HALF_LIFE_S = 1800.0
# Use that has halved so often is dropped.
_FORGOTTEN_S = 12 * HALF_LIFE_S
MOST_PRIORITY = 10
# What each look of an engine reads.
_REQUESTS = Statement(schema.board_requests.select().order_by(schema.board_requests.c.id))
_WAYS, _USAGE = Statement(schema.board_ways.select()), Statement(schema.board_usage.select())
_WORKING = Statement(schema.leases.select().where(schema.leases.c.kind != ""))


@dataclasses.dataclass(frozen=True)
class BoardQueue:
    """The requests, longest waiting first; `used_s` by board, owner and kind of work, open leases included; `held_s`,
    how long each board leased for work has been held.
    """

    requests: tuple[BoardRequest, ...]
    used_s: Mapping[tuple[str, str, WorkKind], float]
    held_s: Mapping[str, float]


class RequestQueue(StorePart):
    """Queries on `board_requests` and `board_usage`."""

    def enter(
        self,
        owner: str,
        kind: WorkKind,
        purpose: str,
        board_type: str,
        boards: Collection[str],
        *,
        wanted: int = 1,
        priority: int = 0,
        campaign: str | None = None,
        waited_s: float = 0.0,
        ttl_s: float = REQUEST_TTL_S,
        through: str = "",
    ) -> int:
        """Request `wanted` of some boards of a type; return the request's number.

        It lasts for `ttl_s` unless `stay` renews it. `waited_s`: since when it waits already. `through`: as
        for a lease. Raises UsageError for an empty request.
        """
        if not owner.strip() or not purpose.strip() or wanted < 1 or not boards:
            raise UsageError("a request needs an owner, a purpose, and boards to choose from")
        table = schema.board_requests
        with self._db.writing() as connection:
            now = self._db.clock()
            connection.execute(table.delete().where(now.find_lapsed(table)))
            return self._db.insert(
                connection,
                table,
                owner=owner,
                kind=str(kind),
                purpose=purpose,
                campaign=campaign,
                board_type=board_type,
                boards=sorted(boards),
                wanted=wanted,
                priority=priority,
                requested_at=self._db.wall_clock() - waited_s,
                since_s=now.seconds - waited_s,
                **now.claim(ttl_s),
                through=through,
            )

    def stay(self, number: int, boards: Collection[str], ttl_s: float = REQUEST_TTL_S) -> BoardRequest | None:
        """Renew a request for `ttl_s` from now, for these boards; return it, None where it is gone."""
        table = schema.board_requests
        with self._db.writing() as connection:
            now = self._db.clock()
            mine = (table.c.id == number) & (table.c.clock == now.clock)
            connection.execute(table.update().where(mine).values(boards=sorted(boards), **now.claim(ttl_s)))
            rows = self._db.rows(table.select().where(mine), connection)
        return next((_to_request(row, now) for row in rows), None)

    def leave(self, *numbers: int) -> None:
        """Remove requests; unknown numbers are ignored."""
        table = schema.board_requests
        if numbers:
            with self._db.writing() as connection:
                connection.execute(table.delete().where(table.c.id.in_(numbers)))

    def fetch(self) -> BoardQueue:
        """The present requests, and each owner's use."""
        rows, now = self._db.rows(_REQUESTS), self._db.clock()
        bars = list_bars(self._db.rows(_WAYS), now)
        requests = [_without_bars(row, _to_request(row, now), bars) for row in rows if now.is_valid(row)]
        used_s = {
            (row["board"], row["owner"], WorkKind(row["kind"])): fade(row["used_s"], now.seconds - row["at_s"])
            for row in self._db.rows(_USAGE)
            if row["clock"] == now.clock
        }
        held_s = {}
        for row in self._db.rows(_WORKING):
            if now.is_valid(row):
                key = row["board"], row["owner"], WorkKind(row["kind"])
                held_s[row["board"]] = now.seconds - row["since_s"]
                used_s[key] = used_s.get(key, 0.0) + count_use(held_s[row["board"]])
        return BoardQueue(tuple(sorted(requests, key=lambda each: (-each.waited_s, each.id))), used_s, held_s)

    def set_priority(self, number: int, priority: int, by: str = "") -> BoardRequest:
        """Change the priority of a request and of all requests of its campaign; return the request.

        Raises UsageError for an unknown number or an invalid priority.
        """
        if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
            raise UsageError(f"a priority lies between -{MOST_PRIORITY} and {MOST_PRIORITY}, and {priority} does not")
        table = schema.board_requests
        with self._db.writing() as connection:
            now = self._db.clock()
            row = next(iter(self._db.rows(table.select().where(table.c.id == number), connection)), None)
            if row is None or not now.is_valid(row):
                raise UsageError(f"nothing with the number {number} waits", "`farm queue` shows what does.")
            mine = table.c.id == number if row["campaign"] is None else table.c.campaign == row["campaign"]
            connection.execute(table.update().where(mine).values(priority=priority))
            if row["campaign"] is not None:
                # In the campaign's order too, for an engine after a restart.
                fleet = schema.fleet_campaigns
                named = fleet.c.name == row["campaign"]
                if (order := connection.scalar(sa.select(fleet.c.order).where(named))) is not None:
                    connection.execute(fleet.update().where(named).values(order=order | {"priority": priority}))
            text = f"request {number}, {row['purpose']} of {row['owner']}: from {row['priority']} to {priority}"
            self._db.add_event(connection, "queue_priority", row["board_type"], text, by)
        return dataclasses.replace(_to_request(row, now), priority=priority)

    def note_use(self, connection: sa.Connection, row: Mapping[str, Any]) -> None:
        """Add the ended lease in a row of `select_boards` to its owner's use."""
        now, table = self._db.clock(), schema.board_usage
        if not row["lease_kind"] or row["lease_clock"] != now.clock:
            return
        connection.execute(
            table.delete().where((table.c.clock != now.clock) | (table.c.at_s < now.seconds - _FORGOTTEN_S))
        )
        end_s = min(now.seconds, row["lease_expires_s"])
        key = {"board": row["name"], "owner": row["lease_owner"], "kind": row["lease_kind"]}
        known = connection.execute(table.select().filter_by(**key)).mappings().first()
        used_s = fade(count_use(end_s - row["lease_since_s"]), now.seconds - end_s)
        if known is not None:
            used_s += fade(known["used_s"], now.seconds - known["at_s"])
        row = {**key, "clock": now.clock, "at_s": now.seconds, "used_s": used_s}
        self._db.replace(connection, table, row)


def fade(used_s: float, since_s: float) -> float:
    """The decayed value of a use, in s."""
    return used_s * math.pow(2.0, -max(0.0, since_s) / HALF_LIFE_S)


def count_use(held_s: float) -> float:
    """The decayed value of holding a board for so long until now, in s."""
    return HALF_LIFE_S / math.log(2) * (1.0 - fade(1.0, held_s))


def _without_bars(row: Mapping[str, Any], request: BoardRequest, bars: Collection[tuple[str, str]]) -> BoardRequest:
    """A request without the boards that are unreachable from its coordinator."""
    if not bars:
        return request
    return dataclasses.replace(
        request, boards=tuple(name for name in request.boards if (row["through"], name) not in bars)
    )


def _to_request(row: Mapping[str, Any], now: Instant) -> BoardRequest:
    fields: Sequence[str] = ("id", "owner", "purpose", "board_type", "wanted", "priority", "requested_at", "campaign")
    return BoardRequest(
        **{name: row[name] for name in fields},
        kind=WorkKind(row["kind"]),
        boards=tuple(row["boards"]),
        waited_s=now.seconds - row["since_s"],
    )
