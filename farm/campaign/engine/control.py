"""What operators want of campaigns: pause, resume, cancel, another budget. All of it goes through the store, where the
engine finds it; what needs no engine is noted here.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from farm import settings as farm_settings
from farm.campaign.engine import progress
from farm.campaign.engine.state import engine_lock, find_engine, is_held, read_last_words
from farm.campaign.scheduler.values import Budget
from farm.errors import StoreFaultError, TransientError, UnavailableError, UsageError
from farm.processes.machine import find_engines_gone, is_gone, is_here
from farm.settings import Settings
from farm.store import Store
from farm.values import CampaignState, FleetCampaign

# A failover of PostgreSQL takes minutes. After that, the engine of another host may reach the store where this cannot.
STORE_PATIENCE_S = 900.0
# A run of this length shows that the store works: the next fault has the whole patience again.
_HEALTHY_S = 60.0
_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


def run_through_outages(
    run: Callable[[], None],
    store: Store,
    me: Mapping[str, Any],
    stopping: Callable[[], bool],
    patience_s: float = STORE_PATIENCE_S,
) -> None:
    """Call `run`, and again after each fault of the store, once the store answers; `me` gets its campaigns back.

    Raises what `run` raises, and StoreFaultError where the store fails for `patience_s` or `stopping` says so.
    """
    deadline = 0.0
    while True:
        began = time.monotonic()
        try:
            run()
        except StoreFaultError as error:
            now = time.monotonic()
            if not deadline or now - began > _HEALTHY_S:
                deadline = now + patience_s
            _log.warning("the store failed; waiting up to %.0f s for it: %s", deadline - now, error.message)
            _await_store(error, store, me, stopping, deadline)
        else:
            return


def _await_store(
    fault: StoreFaultError, store: Store, me: Mapping[str, Any], stopping: Callable[[], bool], deadline: float
) -> None:
    """Wait until the store has given `me` its campaigns back. Raises `fault` after `deadline`, or when stopping."""
    while True:
        if stopping() or time.monotonic() > deadline:
            raise fault
        time.sleep(_PAUSE_S)
        try:
            names = store.take_back_campaigns(me)
        except (TransientError, UnavailableError) as error:
            _log.info("the store still fails: %s", error.message)
        else:
            _log.info("the store works again; campaigns go on: %s", ", ".join(names) or "none")
            return


RUN, PAUSE, CANCEL = "run", "pause", "cancel"
# Within this an engine has noted what it was told: it looks into the store several times a second, and boards may end
# what they measure after that.
HEARD_TIMEOUT_S = 4.0
_LOOK_S = 0.1


def needs_engine(campaign: FleetCampaign) -> bool:
    """Whether an engine has something to do for a campaign. An interrupted one waits to be resumed."""
    if campaign.over or campaign.state is CampaignState.INTERRUPTED:
        return False
    return campaign.wanted != PAUSE or campaign.state not in (CampaignState.PAUSED, CampaignState.SUBMITTED)


def close_abandoned(store: Store, me: Mapping[str, Any] | None = None) -> list[str]:
    """Note as interrupted what engines that were killed have left; returns the campaigns' names.

    One is known to be gone that was of this machine, or of another host name and does not hold the engine's lock: that
    may have been this machine before it was renamed. For the engine itself, which holds the lock, `me` names it, and
    what is not its own is nobody's.
    In a store that hosts share it is one whose process was here and is gone, or that gave no sign of life for long.
    Their counts are brought up to the trials that were written. To be called before campaigns are shown or changed.
    """
    home = farm_settings.load().home_path if isinstance(store.location, str) else store.location.parent

    are_gone = find_engines_gone(store)

    def is_abandoned(engine: Mapping[str, Any]) -> bool:
        if isinstance(store.location, str):  # engines of several hosts and homes
            return engine != me and are_gone(engine)
        if me is not None:
            return engine != me
        # Asked after the campaign was read: whoever wrote itself there had the lock before.
        return is_gone(engine) or (not is_here(engine) and not is_held(home))

    names = store.interrupt_campaigns(is_abandoned, lambda engine: read_last_words(home, engine))
    for name in names:
        recount_campaign(store, name)
    return names


def is_anothers(store: Store, campaign: FleetCampaign, me: Mapping[str, Any]) -> bool:
    """Whether an engine other than `me` carries out a campaign: only a store that hosts share has several."""
    return isinstance(store.location, str) and campaign.engine is not None and campaign.engine != me


def recount_campaign(store: Store, name: str) -> None:
    """Bring the counts of a campaign that nobody carries out up to the trials that were written."""
    campaign = store.fetch_fleet_campaign(name)
    store.save_progress(campaign.id, progress.recount(store, campaign))


def pause(settings: Settings, store: Store, name: str, by: str) -> FleetCampaign:
    """Stop a campaign for now; returns it as it is then, or as it is after `HEARD_TIMEOUT_S`.

    Raises UsageError where there is none of this name, or nothing of it is under way.
    """
    close_abandoned(store)
    store.want_campaign(name, PAUSE, by)
    return _wait_heard(settings, store, name, CampaignState.PAUSED, f"paused by {by}")


def cancel(settings: Settings, store: Store, name: str, by: str) -> FleetCampaign:
    """End a campaign for good; its trials stay. Returns and raises as `pause` does."""
    close_abandoned(store)
    store.want_campaign(name, CANCEL, by)
    return _wait_heard(settings, store, name, CampaignState.CANCELLED, f"cancelled by {by}")


def resume(store: Store, name: str, by: str) -> FleetCampaign:
    """Let a campaign go on that was paused or interrupted. An engine has to run then (`client.ensure_engine`).

    Raises UsageError where there is none of this name, or it is over.
    """
    close_abandoned(store)
    campaign = store.want_campaign(name, RUN, by)
    if campaign.state is CampaignState.PAUSED and not campaign.engine:
        store.note_campaign(campaign.id, CampaignState.SUBMITTED, "waits for an engine")
    return store.fetch_fleet_campaign(name)


def change_budget(store: Store, name: str, changes: Mapping[str, Any], by: str) -> Budget:
    """Change limits of a campaign that is not over: fields of `Budget`, None for no limit; others stay as they are.

    Raises UsageError for a limit of nothing, where no limit would be left, and once the search is over.
    """
    campaign = store.fetch_fleet_campaign(name)
    if campaign.state is CampaignState.VERIFYING:
        raise UsageError(
            f"the search of campaign {name} is over ({campaign.reason}): its winners are being measured",
            f"`farm campaign clone {name} NEW-NAME` goes on from all that it has measured.",
        )
    budget = Budget(**{**campaign.budget, **changes})
    if budget == Budget():
        raise UsageError("a budget needs a limit", "Leave one of trials, wall clock, board-hours or per workload.")
    store.change_budget(name, dataclasses.asdict(budget), by)
    return budget


def _wait_heard(settings: Settings, store: Store, name: str, state: CampaignState, reason: str) -> FleetCampaign:
    """Wait until the engine has done as it was told. Where there is none, note it."""
    deadline = time.monotonic() + HEARD_TIMEOUT_S
    while True:
        campaign = store.fetch_fleet_campaign(name)
        if campaign.over or campaign.state is state or time.monotonic() > deadline:
            return campaign
        if campaign.state is CampaignState.PAUSED and not campaign.engine:
            store.note_campaign(campaign.id, state, reason)
        elif campaign.engine is not None and not is_here(campaign.engine):
            pass  # another host's engine hears of it in the store
        elif find_engine(settings.home_path) is None:
            try:
                # So that no engine begins with it meanwhile.
                with engine_lock(settings.home_path):
                    store.note_campaign(campaign.id, state, reason)
                continue
            except UnavailableError:
                pass  # one is just starting, or just ending
        time.sleep(_LOOK_S)
