"""Whose the way to each board is, of the coordinators that share a store: kept, asked for, handed on, taken over.

A way is a lease of its own kind: it says through whose services a board is reached and who speaks of its reachability;
who works on the board is the lease's to say (`leases`). Opening and closing connections is `farm.services`' business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from farm.store import schema
from farm.store.base import Base
from farm.store.clock import Instant

# A coordinator that is gone is followed by another within 30 s: this, `OVERDUE_S` of the other's looking at it, a
# connection, and the 2 s after which an agent tries its tracker again.
WAY_TTL_S = 15.0
# For so long another one has to see that a way was not renewed: after an outage of the store all are late, and whoever
# still has the connection comes back first.
OVERDUE_S = 5.0
_RENEWALS_PER_TTL = 4
# An ask is repeated at each look; one that is not was a coordinator's that is gone, or has what it wanted.
_ASK_TTL_S = 10.0
# A board that has been out of reach for so long through one coordinator may be within reach of another.
PATIENCE_S = 30.0
# A coordinator that was handed a way and could not reach the board leaves it to others for so long.
BAR_S = 120.0

_KEEPS, _ASKS, _BARRED = "keeps", "asks", "barred"


@dataclasses.dataclass(frozen=True)
class BoardWay:
    """Whose a board's way is; `lapsed`: it has not renewed that in time. `asked_by` is who is to have it next, "" where
    nobody is.

    Where it is ours and new, `before` is who had it, and `session` what that one left on the board, to be ended where
    it is in the way; `handed`: it gave the way by itself.
    """

    keeper: str
    lapsed: bool = False
    asked_by: str = ""
    before: str = ""
    session: str = ""
    handed: bool = False


@dataclasses.dataclass
class _Facts:
    """What is known of one board's way, as far as it is still believed; of `keeps` what has lapsed, too."""

    keeps: Mapping[str, Any] | None = None
    lapsed: bool = False
    asks_until: dict[str, float] = dataclasses.field(default_factory=dict)
    barred: set[str] = dataclasses.field(default_factory=set)
    # Through whom a lease on the board is used: "" for nobody's services, None where there is no lease.
    leased: str | None = None
    lost: bool = False

    @property
    def keeper(self) -> str:
        """Whose it is; "" where it is nobody's."""
        return "" if self.keeps is None or self.lapsed else str(self.keeps["keeper"])

    @property
    def asks(self) -> list[str]:
        """Who asks for it, the first to do so first."""
        return list(self.asks_until)

    def find_next(self) -> str:
        """To whom it is to be handed now; "" where to nobody."""
        if self.leased is not None:
            return self.leased if self.leased in self.asks else ""
        return self.asks[0] if self.asks else ""

    def may_ask(self, keeper: str, wanted: bool) -> bool:
        """Whether a coordinator that does not have it may want it."""
        if self.leased is not None:
            return self.leased == keeper
        return keeper not in self.barred and (wanted or self.lost)


class WayQueries(Base):
    """Queries on `board_ways`."""

    def keep_ways(
        self, keeper: str, boards: Mapping[str, str], wanted: Collection[str] = (), overdue: Collection[str] = ()
    ) -> dict[str, BoardWay]:
        """Keep what is ours of these boards' ways, take what is nobody's, ask for what our leases, or those who
        `wanted` boards, need; returns whose each way is now.

        `boards` has the session that each connection of ours is on the board, "" for none; of `overdue` ones it is
        known that their keeper is late for `OVERDUE_S`. To be called more often than every `WAY_TTL_S`: who does not
        may have lost its ways. Where nothing is to be written, nothing is.
        """
        facts, now = self._read_ways()

        def find_works(names: Iterable[str]) -> dict[str, str]:
            return {
                name: _find_work(keeper, name, boards[name], facts.get(name, _Facts()), wanted, overdue, now)
                for name in names
            }

        works = find_works(boards)
        if names := [name for name, work in works.items() if work]:
            # The lock is everybody's: within it only what may change is looked at again.
            with self._writing() as connection:
                changing, now = self._read_ways(connection, names)
                facts |= changing
                works |= find_works(names)
                self._do(connection, keeper, works, boards, facts, now)
        return {name: _show(keeper, facts.get(name, _Facts()), work) for name, work in works.items()}

    def hand_ways(self, keeper: str, boards: Mapping[str, tuple[str, str]]) -> list[str]:
        """Give ways of ours, whose connections are closed, to who asks for them; returns those that were given.

        `boards` has to whom each goes, and what may be left of our connection on the board.
        """
        table = schema.board_ways
        with self._writing() as connection:
            facts, now = self._read_ways(connection, list(boards))
            given = [
                name
                for name, (to, _) in boards.items()
                if name in facts and facts[name].keeper == keeper and to in facts[name].asks
            ]
            rows = [
                _to_row(name, boards[name][0], _KEEPS, now, WAY_TTL_S, session=boards[name][1], handed=True)
                for name in given
            ]
            if rows:
                connection.execute(table.delete().where(table.c.board.in_(given), table.c.keeper == keeper))
                self._put(connection, rows)
        return given

    def bar_way(self, keeper: str, board: str, reason: str) -> None:
        """Leave a way that was handed to us and leads nowhere from here to others for `BAR_S`."""
        with self._writing() as connection:
            now = self._clock()
            self._put(connection, [_to_row(board, keeper, _BARRED, now, BAR_S, reason=reason)])

    def leave_ways(self, keeper: str) -> None:
        """Let go of all that is ours: we end."""
        table = schema.board_ways
        with self._writing() as connection:
            connection.execute(table.delete().where(table.c.keeper == keeper, table.c.part != _BARRED))

    def fetch_ways(self) -> dict[str, str]:
        """Who keeps the way to each board, for people; boards whose way nobody keeps are left out."""
        facts, _ = self._read_ways()
        return {name: fact.keeper for name, fact in facts.items() if fact.keeper}

    # Inside a transaction, or a read

    def _read_ways(
        self, connection: sa.Connection | None = None, names: Sequence[str] | None = None
    ) -> tuple[dict[str, _Facts], Instant]:
        ways, boards, leases = schema.board_ways, schema.boards, schema.leases
        standing = sa.select(
            boards.c.name,
            boards.c.reachable,
            boards.c.state_since,
            leases.c.through,
            leases.c.clock,
            leases.c.expires_s,
        ).select_from(boards.outerjoin(leases, leases.c.board == boards.c.name))
        queries: tuple[sa.Select[Any], ...] = (ways.select().order_by(ways.c.since_s), standing)
        if names is not None:
            queries = (queries[0].where(ways.c.board.in_(names)), queries[1].where(boards.c.name.in_(names)))
        if connection is None:
            rows, standings = (self._rows(query) for query in queries)
        else:
            rows, standings = ([dict(row) for row in connection.execute(query).mappings()] for query in queries)
        now, wall = self._clock(), self._wall_clock()
        facts: dict[str, _Facts] = {}
        for row in rows:
            fact = facts.setdefault(row["board"], _Facts())
            alive = row["clock"] == now.clock and row["expires_s"] > now.seconds
            if row["part"] == _KEEPS:
                fact.keeps, fact.lapsed = row, not alive
            elif alive and row["part"] == _ASKS:
                fact.asks_until[row["keeper"]] = row["expires_s"]
            elif alive:
                fact.barred.add(row["keeper"])
        for row in standings:
            fact = facts.setdefault(row["name"], _Facts())
            if row["clock"] == now.clock and row["expires_s"] > now.seconds:
                fact.leased = row["through"]
            fact.lost = not row["reachable"] and wall - row["state_since"] >= PATIENCE_S
        return facts, now

    def _do(
        self,
        connection: sa.Connection,
        keeper: str,
        works: Mapping[str, str],
        sessions: Mapping[str, str],
        facts: Mapping[str, _Facts],
        now: Instant,
    ) -> None:
        table = schema.board_ways
        renewed = [name for name, work in works.items() if work == "renew"]
        if renewed:
            mine = table.c.board.in_(renewed) & (table.c.keeper == keeper)
            values = {"clock": now.clock, "expires_s": now.seconds + WAY_TTL_S, "handed": False}
            connection.execute(table.update().where(mine).values(**values))
            for name in renewed:
                if sessions[name] and sessions[name] != (facts[name].keeps or {}).get("session"):
                    one = (table.c.board == name) & (table.c.keeper == keeper)
                    connection.execute(table.update().where(one).values(session=sessions[name]))
        taken = [name for name, work in works.items() if work == "take"]
        if taken:  # nobody else keeps it any more
            connection.execute(table.delete().where(table.c.board.in_(taken), table.c.part == _KEEPS))
        rows = [_to_row(name, keeper, _KEEPS, now, WAY_TTL_S, session=sessions[name]) for name in taken]
        asked = [name for name, work in works.items() if work == "ask"]
        self._put(connection, rows + [_to_row(name, keeper, _ASKS, now, _ASK_TTL_S) for name in asked])

    def _put(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows in the place of those of the same board and coordinator."""
        if rows:
            insert = self._database.insert(schema.board_ways)
            changed = {name: insert.excluded[name] for name in rows[0] if name not in ("board", "keeper")}
            connection.execute(
                insert.on_conflict_do_update(index_elements=["board", "keeper"], set_=changed),
                [dict(row) for row in rows],
            )


def _to_row(
    board: str,
    keeper: str,
    part: str,
    now: Instant,
    ttl_s: float,
    *,
    session: str = "",
    handed: bool = False,
    reason: str = "",
) -> dict[str, Any]:
    """A row that is believed for `ttl_s`."""
    row = {"board": board, "keeper": keeper, "part": part, "session": session, "handed": handed, "reason": reason}
    return row | {"clock": now.clock, "since_s": now.seconds, "expires_s": now.seconds + ttl_s}


def find_bar(connection: sa.Connection, board: str, keeper: str, now: Instant) -> str | None:
    """Why a board cannot be reached through a coordinator for now; None where nothing is known against it."""
    table = schema.board_ways
    query = table.select().where(table.c.board == board, table.c.keeper == keeper, table.c.part == _BARRED)
    row = connection.execute(query).mappings().first()
    if row is None or row["clock"] != now.clock or row["expires_s"] <= now.seconds:
        return None
    return str(row["reason"])


def list_bars(rows: Iterable[Mapping[str, Any]], now: Instant) -> set[tuple[str, str]]:
    """Of rows of `board_ways`, which coordinator cannot reach which board for now: keeper and board."""
    return {
        (row["keeper"], row["board"])
        for row in rows
        if row["part"] == _BARRED and row["clock"] == now.clock and row["expires_s"] > now.seconds
    }


def _show(keeper: str, fact: _Facts, work: str) -> BoardWay:
    """Whose a way is once `work` is done, given how it was before."""
    keeps = fact.keeps or {"keeper": "", "session": "", "handed": False}
    before, session = str(keeps["keeper"]), str(keeps["session"])
    if work == "take":
        return BoardWay(keeper, before=before, session=session)
    if fact.keeper == keeper:
        return BoardWay(keeper, asked_by=fact.find_next(), session=session, handed=bool(keeps["handed"]))
    return BoardWay(before, lapsed=fact.lapsed)


def _find_work(
    keeper: str,
    board: str,
    session: str,
    fact: _Facts,
    wanted: Collection[str],
    overdue: Collection[str],
    now: Instant,
) -> str:
    """What is to be written of a board's way: `take`, `renew`, `ask`, or nothing ("")."""
    keeps = fact.keeps
    if keeps is None or fact.lapsed:
        mine = keeps is None or keeps["keeper"] == keeper or board in overdue
        return "take" if mine and keeper not in fact.barred else ""
    if fact.keeper == keeper:
        due = keeps["expires_s"] - now.seconds < WAY_TTL_S * (1 - 1 / _RENEWALS_PER_TTL)
        return "renew" if due or keeps["handed"] or (session and keeps["session"] != session) else ""
    asked = fact.asks_until.get(keeper, 0.0) - now.seconds > _ASK_TTL_S / 2
    return "ask" if fact.may_ask(keeper, board in wanted) and not asked else ""
