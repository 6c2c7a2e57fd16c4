"""Engines of several hosts on one store: who takes a campaign, and which of them are there still.

On one machine a lock and the process table say that better; see `farm.campaign.engine.control`.
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

# As long as a lease: whoever is believed dead has lost its boards by then, too.
ENGINE_TTL_S = 60.0


class EngineQueries(CampaignQueries):
    """Queries on `engines`, and on whose campaigns are."""

    def take_campaign(self, campaign: int, engine: Mapping[str, Any]) -> bool:
        """Give a submitted campaign to an engine; of several that ask at once one gets it. False for the others."""
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
        """Submit anew to `engine` what it carried out before a fault of the store; returns the names.

        That includes what others noted as killed meanwhile, and excludes what another engine has by now. What was
        paused stays so, with no engine.
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
        """The names of campaigns that are to go on and whose engine was killed or failed, noted yet or not."""
        return [
            each.name
            for each in self.fetch_fleet_campaigns(over=False)
            if each.wanted == RUN and (is_gone(each.engine) if each.engine else _was_left(each))
        ]

    def note_engine(self, engine: Mapping[str, Any], ttl_s: float = ENGINE_TTL_S) -> None:
        """Note that an engine is there, and is believed to be for `ttl_s`."""
        table = schema.engines
        with self._writing() as connection:
            now = self._clock()
            connection.execute(table.delete().where((table.c.clock != now.clock) | (table.c.expires_s <= now.seconds)))
            values = {"clock": now.clock, "expires_s": now.seconds + ttl_s}
            insert = self._database.insert(table).values(name=name_engine(engine), **values)
            connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_=values))

    def forget_engine(self, engine: Mapping[str, Any]) -> None:
        """Note that an engine has ended."""
        table = schema.engines
        with self._writing() as connection:
            connection.execute(table.delete().where(table.c.name == name_engine(engine)))

    def fetch_living_engines(self) -> frozenset[str]:
        """The engines that noted themselves in time, as `name_engine` has them."""
        rows, now = self._rows(schema.engines.select()), self._clock()
        return frozenset(row["name"] for row in rows if row["clock"] == now.clock and row["expires_s"] > now.seconds)


def _was_left(campaign: FleetCampaign) -> bool:
    """Whether a campaign's engine was killed, or ended by a fault of its host or store: another may go on."""
    return campaign.state is CampaignState.INTERRUPTED and campaign.reason.startswith((KILLED, ENDED_BY_FAULT))


def name_engine(engine: Mapping[str, Any]) -> str:
    """An engine's identity as one text."""
    return json.dumps(dict(engine), sort_keys=True)
