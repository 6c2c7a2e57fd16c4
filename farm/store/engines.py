"""Engines of several hosts on one store: which of them are alive. `Campaigns.take` gives one a campaign.

On one machine a lock and the process table are more precise; see `farm.campaign.engine.control`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from farm.store import schema
from farm.store.session import StorePart

# As long as a lease: a dead engine has lost its boards by then, too.
ENGINE_TTL_S = 60.0


class Engines(StorePart):
    """Queries on `engines`: which are alive."""

    def note(self, engine: Mapping[str, Any], ttl_s: float = ENGINE_TTL_S) -> None:
        """Record that an engine is alive for `ttl_s`."""
        table = schema.engines
        with self._db.writing() as connection:
            now = self._db.clock()
            connection.execute(table.delete().where(now.find_lapsed(table)))
            self._db.replace(connection, table, {"name": name_engine(engine), **now.claim(ttl_s)})

    def forget(self, engine: Mapping[str, Any]) -> None:
        table = schema.engines
        with self._db.writing() as connection:
            connection.execute(table.delete().where(table.c.name == name_engine(engine)))

    def fetch_living(self) -> frozenset[str]:
        """The engines that are alive, as named by `name_engine`."""
        rows, now = self._db.rows(schema.engines.select()), self._db.clock()
        return frozenset(row["name"] for row in rows if now.is_valid(row))


def name_engine(engine: Mapping[str, Any]) -> str:
    """An engine's identity as text."""
    return json.dumps(dict(engine), sort_keys=True)
