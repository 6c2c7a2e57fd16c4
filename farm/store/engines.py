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
            connection.execute(table.delete().where((table.c.clock != now.clock) | (table.c.expires_s <= now.seconds)))
            values = {"clock": now.clock, "expires_s": now.seconds + ttl_s}
            insert = self._db.database.insert(table).values(name=name_engine(engine), **values)
            connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_=values))

    def forget(self, engine: Mapping[str, Any]) -> None:
        table = schema.engines
        with self._db.writing() as connection:
            connection.execute(table.delete().where(table.c.name == name_engine(engine)))

    def fetch_living(self) -> frozenset[str]:
        """The engines that are alive, as named by `name_engine`."""
        rows, now = self._db.rows(schema.engines.select()), self._db.clock()
        return frozenset(row["name"] for row in rows if row["clock"] == now.clock and row["expires_s"] > now.seconds)


def name_engine(engine: Mapping[str, Any]) -> str:
    """An engine's identity as text."""
    return json.dumps(dict(engine), sort_keys=True)
