"""Workloads, and which of them a campaign tunes for which board type. Campaigns themselves are in `campaigns`.

Whether a workload is what its hash says is found out in `farm.search.proof`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from farm.store import making, schema
from farm.store.base import Base

# What a workload's hash stands for: of a row that says otherwise somebody else's is not kept.
_BOUND = ("module_json", "arguments", "target", "pipeline")


class WorkloadQueries(Base):
    """Queries on `workloads` and `campaign_workloads`."""

    def save_workloads(self, campaign: int, workloads: Sequence[Mapping[str, Any]]) -> None:
        """Add the workloads of a campaign: mappings with the columns of `workloads` and a `weight`.

        A `board_type` may be among them; the campaign's own is taken where it is not. They are what this farm made of a
        model: a row that is there already, and another function, is replaced.
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
        """The hashes of all workloads."""
        return [row["hash"] for row in self._rows(sa.select(schema.workloads.c.hash).order_by(schema.workloads.c.hash))]

    def remove_workloads(self, hashes: Sequence[str]) -> int:
        """Forget workloads with their records, their trials, and their places in campaigns; returns how many trials.

        For those that are not what their hash says: nothing that was measured of them is of use to anybody.
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
