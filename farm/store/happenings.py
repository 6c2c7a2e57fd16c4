"""What happened, of boards and of everything else, in one form and in the order of writing: for who reads on and on."""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any, NamedTuple

import sqlalchemy as sa

from farm.store import schema
from farm.store.base import Base

# On a server numbers are given before transactions end: what is younger may still be joined by a smaller number.
_SETTLED_S = 2.0
# Of events that are only how far somebody has read: nothing happened.
MARK_KIND = "read_mark"


class Mark(NamedTuple):
    """How far somebody has read: the numbers of the last event of a board, and of the last other one."""

    boards: int = 0
    others: int = 0


@dataclasses.dataclass(frozen=True)
class Happening:
    """One event. `subject` is a board's name where `of_board`, else a campaign's or whatever else it is about.

    `before` and `after` are a board's health. `mark` is how far one has read with it.
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


class HappeningQueries(Base):
    """Queries over `board_events` and `events` together."""

    def fetch_mark_of_events(self) -> Mark:
        """How far one has read who knows everything that has happened so far."""
        tables = (schema.board_events, schema.events)
        last = [sa.select(sa.func.coalesce(sa.func.max(table.c.id), 0)).scalar_subquery() for table in tables]
        [row] = self._rows(sa.select(last[0].label("boards"), last[1].label("others")))
        return Mark(int(row["boards"]), int(row["others"]))

    def fetch_happenings(self, after: Mark, most: int, since: float | None = None) -> list[Happening]:
        """The `most` next of each kind after a mark, in order of time; `since` leaves older ones out."""
        before = self._wall_clock() - (_SETTLED_S if isinstance(self.location, str) else -1e9)
        found: list[list[dict[str, Any]]] = []
        for table, last in ((schema.board_events, after.boards), (schema.events, after.others)):
            query = (
                sa.select(table).where(table.c.id > last, table.c.kind != MARK_KIND).order_by(table.c.id).limit(most)
            )
            rows = self._rows(query if since is None else query.where(table.c.at >= since))
            # Up to the first that may not be settled: what comes after it is read with it.
            settled = next((number for number, row in enumerate(rows) if row["at"] > before), len(rows))
            found.append(rows[:settled])
        boards, others, happenings = after.boards, after.others, []
        # Each kind in the order of its numbers, also where the clock was set back: a mark must not skip one.
        for row in heapq.merge(*found, key=lambda row: float(row["at"])):
            of_board = "board" in row
            boards, others = (row["id"], others) if of_board else (boards, row["id"])
            happenings.append(_to_happening(row, of_board, Mark(boards, others)))
        return happenings

    def fetch_last_happenings(self, most: int) -> list[Happening]:
        """The `most` last of each kind, in order of time."""
        firsts = []
        for table in (schema.board_events, schema.events):
            newest = sa.select(table.c.id).order_by(table.c.id.desc()).limit(most).subquery()
            [row] = self._rows(sa.select(sa.func.coalesce(sa.func.min(newest.c.id), 1).label("id")))
            firsts.append(int(row["id"]) - 1)
        return self.fetch_happenings(Mark(*firsts), most)


def _to_happening(row: dict[str, Any], of_board: bool, mark: Mark) -> Happening:
    if of_board:
        health = (row["before"] or "", row["after"] or "")
        return Happening(True, row["id"], row["at"], row["kind"], row["board"], row["reason"], mark, *health, row["by"])
    return Happening(False, row["id"], row["at"], row["kind"], row["subject"], row["message"], mark)
