"""The store: schema, migrations and queries over SQLite. Meaning lives with the callers; SQL lives here alone."""

from farm.store.store import Store

__all__ = ["Store"]
