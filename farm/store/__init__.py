"""The store: schema, migrations and queries over SQLite. Meaning lives with the callers; SQL lives here alone."""

from farm.store.leases import LEASE_TTL_S, PROBE, WORK
from farm.store.standing import parse_transport
from farm.store.store import Store

__all__ = ["LEASE_TTL_S", "PROBE", "WORK", "Store", "parse_transport"]
