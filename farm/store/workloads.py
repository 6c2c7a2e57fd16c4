"""Workloads, and which of them a campaign tunes for which board type.

`farm.search.proof` verifies that a workload matches its hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from farm.store import making, schema
from farm.store.base import Base

# The columns that a hash covers: a differing row from elsewhere is not kept.
_BOUND = ("module_json", "arguments", "target", "pipeline")


class WorkloadQueries(Base):
    """Queries on `workloads` and `campaign_workloads`."""

    def save_workloads(self, campaign: int, workloads: Sequence[Mapping[str, Any]]) -> None:
        """Add the workloads of a campaign: mappings with the columns of `workloads` and a `weight`.

        `board_type` is optional and defaults to the campaign's. They were made from a model by this farm: a differing
        row for the same hash is replaced.
        """
        with self._writing() as connection:
            own = connection.execute(
                sa.select(schema.campaigns.c.board_type).where(schema.campaigns.c.id == campaign)
            ).scalar()
            self._insert_workloads(connection, campaign, workloads, own or "")

    def fetch_workloads(self, campaign: int) -> list[dict[str, Any]]:
        """The workloads of a campaign in the given order, each with `board_type` and `weight`.

        A workload of several board types appears once for each.
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
        """Hash and name of every known workload, oldest first."""
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
            # Rows of `fetch_workloads` may return for another campaign.
            row = {key: value for key, value in workload.items() if key not in ("weight", "board_type", "added_at")}
            if not self._insert_new(connection, table, row | {"added_at": self._wall_clock()}):
                self._bind(connection, row)
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

    def _bind(self, connection: sa.Connection, row: Mapping[str, Any]) -> None:
        table = schema.workloads
        own = {name: row[name] for name in _BOUND}
        query = sa.select(*(table.c[name] for name in _BOUND)).where(table.c.hash == row["hash"])
        known = connection.execute(query).mappings().one()
        if known["module_json"] != own["module_json"]:
            connection.execute(table.update().where(table.c.hash == row["hash"]).values(**own))

    def fetch_workload_hashes(self) -> list[str]:
        return [row["hash"] for row in self._rows(sa.select(schema.workloads.c.hash).order_by(schema.workloads.c.hash))]

    def remove_workloads(self, hashes: Sequence[str]) -> int:
        """Remove workloads with their records, trials and places in campaigns; return the number of trials.

        For workloads that do not match their hash: their measurements are worthless.
        """
        trials, records, members, table = schema.trials, schema.records, schema.campaign_workloads, schema.workloads
        with self._writing(durably=True) as connection, making.deletable(connection):
            gone = 0
            for each in hashes:
                connection.execute(records.delete().where(records.c.workload == each))
                gone += connection.execute(trials.delete().where(trials.c.workload == each)).rowcount
                connection.execute(members.delete().where(members.c.workload == each))
                connection.execute(table.delete().where(table.c.hash == each))
            return gone
