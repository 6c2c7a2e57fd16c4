"""Which of the coordinators that share a store owns the connection to each board, and whose engines are alive.

A route is a lease of its own kind: through whose services a board is reached. `leases` says who works on the board,
`farm.services` opens and closes connections. On one machine a lock and the process table are more precise about
engines; see `farm.campaign.engine.control`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from farm.store import schema
from farm.store.clock import Instant
from farm.store.session import StorePart

# A gone coordinator is replaced within 30 s: this, `OVERDUE_S` of the other's observation, a connection, and the 2 s
# after which an agent retries its tracker.
WAY_TTL_S = 15.0
# How long another coordinator must see a route unrenewed: after an outage of the store all are late, and one with a
# live connection renews first.
OVERDUE_S = 5.0
_RENEWALS_PER_TTL = 4
# A request is repeated at each call; an unrepeated one is from a coordinator that is gone, or was served.
_ASK_TTL_S = 10.0
# A board unreachable for this long through one coordinator may be reachable through another.
PATIENCE_S = 30.0
# A coordinator that got a route and could not reach the board leaves it to others for this long.
BAR_S = 120.0

_KEEPS, _ASKS, _BARRED = "keeps", "asks", "barred"
# As long as a lease: a dead engine has lost its boards by then, too.
ENGINE_TTL_S = 60.0


@dataclasses.dataclass(frozen=True)
class BoardRoute:
    """The owner of a board's route; `lapsed`: it was not renewed in time. `asked_by` is the next owner, "" for none.

    For a new route of ours, `before` is the previous owner, and `session` its possible leftover connection on the
    board, to be ended if it is in the way; `handed`: it gave the route up itself.
    """

    keeper: str
    lapsed: bool = False
    asked_by: str = ""
    before: str = ""
    session: str = ""
    handed: bool = False


@dataclasses.dataclass
class _Facts:
    """The valid facts about one board's route; `keeps` includes lapsed ones."""

    keeps: Mapping[str, Any] | None = None
    lapsed: bool = False
    asks_until: dict[str, float] = dataclasses.field(default_factory=dict)
    barred: set[str] = dataclasses.field(default_factory=set)
    # The coordinator that the board's lease uses: "" for any, None without a lease.
    leased: str | None = None
    lost: bool = False

    @property
    def keeper(self) -> str:
        """The owner; "" for none."""
        return "" if self.keeps is None or self.lapsed else str(self.keeps["keeper"])

    @property
    def asks(self) -> list[str]:
        """The requesters, the first one first."""
        return list(self.asks_until)

    def find_next(self) -> str:
        """The coordinator that gets the route now; "" for none."""
        if self.leased is not None:
            return self.leased if self.leased in self.asks else ""
        return self.asks[0] if self.asks else ""


class Routes(StorePart):
    """Queries on `board_ways`."""

    def keep(
        self, keeper: str, boards: Mapping[str, str], wanted: Collection[str] = (), overdue: Collection[str] = ()
    ) -> dict[str, BoardRoute]:
        """Renew our routes to these boards, take free ones, request those that our leases or requests (`wanted`) need;
        return the owner of each.

        `boards` maps to the session of our connection on the board, "" without one; the keepers of `overdue` boards are
        late for `OVERDUE_S`. Call it more often than every `WAY_TTL_S`, or routes may be lost. Writes only if something
        changes.
        """
        facts, now = self._read_ways()

        def find_works(names: Iterable[str]) -> dict[str, str]:
            return {
                name: _find_work(keeper, name, boards[name], facts.get(name, _Facts()), wanted, overdue, now)
                for name in names
            }

        works = find_works(boards)
        if names := [name for name, work in works.items() if work]:
            # The write lock is shared: within it only possible changes are checked again.
            with self._db.writing() as connection:
                changing, now = self._read_ways(connection, names)
                facts |= changing
                works |= find_works(names)
                self._do(connection, keeper, works, boards, facts, now)
        return {name: _show(keeper, facts.get(name, _Facts()), work) for name, work in works.items()}

    def hand_over(self, keeper: str, boards: Mapping[str, tuple[str, str]]) -> list[str]:
        """Give routes with closed connections to their requesters; return the boards given.

        `boards` maps to the new owner, and to what may be left of our connection on the board.
        """
        table = schema.board_ways
        with self._db.writing() as connection:
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
                self._db.replace(connection, table, *rows)
        return given

    def bar(self, keeper: str, board: str, reason: str) -> None:
        """Leave a received route that does not reach the board to others for `BAR_S`."""
        with self._db.writing() as connection:
            now = self._db.clock()
            self._db.replace(connection, schema.board_ways, _to_row(board, keeper, _BARRED, now, BAR_S, reason=reason))

    def release(self, keeper: str) -> None:
        """Give up all our routes, at the end."""
        table = schema.board_ways
        with self._db.writing() as connection:
            connection.execute(table.delete().where(table.c.keeper == keeper, table.c.part != _BARRED))

    def fetch(self) -> dict[str, str]:
        """The owner of each board's route, for people; boards without one are left out."""
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
        rows, standings = (self._db.rows(query, connection) for query in queries)
        now, wall = self._db.clock(), self._db.wall_clock()
        facts: dict[str, _Facts] = {}
        for row in rows:
            fact = facts.setdefault(row["board"], _Facts())
            alive = now.is_valid(row)
            if row["part"] == _KEEPS:
                fact.keeps, fact.lapsed = row, not alive
            elif alive and row["part"] == _ASKS:
                fact.asks_until[row["keeper"]] = row["expires_s"]
            elif alive:
                fact.barred.add(row["keeper"])
        for row in standings:
            fact = facts.setdefault(row["name"], _Facts())
            if now.is_valid(row):
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
        table, rows = schema.board_ways, []
        for name, work in works.items():
            if work == "ask":
                rows.append(_to_row(name, keeper, _ASKS, now, _ASK_TTL_S))
            elif work:
                session = sessions[name] or (str((facts[name].keeps or {})["session"]) if work == "renew" else "")
                rows.append(_to_row(name, keeper, _KEEPS, now, WAY_TTL_S, session=session))
        if taken := [name for name, work in works.items() if work == "take"]:
            # No other coordinator keeps it any more.
            connection.execute(table.delete().where(table.c.board.in_(taken), table.c.part == _KEEPS))
        self._db.replace(connection, table, *rows)


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
    """A row valid for `ttl_s`."""
    row = {"board": board, "keeper": keeper, "part": part, "session": session, "handed": handed, "reason": reason}
    return row | {"since_s": now.seconds} | now.claim(ttl_s)


def find_bar(connection: sa.Connection, board: str, keeper: str, now: Instant) -> str | None:
    """Why a board is unreachable through a coordinator for now; None if it is not."""
    table = schema.board_ways
    query = table.select().where(table.c.board == board, table.c.keeper == keeper, table.c.part == _BARRED)
    return next((str(row["reason"]) for row in connection.execute(query).mappings() if now.is_valid(dict(row))), None)


def list_bars(rows: Iterable[Mapping[str, Any]], now: Instant) -> set[tuple[str, str]]:
    """From rows of `board_ways`: which keeper cannot reach which board for now."""
    return {(row["keeper"], row["board"]) for row in rows if row["part"] == _BARRED and now.is_valid(row)}


def _show(keeper: str, fact: _Facts, work: str) -> BoardRoute:
    """A route's owner once `work` is done."""
    keeps = fact.keeps or {"keeper": "", "session": "", "handed": False}
    before, session = str(keeps["keeper"]), str(keeps["session"])
    if work == "take":
        return BoardRoute(keeper, before=before, session=session)
    if fact.keeper == keeper:
        return BoardRoute(keeper, asked_by=fact.find_next(), session=session, handed=bool(keeps["handed"]))
    return BoardRoute(before, lapsed=fact.lapsed)


def _find_work(
    keeper: str, board: str, session: str, fact: _Facts, wanted: Collection[str], overdue: Collection[str], now: Instant
) -> str:
    """The write that a board's route needs: `take`, `renew`, `ask`, or none ("")."""
    keeps = fact.keeps
    if keeps is None or fact.lapsed:
        mine = keeps is None or keeps["keeper"] == keeper or board in overdue
        return "take" if mine and keeper not in fact.barred else ""
    if fact.keeper == keeper:
        due = keeps["expires_s"] - now.seconds < WAY_TTL_S * (1 - 1 / _RENEWALS_PER_TTL)
        return "renew" if due or keeps["handed"] or (session and keeps["session"] != session) else ""
    asked = fact.asks_until.get(keeper, 0.0) - now.seconds > _ASK_TTL_S / 2
    if fact.leased is not None:
        may_ask = fact.leased == keeper
    else:
        may_ask = keeper not in fact.barred and (board in wanted or fact.lost)
    return "ask" if may_ask and not asked else ""


class Engines(StorePart):
    """Queries on `engines`: which are alive."""

    def note(self, engine: Mapping[str, Any], ttl_s: float = ENGINE_TTL_S) -> None:
        """Record that an engine is alive for `ttl_s`."""
        table = schema.engines
        with self._db.writing() as connection:
            now = self._db.clock()
            connection.execute(table.delete().where(now.find_lapsed(table)))
            self._db.replace(connection, table, {"name": name_engine(engine), **now.claim(ttl_s)})

    def forget(self, engine: Mapping[str, Any]) -> None:
        table = schema.engines
        with self._db.writing() as connection:
            connection.execute(table.delete().where(table.c.name == name_engine(engine)))

    def fetch_living(self) -> frozenset[str]:
        """The engines that are alive, as named by `name_engine`."""
        rows, now = self._db.rows(schema.engines.select()), self._db.clock()
        return frozenset(row["name"] for row in rows if now.is_valid(row))


def name_engine(engine: Mapping[str, Any]) -> str:
    """An engine's identity as text."""
    return json.dumps(dict(engine), sort_keys=True)
