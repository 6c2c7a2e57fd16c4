"""The whole store: events, boards, leases, campaigns, trials, records and sweeps.

Methods take and return the farm's own values. Each write is one transaction.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from farm.store import schema
from farm.store.boards import GoldenQueries
from farm.store.campaign_metrics import CampaignMetrics, CampaignTotals, CoverageQueries
from farm.store.engines import EngineQueries
from farm.store.event_stream import AuditQueries, EventStreamQueries
from farm.store.leases import LeaseQueries
from farm.store.merging import MergingQueries
from farm.store.overview import OverviewQueries
from farm.store.pruning import PruningQueries
from farm.store.records import DecisionQueries
from farm.store.routes import RouteQueries
from farm.store.sweeps import SweepQueries
from farm.store.trials import SimilarQueries


class Store(
    LeaseQueries,
    GoldenQueries,
    SweepQueries,
    CoverageQueries,
    EngineQueries,
    SimilarQueries,
    CampaignTotals,
    CampaignMetrics,
    EventStreamQueries,
    PruningQueries,
    MergingQueries,
    DecisionQueries,
    OverviewQueries,
    RouteQueries,
    AuditQueries,
):
    """The farm's memory in one database. Safe for several processes; one thread per instance."""

    # Events

    def add_event(self, kind: str, subject: str, message: str, by: str = "") -> None:
        """Append an event; `by` is who ordered it, if a person did."""
        about = {"kind": kind, "subject": subject, "message": message, "by": by}
        with self._writing() as connection:
            connection.execute(schema.events.insert().values(at=self._wall_clock(), **about))

    def fetch_events(self, subject: str | None = None) -> list[dict[str, Any]]:
        """All events, oldest first, or those of one subject: a board's key, a campaign's name."""
        query = sa.select(schema.events).order_by(schema.events.c.id)
        return self._rows(query if subject is None else query.where(schema.events.c.subject == subject))
