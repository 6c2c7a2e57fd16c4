"""Follow a campaign from outside its engine, by polling the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from farm.campaign.engine.client import tail
from farm.campaign.engine.control import close_abandoned
from farm.campaign.engine.state import is_held
from farm.errors import DeadlineError, FarmError, InternalError, PermanentError, UnavailableError
from farm.processes.machine import is_here
from farm.settings import Settings
from farm.store import Store
from farm.values import CampaignState, FleetCampaign

_LOOK_S = 0.2
# An engine that was asked for has the lock well within this (`client.ensure_engine` has waited for it).
_ENGINE_GRACE_S = 10.0


def watch(settings: Settings, store: Store, name: str) -> Iterator[FleetCampaign]:
    """Yield the campaign several times a second, until it is settled.

    The last one is over, paused or interrupted. Raises UsageError where there is none of this name.
    """
    gone_since: float | None = None
    while True:
        campaign = store.fetch_fleet_campaign(name)
        if campaign.engine is not None and not is_held(settings.home_path):
            close_abandoned(store)
            campaign = store.fetch_fleet_campaign(name)
        yield campaign
        if is_settled(campaign):
            return
        if is_held(settings.home_path) or (campaign.engine is not None and not is_here(campaign.engine)):
            gone_since = None
        elif gone_since is None:
            gone_since = time.monotonic()
        elif time.monotonic() - gone_since > _ENGINE_GRACE_S:
            # Submitted to an engine that was killed before it looked: no engine will take it.
            store.note_campaign(campaign.id, CampaignState.INTERRUPTED, f"its engine ended{tail(settings)}")
        time.sleep(_LOOK_S)


def is_settled(campaign: FleetCampaign) -> bool:
    """Whether a campaign stays as it is until an operator acts."""
    if campaign.state is CampaignState.PAUSED:
        return campaign.wanted == "pause"
    return campaign.over or campaign.state is CampaignState.INTERRUPTED


def wait_settled(
    settings: Settings,
    store: Store,
    name: str,
    timeout_s: float | None = None,
    on_progress: Callable[[FleetCampaign], None] = lambda campaign: None,
) -> FleetCampaign:
    """Wait until a campaign is settled; return it. Raises DeadlineError after `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for campaign in watch(settings, store, name):
        on_progress(campaign)
        if is_settled(campaign):
            return campaign
        if deadline is not None and time.monotonic() > deadline:
            raise DeadlineError(f"campaign {name} was still {campaign.state} after {timeout_s:g} s")
    raise InternalError(f"the watch of campaign {name} ended before it was settled")


def find_error(campaign: FleetCampaign) -> FarmError | None:
    """Return the error of a campaign that has ended; None where it is finished with at least one good trial."""
    told = f"campaign {campaign.name} is {campaign.state}" + (f": {campaign.reason}" if campaign.reason else "")
    if campaign.state is CampaignState.FINISHED:
        progress = campaign.progress or {}
        if not progress.get("counted") or any(task["best_s"] is not None for task in progress["tasks"]):
            return None
        return PermanentError(f"all trials of campaign {campaign.name} failed", "Its report says how.")
    if campaign.over:
        return PermanentError(told, "Its trials are kept, and help later campaigns.")
    return UnavailableError(told, f"`farm campaign resume {campaign.name}` goes on with it.")
