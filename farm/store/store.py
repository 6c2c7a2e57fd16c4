"""Records and events, and with boards, leases, campaigns, trials and sweeps the whole store: every query of the farm.

Methods take and give the farm's own values. Each write is one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from farm.store import schema
from farm.store.campaign_totals import CampaignTotals
from farm.store.campaigns import CampaignQueries
from farm.store.coverage import CoverageQueries
from farm.store.golden import GoldenQueries
from farm.store.leases import LeaseQueries
from farm.store.pruning import PruningQueries
from farm.store.similar import SimilarQueries
from farm.store.sweeps import SweepQueries
from farm.store.trials import TrialQueries
from farm.values import Record


class Store(
    LeaseQueries,
    GoldenQueries,
    SweepQueries,
    CoverageQueries,
    CampaignQueries,
    TrialQueries,
    SimilarQueries,
    CampaignTotals,
    PruningQueries,
):
    """The farm's memory in one database. Safe for several processes; one thread per instance."""

    # Records

    def save_record(self, record: Record, *, replace: bool = False) -> bool:
        """Keep a verified record where it beats the one that is there, or with `replace` in any case.

        Returns whether it is kept. A candidate's record with evidence gives way to none of the same candidate without:
        the lower time is luck. `replace` is for a winner that was measured again and came out slower than one trial.
        """
        table = schema.records
        key = (
            (table.c.workload == record.workload)
            & (table.c.board_type == record.board_type)
            & (table.c.operating_point == record.operating_point)
            & (table.c.simulated == record.simulated)
        )
        with self._writing() as connection:
            query = sa.select(table).where(key, schema.is_sound(table.c.median_s))
            known = connection.execute(query).mappings().first()
            if known is not None and not replace:
                lucky = known["candidate"] == record.candidate and known["evidence"] and not record.evidence
                if lucky or known["median_s"] <= record.median_s:
                    return False
            connection.execute(table.delete().where(key))
            connection.execute(
                table.insert().values(
                    workload=record.workload,
                    board_type=record.board_type,
                    operating_point=record.operating_point,
                    simulated=record.simulated,
                    candidate=record.candidate,
                    median_s=record.median_s,
                    max_abs_error=record.max_abs_error,
                    max_rel_error=record.max_rel_error,
                    trace_json=record.trace_json,
                    verified_at=self._wall_clock(),
                    evidence=None if record.evidence is None else dict(record.evidence),
                    origin=None if record.origin is None else dict(record.origin),
                )
            )
        return True

    def fetch_records(
        self,
        *,
        workloads: Sequence[str] | None = None,
        board_type: str | None = None,
        operating_point: str | None = None,
        simulated: bool | None = False,
    ) -> list[Record]:
        """Records, by board type and falling FLOP. `simulated` None asks for both kinds."""
        table, about = schema.records, schema.workloads
        query = sa.select(table, about.c.name, about.c.flop, about.c.pipeline).join(
            about, about.c.hash == table.c.workload
        )
        query = query.where(schema.is_sound(table.c.median_s))
        if workloads is not None:
            query = query.where(table.c.workload.in_(list(workloads)))
        if board_type is not None:
            query = query.where(table.c.board_type == board_type)
        if operating_point is not None:
            query = query.where(table.c.operating_point == operating_point)
        if simulated is not None:
            query = query.where(table.c.simulated == simulated)
        rows = self._rows(query.order_by(table.c.board_type, about.c.flop.desc(), about.c.name))
        return [
            Record(
                **{key: value for key, value in row.items() if key != "name"},
                workload_name=row["name"],
            )
            for row in rows
        ]

    # Events

    def add_event(self, kind: str, subject: str, message: str) -> None:
        """Append one line to the log of what happened."""
        with self._writing() as connection:
            connection.execute(
                schema.events.insert().values(at=self._wall_clock(), kind=kind, subject=subject, message=message)
            )

    def fetch_events(self, subject: str | None = None) -> list[dict[str, Any]]:
        """All events, oldest first, or those of one subject: a board's key, a campaign's name."""
        query = sa.select(schema.events).order_by(schema.events.c.id)
        return self._rows(query if subject is None else query.where(schema.events.c.subject == subject))
