"""Events of boards and of everything else, in one form and in order of writing, for readers that continue."""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any, NamedTuple

import sqlalchemy as sa

from farm.store import schema
from farm.store.base import Base

# Board events by order of a person. A lease counts if it is a reservation, or ended by force.
_ORDERED = (
    *("registered", "updated", "removed", "replaced", "drain", "undrain", "quarantine", "clear", "retire"),
    *("lease_forced", "power_cycled"),
)
_RESERVED = "reserved%"
# The actors of what the farm does by itself.
_AUTOMATIC = ("services",)


class AuditQueries(Base):
    """Queries on events ordered by people."""

    def fetch_changes(
        self, limit: int, *, since: float | None = None, subject: str | None = None, by: str | None = None
    ) -> list[dict[str, Any]]:
        """The newest changes, newest first: `at` (s since the epoch), `by`, `kind`, `subject`, `message`.

        `subject` is a board's or a campaign's name, `by` a prefix of a name.
        """
        own, boards = schema.events, schema.board_events
        first = sa.select(own.c.at, own.c.by, own.c.kind, own.c.subject, own.c.message, own.c.id).where(own.c.by != "")
        second = sa.select(
            boards.c.at, boards.c.by, boards.c.kind, boards.c.board.label("subject"), boards.c.reason.label("message"),
            boards.c.id,
        ).where(
            boards.c.kind.in_(_ORDERED) | ((boards.c.kind == "lease_taken") & boards.c.reason.like(_RESERVED)),
            boards.c.by.not_in(_AUTOMATIC),
            # A killed holder is discovered by the next client of the board.
            sa.not_((boards.c.kind == "lease_forced") & boards.c.reason.like("%its process % is gone")),
        )  # fmt: skip
        rows: list[dict[str, Any]] = []
        for query, table, name in ((first, own, own.c.subject), (second, boards, boards.c.board)):
            if since is not None:
                query = query.where(table.c.at >= since)
            if subject is not None:
                query = query.where(name == subject)
            if by is not None:
                query = query.where(sa.func.substr(table.c.by, 1, len(by)) == by)
            rows += self._rows(query.order_by(table.c.id.desc()).limit(limit))
        rows.sort(key=lambda row: (row["at"], row["id"]), reverse=True)
        return [{key: row[key] for key in row if key != "id"} for row in rows[:limit]]


# A server assigns numbers before transactions end: a smaller number may still appear among younger rows.
_SETTLED_S = 2.0
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


class EventStreamQueries(Base):
    """Queries over `board_events` and `events` together."""

    def fetch_mark_of_events(self) -> Mark:
        """The mark after all present events."""
        tables = (schema.board_events, schema.events)
        last = [sa.select(sa.func.coalesce(sa.func.max(table.c.id), 0)).scalar_subquery() for table in tables]
        [row] = self._rows(sa.select(last[0].label("boards"), last[1].label("others")))
        return Mark(int(row["boards"]), int(row["others"]))

    def fetch_events_after(self, after: Mark, most: int, since: float | None = None) -> list[StoreEvent]:
        """The next `most` events of each kind after a mark, in order of time, without those before `since`."""
        before = self._wall_clock() - (_SETTLED_S if isinstance(self.location, str) else -1e9)
        found: list[list[dict[str, Any]]] = []
        for table, last in ((schema.board_events, after.boards), (schema.events, after.others)):
            query = (
                sa.select(table).where(table.c.id > last, table.c.kind != MARK_KIND).order_by(table.c.id).limit(most)
            )
            rows = self._rows(query if since is None else query.where(table.c.at >= since))
            # Up to the first unsettled event: what follows is read with it.
            settled = next((number for number, row in enumerate(rows) if row["at"] > before), len(rows))
            found.append(rows[:settled])
        boards, others, events = after.boards, after.others, []
        # Each kind in order of number, even if the clock was set back: a mark must not skip an event.
        for row in heapq.merge(*found, key=lambda row: float(row["at"])):
            of_board = "board" in row
            boards, others = (row["id"], others) if of_board else (boards, row["id"])
            events.append(_to_event(row, of_board, Mark(boards, others)))
        return events

    def fetch_last_events(self, most: int) -> list[StoreEvent]:
        """The last `most` events of each kind, in order of time."""
        firsts = []
        for table in (schema.board_events, schema.events):
            newest = sa.select(table.c.id).order_by(table.c.id.desc()).limit(most).subquery()
            [row] = self._rows(sa.select(sa.func.coalesce(sa.func.min(newest.c.id), 1).label("id")))
            firsts.append(int(row["id"]) - 1)
        return self.fetch_events_after(Mark(*firsts), most)


def _to_event(row: dict[str, Any], of_board: bool, mark: Mark) -> StoreEvent:
    if of_board:
        health = (row["before"] or "", row["after"] or "")
        return StoreEvent(
            True, row["id"], row["at"], row["kind"], row["board"], row["reason"], mark, *health, row["by"]
        )
    return StoreEvent(False, row["id"], row["at"], row["kind"], row["subject"], row["message"], mark)
