"""The store on SQLite or PostgreSQL: schema and queries. All SQL is here; callers give it meaning."""

from farm.store.leases import LEASE_TTL_S, PROBE, WORK
from farm.store.standing import parse_transport
from farm.store.store import Store

__all__ = ["LEASE_TTL_S", "PROBE", "WORK", "Store", "parse_transport"]
