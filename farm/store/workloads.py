"""Workloads, and which of them a campaign tunes for which board type. Campaigns themselves are in `campaigns`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from farm.store import schema
from farm.store.base import Base


class WorkloadQueries(Base):
    """Queries on `workloads` and `campaign_workloads`."""

    def save_workloads(self, campaign: int, workloads: Sequence[Mapping[str, Any]]) -> None:
        """Add the workloads of a campaign: mappings with the columns of `workloads` and a `weight`.

        A `board_type` may be among them; the campaign's own is taken where it is not.
        """
        with self._writing() as connection:
            own = connection.execute(
                sa.select(schema.campaigns.c.board_type).where(schema.campaigns.c.id == campaign)
            ).scalar()
            self._insert_workloads(connection, campaign, workloads, own or "")

    def fetch_workloads(self, campaign: int) -> list[dict[str, Any]]:
        """The workloads of a campaign in the order in which they were given, each with `board_type` and `weight`.

        A workload of several board types comes once for each.
        """
        member, about = schema.campaign_workloads, schema.workloads
        query = (
            sa.select(about, member.c.board_type, member.c.weight)
            .join(member, member.c.workload == about.c.hash)
            .where(member.c.campaign == campaign)
            .order_by(member.c.position)
        )
        return self._rows(query)

    def fetch_workload_names(self) -> list[tuple[str, str]]:
        """Hash and name of every workload that the store has met, the oldest first."""
        table = schema.workloads
        rows = self._rows(sa.select(table.c.hash, table.c.name).order_by(table.c.added_at, table.c.hash))
        return [(row["hash"], row["name"]) for row in rows]

    def _insert_workloads(
        self, connection: sa.Connection, campaign: int, workloads: Sequence[Mapping[str, Any]], board_type: str
    ) -> None:
        table, member = schema.workloads, schema.campaign_workloads
        count = sa.select(sa.func.max(member.c.position)).where(member.c.campaign == campaign)
        last = connection.execute(count).scalar() or 0
        for position, workload in enumerate(workloads, last + 1):
            # What `fetch_workloads` gave may come back for another campaign.
            row = {key: value for key, value in workload.items() if key not in ("weight", "board_type", "added_at")}
            self._insert_new(connection, table, row | {"added_at": self._wall_clock()})
            self._insert_new(
                connection,
                member,
                {
                    "campaign": campaign,
                    "board_type": workload.get("board_type") or board_type,
                    "workload": workload["hash"],
                    "weight": workload["weight"],
                    "position": position,
                },
            )
