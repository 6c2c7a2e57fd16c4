"""The store on SQLite or PostgreSQL: schema and queries. All SQL is here; callers give it meaning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from farm.closing import Closing
from farm.settings import StoreLocation
from farm.store.boards import Boards
from farm.store.campaigns import Campaigns
from farm.store.events import Events
from farm.store.golden_samples import GoldenSamples
from farm.store.imports import Imports
from farm.store.leases import LEASE_TTL_S, PROBE, WORK, Leases
from farm.store.pruning import Pruning
from farm.store.queue import RequestQueue
from farm.store.records import Decisions, StoredRecords
from farm.store.results import Results
from farm.store.routes import Engines, Routes
from farm.store.session import StoreSession
from farm.store.standing import parse_transport
from farm.store.sweeps import Sweeps
from farm.store.totals import Totals
from farm.store.trials import Trials
from farm.store.workloads import Workloads

__all__ = ["LEASE_TTL_S", "PROBE", "WORK", "Store", "parse_transport"]


class Store(Closing):
    """The farm's memory in one database. Safe for several processes; one thread per instance.

    `store.boards.require(name)`: each part has the queries on its tables. Methods take and return the farm's own
    values. Each write is one transaction, but `together`.
    """

    def __init__(self, opened: StoreLocation | StoreSession) -> None:
        """Open the store at a location as `StoreSession` does, or use an open session, which `close` closes."""
        self.session = db = opened if isinstance(opened, StoreSession) else StoreSession(opened)
        self.location = db.location
        self.boards, self.golden, self.routes = Boards(db), GoldenSamples(db), Routes(db)
        self.queue = RequestQueue(db)
        self.leases = Leases(db, self.boards, self.queue)
        self.workloads, self.engines = Workloads(db), Engines(db)
        self.campaigns = Campaigns(db, self.workloads)
        self.trials, self.totals = Trials(db), Totals(db)
        self.records, self.decisions = StoredRecords(db), Decisions(db)
        self.imports = Imports(db, self.workloads, self.trials, self.records)
        self.sweeps, self.results = Sweeps(db), Results(db)
        self.events, self.pruning = Events(db), Pruning(db)

    @contextlib.contextmanager
    def together(self, durably: bool = False) -> Iterator[None]:
        """Make the writes of a block one transaction. Keep it short: others wait for their turn to write."""
        with self.session.writing(durably):
            yield

    def close(self) -> None:
        self.session.close()
