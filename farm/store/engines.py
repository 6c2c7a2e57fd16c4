"""Engines of several hosts on one store: which engine has a campaign, and which engines are alive.

On one machine a lock and the process table are more precise; see `farm.campaign.engine.control`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from farm.store import schema
from farm.store.campaigns import (
    ENDED_BY_FAULT,
    KILLED,
    RUN,
    CampaignQueries,
    find_open,
    list_open,
    set_state,
    update_fleet,
)
from farm.values import CampaignState, FleetCampaign

# As long as a lease: a dead engine has lost its boards by then, too.
ENGINE_TTL_S = 60.0


class EngineQueries(CampaignQueries):
    """Queries on `engines` and the engines of campaigns."""

    def take_campaign(self, campaign: int, engine: Mapping[str, Any]) -> bool:
        """Assign a submitted campaign to an engine; only one of several gets it. Returns False for the others."""
        with self._writing() as connection:
            found = find_open(connection, campaign)
            if found is None or found.state is not CampaignState.SUBMITTED or found.wanted != RUN:
                return False
            if found.engine is not None and dict(found.engine) != dict(engine):
                return False
            update_fleet(connection, campaign, engine=dict(engine))
        self._taken.add(campaign)
        return True

    def take_back_campaigns(self, engine: Mapping[str, Any]) -> list[str]:
        """Submit to `engine` again what it had before a fault of the store; return the names.

        Includes campaigns that others marked as killed meanwhile, and excludes those of another engine by now. Paused
        ones stay paused, without an engine.
        """
        names = []
        with self._writing() as connection:
            for each in list_open(connection):
                kept = each.engine == dict(engine)
                lost = each.id in self._taken and each.engine is None and _was_left(each)
                if kept and each.state is CampaignState.PAUSED:
                    update_fleet(connection, each.id, engine=None)
                elif kept or lost:
                    update_fleet(connection, each.id, engine=dict(engine), reason="its engine begins anew with it")
                    set_state(connection, each.id, CampaignState.SUBMITTED, None)
                    names.append(each.name)
        return names

    def fetch_left_campaigns(self, is_gone: Callable[[Mapping[str, Any]], bool]) -> list[str]:
        """Names of open campaigns whose engine was killed or failed, whether marked or not."""
        return [
            each.name
            for each in self.fetch_fleet_campaigns(over=False)
            if each.wanted == RUN and (is_gone(each.engine) if each.engine else _was_left(each))
        ]

    def note_engine(self, engine: Mapping[str, Any], ttl_s: float = ENGINE_TTL_S) -> None:
        """Record that an engine is alive for `ttl_s`."""
        table = schema.engines
        with self._writing() as connection:
            now = self._clock()
            connection.execute(table.delete().where((table.c.clock != now.clock) | (table.c.expires_s <= now.seconds)))
            values = {"clock": now.clock, "expires_s": now.seconds + ttl_s}
            insert = self._database.insert(table).values(name=name_engine(engine), **values)
            connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_=values))

    def forget_engine(self, engine: Mapping[str, Any]) -> None:
        table = schema.engines
        with self._writing() as connection:
            connection.execute(table.delete().where(table.c.name == name_engine(engine)))

    def fetch_living_engines(self) -> frozenset[str]:
        """The engines that are alive, as named by `name_engine`."""
        rows, now = self._rows(schema.engines.select()), self._clock()
        return frozenset(row["name"] for row in rows if row["clock"] == now.clock and row["expires_s"] > now.seconds)


def _was_left(campaign: FleetCampaign) -> bool:
    """Whether a campaign's engine was killed, or ended by a fault of its host or store: another may continue."""
    return campaign.state is CampaignState.INTERRUPTED and campaign.reason.startswith((KILLED, ENDED_BY_FAULT))


def name_engine(engine: Mapping[str, Any]) -> str:
    """An engine's identity as text."""
    return json.dumps(dict(engine), sort_keys=True)
