"""Workloads, and which campaign has which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from farm.store import database, schema
from farm.store.session import StorePart
from farm.values import Workload

_COLUMNS = tuple(column for column in schema.workloads.c if column.name != "added_at")
# The columns that a hash covers: a differing row from elsewhere is not kept.
_BOUND = ("module_json", "arguments", "target", "pipeline")


class Workloads(StorePart):
    """Queries on `workloads` and `campaign_workloads`."""

    def save(self, campaign: int, workloads: Sequence[Workload]) -> None:
        """Add the workloads of a campaign; their `board_type` defaults to the campaign's.

        They were made from a model by this farm: a differing row for the same hash is replaced.
        """
        with self._db.writing() as connection:
            own = connection.execute(
                sa.select(schema.campaigns.c.board_type).where(schema.campaigns.c.id == campaign)
            ).scalar()
            self.insert(connection, campaign, workloads, own or "")

    def fetch(self, campaign: int) -> list[Workload]:
        """The workloads of a campaign in the given order, once for each board type."""
        member, about = schema.campaign_workloads, schema.workloads
        query = (
            sa.select(*_COLUMNS, member.c.board_type, member.c.weight)
            .join(member, member.c.workload == about.c.hash)
            .where(member.c.campaign == campaign)
            .order_by(member.c.position)
        )
        return [_read(row) for row in self._db.rows(query)]

    def fetch_names(self) -> list[tuple[str, str]]:
        """Hash and name of every known workload, oldest first."""
        table = schema.workloads
        rows = self._db.rows(sa.select(table.c.hash, table.c.name).order_by(table.c.added_at, table.c.hash))
        return [(row["hash"], row["name"]) for row in rows]

    def insert(self, connection: sa.Connection, campaign: int, workloads: Sequence[Workload], board_type: str) -> None:
        table, member = schema.workloads, schema.campaign_workloads
        count = sa.select(sa.func.max(member.c.position)).where(member.c.campaign == campaign)
        last = connection.execute(count).scalar() or 0
        for position, workload in enumerate(workloads, last + 1):
            row = workload.to_row()
            if not self._db.insert_new(connection, table, row | {"added_at": self._db.wall_clock()}):
                self._bind(connection, row)
            self._db.insert_new(
                connection,
                member,
                {
                    "campaign": campaign,
                    "board_type": workload.board_type or board_type,
                    "workload": workload.hash,
                    "weight": workload.weight,
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

    def remove(self, hashes: Sequence[str]) -> int:
        """Remove workloads with their records, trials and places in campaigns; return the number of trials.

        For workloads that do not match their hash: their measurements are worthless.
        """
        trials, records, members, table = schema.trials, schema.records, schema.campaign_workloads, schema.workloads
        with self._db.writing(durably=True) as connection, database.deletable(connection):
            gone = 0
            for each in hashes:
                connection.execute(records.delete().where(records.c.workload == each))
                gone += connection.execute(trials.delete().where(trials.c.workload == each)).rowcount
                connection.execute(members.delete().where(members.c.workload == each))
                connection.execute(table.delete().where(table.c.hash == each))
            return gone

    def fetch_by_hash(self, hashes: Sequence[str]) -> dict[str, Workload]:
        """Workloads by hash; unknown hashes are left out."""
        rows = self._db.rows_among(sa.select(*_COLUMNS), schema.workloads.c.hash, hashes)
        return {row["hash"]: _read(row) for row in rows}


def _read(row: Mapping[str, Any]) -> Workload:
    """Read a row; arguments that were damaged by hand are none, and so not those of its module (`farm store check`)."""
    try:
        return Workload.from_row(row)
    except (TypeError, ValueError):
        return Workload.from_row({**row, "arguments": ()})
