"""What an engine hears of its campaigns from the store."""

from __future__ import annotations

import pathlib
from typing import Any, cast

import pytest

from farm.campaign.engine.orders import CampaignOrders
from farm.campaign.engine.roster import Roster
from farm.errors import StoreFaultError
from farm.settings import Settings
from farm.store import Store
from tests.unit.campaign_orders import make_order, submit
from tests.unit.fleet_campaigns import Hands


class NoSearches:
    def open(self, *search: Any) -> None:
        """Nothing is begun."""


@pytest.mark.parametrize("engine", [{}, {"host": "elsewhere", "pid": 1, "created": 1.0}], ids=["left", "taken"])
def test_an_engine_that_was_believed_gone_lets_go(tmp_path: pathlib.Path, engine: dict[str, Any]) -> None:
    """It carries on with no campaign that others noted as left, or that another engine has."""
    with Store(tmp_path / "farm.db") as store:
        submit(store, make_order("c"))
        searches, fleet = cast("Any", NoSearches()), Hands().state
        roster, verifying = Roster(store, cast("Any", None), fleet), cast("Any", None)
        orders = CampaignOrders(Settings(home=str(tmp_path)), store, fleet, roster, verifying, searches, lambda _: None)
        orders.poll()
        assert list(fleet.campaigns) == list(orders.active) == ["c"]
        store.campaigns.interrupt(lambda _: True)
        if engine:
            store.campaigns.want("c", "run", "op")
            assert store.campaigns.take(1, engine)
        orders._look_at = 0.0
        with pytest.raises(StoreFaultError, match="no heartbeat for too long, and lost c"):
            orders.poll()
