"""Who changed what: what people ordered of boards, campaigns, the queue and records, from the events there are."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from farm.store import schema
from farm.store.base import Base

# Of a board's events, those that somebody ordered. A lease is a change where it is a reservation, or ended by force.
_ORDERED = (
    *("registered", "updated", "removed", "replaced", "drain", "undrain", "quarantine", "clear", "retire"),
    *("lease_forced", "power_cycled"),
)
_RESERVED = "reserved%"
# What the farm does by itself is done by these.
_NOBODY = ("services",)


class AuditQueries(Base):
    """Queries over the events of people."""

    def fetch_changes(
        self, limit: int, *, since: float | None = None, subject: str | None = None, by: str | None = None
    ) -> list[dict[str, Any]]:
        """The newest changes, newest first: `at` (s since the epoch), `by`, `kind`, `subject`, `message`.

        `subject` is a board's or a campaign's name, `by` what a name begins with.
        """
        own, boards = schema.events, schema.board_events
        first = sa.select(own.c.at, own.c.by, own.c.kind, own.c.subject, own.c.message, own.c.id).where(own.c.by != "")
        second = sa.select(
            boards.c.at, boards.c.by, boards.c.kind, boards.c.board.label("subject"), boards.c.reason.label("message"),
            boards.c.id,
        ).where(
            boards.c.kind.in_(_ORDERED) | ((boards.c.kind == "lease_taken") & boards.c.reason.like(_RESERVED)),
            boards.c.by.not_in(_NOBODY),
            # A holder whose process was killed is found out by whoever wants the board next.
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
