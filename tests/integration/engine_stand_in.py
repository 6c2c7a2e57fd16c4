"""The engine's process with nothing in it: campaigns are noted as running and stay so until operators or signals come.

`python -m tests.integration.engine_stand_in`: what surrounds the engine's loop is the real thing.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable

from farm import settings as farm_settings
from farm.campaign.engine.process import serve
from farm.campaign.engine.state import ENGINE
from farm.processes.machine import process_identity
from farm.settings import Settings
from farm.store import Store
from farm.types.states import CampaignState


def run(settings: Settings, store: Store, stopping: Callable[[], bool], note: Callable[[str], None]) -> None:
    while not stopping():
        working = False
        for campaign in store.campaigns.fetch(over=False):
            if campaign.wanted == "cancel":
                store.campaigns.note(campaign.id, CampaignState.CANCELLED, "as wanted")
            elif campaign.wanted == "pause" and campaign.state is CampaignState.RUNNING:
                store.campaigns.note(campaign.id, CampaignState.PAUSED, "as wanted")
            elif campaign.wanted == "run" and campaign.state in (CampaignState.SUBMITTED, CampaignState.PAUSED):
                if campaign.state is CampaignState.PAUSED or store.campaigns.take(campaign.id, process_identity()):
                    store.campaigns.note(campaign.id, CampaignState.RUNNING, "", process_identity())
                    working = True
            elif campaign.state is CampaignState.RUNNING and campaign.engine == process_identity():
                store.campaigns.save_progress(campaign.id, {})
                working = True
        if not working:
            return
        select.select([], [], [], 0.02)


if __name__ == "__main__":
    loaded = farm_settings.load()
    with ENGINE.hold(loaded.home_path), Store(loaded.store_location) as opened:
        serve(loaded, opened, run)
    sys.exit(0)
