"""What the store forgets: events of long ago, and of whoever has too many. Trials are never forgotten."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from farm.store import schema
from farm.store.base import Base

# A season: who looks into a board's past asks for its last repair.
EVENTS_KEPT_S = 90 * 86400.0
# A board that is probed every ten minutes has some 300 events a day; a campaign rarely a thousand in all.
EVENTS_KEPT = 2000
# However old: the last things that happened are worth their rows, and a wall clock set far ahead costs no more.
EVENTS_ALWAYS_KEPT = 100
# Of all boards, those that were removed among them, and of all subjects together.
EVENTS_KEPT_IN_ALL = 500_000


class PruningQueries(Base):
    """Deletes from `events` and `board_events`, one board or subject per transaction, so that nobody waits for long."""

    def prune_events(self) -> int:
        """Forget, of each board and subject, what is older than `EVENTS_KEPT_S` or beyond the newest `EVENTS_KEPT`.

        The newest `EVENTS_ALWAYS_KEPT` of each stay, while they are among the last `EVENTS_KEPT_IN_ALL`. Returns how
        many events are gone.
        """
        return sum(
            self._prune(table, column)
            for table, column in (
                (schema.board_events, schema.board_events.c.board),
                (schema.events, schema.events.c.subject),
            )
        )

    def _prune(self, table: sa.Table, column: sa.Column[Any]) -> int:
        count = sa.func.count().label("count")
        oldest = sa.func.min(table.c.at).label("oldest")
        rows = self._rows(sa.select(column.label("name"), count, oldest).group_by(column))
        old = self._wall_clock() - EVENTS_KEPT_S
        with self._writing() as connection:
            last = sa.select(sa.func.max(table.c.id)).scalar_subquery()
            gone = connection.execute(table.delete().where(table.c.id <= last - EVENTS_KEPT_IN_ALL)).rowcount
        for row in rows:
            if row["count"] <= EVENTS_ALWAYS_KEPT or (row["count"] <= EVENTS_KEPT and row["oldest"] >= old):
                continue
            named = column == row["name"]
            newest = sa.select(table.c.id).where(named).order_by(table.c.id.desc()).limit(1)
            last_kept = newest.offset(EVENTS_KEPT - 1).scalar_subquery()
            last_sure = newest.offset(EVENTS_ALWAYS_KEPT - 1).scalar_subquery()
            aged = (table.c.at < old) & (table.c.id < last_sure)
            with self._writing() as connection:
                gone += connection.execute(table.delete().where(named, (table.c.id < last_kept) | aged)).rowcount
        return gone
