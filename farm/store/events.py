"""Events of boards and of everything else, in one form and in order of writing, for readers that continue."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from farm.store import schema
from farm.store.session import StorePart
from farm.types import documents

# Board events by order of a person. A lease counts if it is a reservation, or ended by force.
_ORDERED = (
    *("registered", "updated", "removed", "replaced", "drain", "undrain", "quarantine", "clear", "retire"),
    *("lease_forced", "power_cycled"),
)
_RESERVED = "reserved%"
# The actors of what the farm does by itself.
_AUTOMATIC = ("services",)
# How many of the newest board events to search for a board's last fault: weeks of a small fleet, a day of a large one.
_FAULTS_WITHIN = 50_000
# Events of every board in every campaign, which are no news.
_ROUTINE = ("board_taken", "board_left", "warm_start")
_ROUTINE_OF_BOARDS = ("lease_taken", "lease_released", "lease_expired")
# A server assigns numbers before transactions end: a smaller number may still appear among younger rows.
_SETTLED_S = 2.0
# Both kinds of events, with the same columns.
_EVENT, _BOARD_EVENT = schema.events.c, schema.board_events.c
_OTHERS = sa.select(*(_EVENT[name] for name in ("at", "by", "kind", "subject", "message", "id")))
_OF_BOARDS = sa.select(
    *(_BOARD_EVENT[name] for name in ("at", "by", "kind", "id")),
    *(_BOARD_EVENT.board.label("subject"), _BOARD_EVENT.reason.label("message")),
)
# An event that only stores how far a reader has come.
MARK_KIND = "read_mark"


class Mark(NamedTuple):
    """How far a reader has come: the numbers of the last board event, and of the last other event."""

    boards: int = 0
    others: int = 0


@dataclasses.dataclass(frozen=True)
class StoreEvent:
    """One event. `subject` is a board's name if `of_board`, else a campaign's or another subject.

    `before` and `after` are a board's health. `mark` is the reader's position after it.
    """

    of_board: bool
    id: int
    at: float
    kind: str
    subject: str
    text: str
    mark: Mark
    before: str = ""
    after: str = ""
    by: str = ""


@dataclasses.dataclass(frozen=True)
class OverviewMark:
    """The numbers of the newest event, board event, trial and golden-kernel run."""

    event: int = 0
    board_event: int = 0
    trial: int = 0
    golden: int = 0


class Events(StorePart):
    """Queries on `events` and `board_events`."""

    def add(self, kind: str, subject: str, message: str, by: str = "") -> None:
        """Append an event; `by` is who ordered it, if a person did."""
        with self._db.writing() as connection:
            self._db.add_event(connection, kind, subject, message, by)

    def fetch(self, subject: str | None = None) -> list[documents.Event]:
        """All events, oldest first, or those of one subject: a board's key, a campaign's name."""
        own = schema.events.c
        query = sa.select(own.at, own.kind, own.subject, own.message, own.by).order_by(own.id)
        rows = self._db.rows(query if subject is None else query.where(own.subject == subject))
        return [documents.Event(**row) for row in rows]

    def fetch_of_boards(self, board: str | None = None) -> list[documents.BoardEvent]:
        """Events of a board, or of all, removed ones included, oldest first."""
        return self._list_board_events(sa.true() if board is None else _BOARD_EVENT.board == board)

    def fetch_changes(
        self, limit: int, *, since: float | None = None, subject: str | None = None
    ) -> list[documents.Event]:
        """The newest changes by people, newest first. `subject` is a board's or a campaign's name."""
        own, boards = schema.events, schema.board_events
        first = _OTHERS.where(own.c.by != "")
        second = _OF_BOARDS.where(
            boards.c.kind.in_(_ORDERED) | ((boards.c.kind == "lease_taken") & boards.c.reason.like(_RESERVED)),
            boards.c.by.not_in(_AUTOMATIC),
            # A killed holder is discovered by the next client of the board.
            sa.not_((boards.c.kind == "lease_forced") & boards.c.reason.like("%its process % is gone")),
        )
        rows: list[dict[str, Any]] = []
        for query, table, name in ((first, own, own.c.subject), (second, boards, boards.c.board)):
            if since is not None:
                query = query.where(table.c.at >= since)
            if subject is not None:
                query = query.where(name == subject)
            rows += self._db.rows(query.order_by(table.c.id.desc()).limit(limit))
        return _to_events(rows)[:limit]

    def fetch_newest(self, limit: int, subject: str | None = None, offset: int = 0) -> list[documents.Event]:
        """The newest events of boards and all else, newest first.

        Leaves out routine events of boards. `subject` is a board's or a campaign's name.
        """
        own, boards = schema.events, schema.board_events
        first = _OTHERS.where(own.c.kind.not_in(_ROUTINE))
        second = _OF_BOARDS.where(boards.c.kind.not_in(_ROUTINE_OF_BOARDS))
        if subject is not None:
            first, second = first.where(own.c.subject == subject), second.where(boards.c.board == subject)
        # Each side through its own index, so that neither is read as a whole.
        wanted = limit + offset
        rows = self._db.rows(first.order_by(own.c.id.desc()).limit(wanted))
        rows += self._db.rows(second.order_by(boards.c.id.desc()).limit(wanted))
        return _to_events(rows)[offset:wanted]

    def fetch_changed_boards(self, after: int) -> list[str]:
        """The boards with events after a mark's `board_event`."""
        query = sa.select(_BOARD_EVENT.board).where(_BOARD_EVENT.id > after).distinct()
        return [row["board"] for row in self._db.rows(query)]

    def fetch_board_news(self, after: int, kinds: Collection[str]) -> list[documents.BoardEvent]:
        """Board events of these kinds after a mark's `board_event`, oldest first."""
        return self._list_board_events(_BOARD_EVENT.id > after, _BOARD_EVENT.kind.in_(sorted(kinds)))

    def fetch_last_faults(self, kinds: Collection[str], board: str | None = None) -> dict[str, documents.BoardEvent]:
        """Each board's newest event of one of these kinds, if it is among the newest board events."""
        table = _BOARD_EVENT
        newest = sa.select(sa.func.coalesce(sa.func.max(table.id), 0)).scalar_subquery()
        among = table.id > newest - _FAULTS_WITHIN if board is None else table.board == board
        latest = sa.select(sa.func.max(table.id)).where(table.kind.in_(sorted(kinds)), among).group_by(table.board)
        return {event.board: event for event in self._list_board_events(table.id.in_(latest))}

    def fetch_board_users(self, board: str, limit: int) -> list[documents.BoardEvent]:
        """The latest leases of a board, newest first; `reason` is each one's purpose."""
        is_lease = (_BOARD_EVENT.board == board, _BOARD_EVENT.kind == "lease_taken")
        return self._list_board_events(*is_lease, order=_BOARD_EVENT.id.desc(), limit=limit)

    def fetch_board_gaps(self, boards: Collection[str], since: float, until: float) -> list[documents.BoardEvent]:
        """Events of boards in a time span, oldest first: they explain why boards stood idle."""
        within = (_BOARD_EVENT.board.in_(sorted(boards)), _BOARD_EVENT.at.between(since, until))
        return self._list_board_events(*within, limit=20_000)

    def fetch_overview_mark(self) -> OverviewMark:
        """The present mark, in one cheap query."""
        tables = (schema.events, schema.board_events, schema.trials, schema.golden_samples)
        newest = [sa.select(sa.func.coalesce(sa.func.max(each.c.id), 0)).scalar_subquery() for each in tables]
        names = [field.name for field in dataclasses.fields(OverviewMark)]
        [row] = self._db.rows(sa.select(*(query.label(name) for query, name in zip(newest, names, strict=True))))
        return OverviewMark(**row)

    def _list_board_events(
        self, *conditions: sa.ColumnElement[bool], order: Any = _BOARD_EVENT.id, limit: int | None = None
    ) -> list[documents.BoardEvent]:
        query = sa.select(schema.board_events).where(*conditions).order_by(order).limit(limit)
        return [documents.BoardEvent(**row) for row in self._db.rows(query)]

    # In order of writing

    def fetch_mark(self) -> Mark:
        """The mark after all present events."""
        mark = self.fetch_overview_mark()
        return Mark(mark.board_event, mark.event)

    def fetch_after(self, after: Mark, most: int) -> list[StoreEvent]:
        """The next `most` events of each kind after a mark, in order of time."""
        before = self._db.wall_clock() - (_SETTLED_S if isinstance(self._db.location, str) else -1e9)
        found: list[list[dict[str, Any]]] = []
        for table, last in ((schema.board_events, after.boards), (schema.events, after.others)):
            query = (
                sa.select(table).where(table.c.id > last, table.c.kind != MARK_KIND).order_by(table.c.id).limit(most)
            )
            rows = self._db.rows(query)
            # Up to the first unsettled event: what follows is read with it.
            settled = next((number for number, row in enumerate(rows) if row["at"] > before), len(rows))
            found.append(rows[:settled])
        boards, others, events = after.boards, after.others, []
        # Each kind in order of number, even if the clock was set back: a mark must not skip an event.
        for row in heapq.merge(*found, key=lambda row: float(row["at"])):
            of_board = "board" in row
            boards, others = (row["id"], others) if of_board else (boards, row["id"])
            subject, text = ("board", "reason") if of_board else ("subject", "message")
            about = (row["id"], row["at"], row["kind"], row[subject], row[text], Mark(boards, others))
            health = (row["before"] or "", row["after"] or "", row["by"]) if of_board else ()
            events.append(StoreEvent(of_board, *about, *health))
        return events

    def fetch_last(self, most: int) -> list[StoreEvent]:
        """The last `most` events of each kind, in order of time."""
        firsts = []
        for table in (schema.board_events, schema.events):
            newest = sa.select(table.c.id).order_by(table.c.id.desc()).limit(most).subquery()
            [row] = self._db.rows(sa.select(sa.func.coalesce(sa.func.min(newest.c.id), 1).label("id")))
            firsts.append(int(row["id"]) - 1)
        return self.fetch_after(Mark(*firsts), most)


def _to_events(rows: Sequence[Mapping[str, Any]]) -> list[documents.Event]:
    """Rows of both kinds as events, newest first."""
    newest = sorted(rows, key=lambda row: (row["at"], row["id"]), reverse=True)
    return [documents.Event(**{name: row[name] for name in documents.Event.model_fields}) for row in newest]
