"""Pause, resume and cancel campaigns, change their budgets.

Requests go through the store, where the engine finds them. Those that need no engine are executed here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from farm import settings as farm_settings
from farm.campaign.engine import progress
from farm.campaign.engine.state import ENGINE, read_last_words
from farm.errors import StoreFaultError, TransientError, UnavailableError, UsageError
from farm.processes.machine import find_engines_gone, is_gone, is_here
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, FleetCampaign
from farm.types.states import CampaignState

# A failover of PostgreSQL takes minutes. After that, another host's engine may reach the store where this one cannot.
STORE_PATIENCE_S = 900.0
# A run of this length shows that the store works: the next fault has the full patience again.
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
    """Wait until the store has returned its campaigns to `me`. Raises `fault` after `deadline`, or when stopping."""
    while True:
        if stopping() or time.monotonic() > deadline:
            raise fault
        time.sleep(_PAUSE_S)
        try:
            names = store.campaigns.take_back(me)
        except (TransientError, UnavailableError) as error:
            _log.info("the store still fails: %s", error.message)
        else:
            _log.info("the store works again; campaigns go on: %s", ", ".join(names) or "none")
            return


RUN, PAUSE, CANCEL = "run", "pause", "cancel"
# An engine notes a request within this: it reads the store several times a second, and boards finish what they measure
# first.
HEARD_TIMEOUT_S = 4.0
_LOOK_S = 0.1


def needs_engine(campaign: FleetCampaign) -> bool:
    """Whether an engine has work for a campaign. An interrupted one waits to be resumed."""
    if campaign.over or campaign.state is CampaignState.INTERRUPTED:
        return False
    return campaign.wanted != PAUSE or campaign.state not in (CampaignState.PAUSED, CampaignState.SUBMITTED)


def close_abandoned(store: Store, me: Mapping[str, Any] | None = None) -> list[str]:
    """Mark campaigns of killed engines as interrupted; return their names. Call it before campaigns are shown or
    changed.

    An engine is gone if its process was on this machine and ended, or if it has another host name and does not hold the
    engine's lock: this machine may have been renamed. The engine itself passes `me`, as it holds the lock. In a store
    that hosts share, an engine is also gone after a long time without a heartbeat. A campaign that no engine took in
    time is marked too. Counts of the campaigns are brought up to their trials.
    """
    home = farm_settings.load().home_path if isinstance(store.location, str) else store.location.parent

    are_gone = find_engines_gone(store)

    def is_abandoned(engine: Mapping[str, Any]) -> bool:
        if isinstance(store.location, str):  # engines of several hosts and homes
            return engine != me and are_gone(engine)
        if me is not None:
            return engine != me
        # The lock is read after the campaign: an engine that wrote itself there held the lock before.
        return is_gone(engine) or (not is_here(engine) and not ENGINE.is_held(home))

    names = store.campaigns.interrupt(is_abandoned, lambda engine: read_last_words(home, engine))
    if me is None and not ENGINE.is_held(home) and not store.engines.fetch_living():
        names += store.campaigns.interrupt_untaken()
    for name in names:
        recount_campaign(store, name)
    return names


def is_anothers(store: Store, campaign: FleetCampaign, me: Mapping[str, Any]) -> bool:
    """Whether an engine other than `me` runs a campaign: only in a store that hosts share."""
    return isinstance(store.location, str) and campaign.engine is not None and campaign.engine != me


def recount_campaign(store: Store, name: str) -> None:
    """Bring the counts of a campaign without an engine up to its trials."""
    campaign = store.campaigns.require(name)
    store.campaigns.save_progress(campaign.id, progress.recount(store, campaign))


def pause(settings: Settings, store: Store, name: str, by: str) -> FleetCampaign:
    """Pause a campaign; return its row once the engine has obeyed, or after `HEARD_TIMEOUT_S`.

    Raises UsageError where there is none of this name, or it is not running.
    """
    close_abandoned(store)
    store.campaigns.want(name, PAUSE, by)
    return _wait_heard(settings, store, name, CampaignState.PAUSED, f"paused by {by}")


def cancel(settings: Settings, store: Store, name: str, by: str) -> FleetCampaign:
    """End a campaign for good; its trials stay. Returns and raises as `pause` does."""
    close_abandoned(store)
    store.campaigns.want(name, CANCEL, by)
    return _wait_heard(settings, store, name, CampaignState.CANCELLED, f"cancelled by {by}")


def resume(store: Store, name: str, by: str) -> FleetCampaign:
    """Resume a paused or interrupted campaign. The caller starts an engine (`client.ensure_engine`).

    Raises UsageError where there is none of this name, or it is over.
    """
    close_abandoned(store)
    campaign = store.campaigns.want(name, RUN, by)
    if campaign.state is CampaignState.PAUSED and not campaign.engine:
        store.campaigns.note(campaign.id, CampaignState.SUBMITTED, "waits for an engine")
    return store.campaigns.require(name)


def change_budget(store: Store, name: str, changes: Mapping[str, Any], by: str) -> Budget:
    """Change limits of a campaign that is not over: fields of `Budget`, None for no limit; others stay as they are.

    Raises UsageError for a limit of nothing, where no limit would be left, and once the search is over.
    """
    campaign = store.campaigns.require(name)
    if campaign.state is CampaignState.VERIFYING:
        raise UsageError(
            f"the search of campaign {name} is over ({campaign.reason}): its winners are being measured",
            f"`farm campaign run --from {name} --name NEW` goes on from all that it has measured.",
        )
    budget = campaign.budget.change(changes)
    if budget == Budget():
        raise UsageError("a budget needs a limit", "Leave one of trials, wall clock, board-hours or per workload.")
    store.campaigns.change_budget(name, budget, by)
    return budget


def _wait_heard(settings: Settings, store: Store, name: str, state: CampaignState, reason: str) -> FleetCampaign:
    """Wait until the engine has obeyed. Where there is none, write the new state."""
    deadline = time.monotonic() + HEARD_TIMEOUT_S
    while True:
        campaign = store.campaigns.require(name)
        if campaign.over or campaign.state is state or time.monotonic() > deadline:
            return campaign
        if campaign.state is CampaignState.PAUSED and not campaign.engine:
            store.campaigns.note(campaign.id, state, reason)
        elif campaign.engine is not None and not is_here(campaign.engine):
            pass  # another host's engine reads it from the store
        elif ENGINE.find(settings.home_path) is None:
            try:
                # So that no engine begins with it meanwhile.
                with ENGINE.hold(settings.home_path):
                    store.campaigns.note(campaign.id, state, reason)
                continue
            except UnavailableError:
                pass  # one is just starting, or just ending
        time.sleep(_LOOK_S)
