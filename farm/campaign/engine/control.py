"""Campaigns and their engine from a command: pause, resume, cancel, change budgets, start an engine, follow a campaign.

Requests go through the store, where the engine finds them. Those that need no engine are executed here.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from farm import settings as farm_settings
from farm.campaign.engine import progress
from farm.campaign.engine.state import ENGINE, read_last_words
from farm.closing import Closing
from farm.errors import (
    DeadlineError,
    FarmError,
    PermanentError,
    StoreFaultError,
    TransientError,
    UnavailableError,
    UsageError,
)
from farm.processes.home_process import run_logged
from farm.processes.machine import find_engines_gone, is_gone, is_here, name_coordinator
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
# An engine notes a request within this: it reads the store several times a second, and boards finish what they measure
# first.
HEARD_TIMEOUT_S = 4.0
_LOOK_S = 0.1
# The engine's argument: a campaign for its own machine is about to be submitted.
FOR_HOST = "--for-host"
_STDIN = 0
_FOLLOW_S = 0.2
# An engine that was asked for has the lock well within this (`ensure_engine` has waited for it).
_ENGINE_GRACE_S = 10.0
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
    return _end(settings, store, name, PAUSE, CampaignState.PAUSED, by)


def cancel(settings: Settings, store: Store, name: str, by: str) -> FleetCampaign:
    """End a campaign for good; its trials stay. Returns and raises as `pause` does."""
    return _end(settings, store, name, CANCEL, CampaignState.CANCELLED, by)


def resume(store: Store, name: str, by: str) -> FleetCampaign:
    """Resume a paused or interrupted campaign. The caller starts an engine (`ensure_engine`).

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


def _end(settings: Settings, store: Store, name: str, wanted: str, state: CampaignState, by: str) -> FleetCampaign:
    """Order an end and wait until the engine has obeyed. Where there is none, write the new state."""
    close_abandoned(store)
    store.campaigns.want(name, wanted, by)
    deadline, reason = time.monotonic() + HEARD_TIMEOUT_S, f"{state} by {by}"
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


def ensure_engine(settings: Settings, process: subprocess.Popen[bytes] | None = None) -> None:
    """Make sure that an engine executes what the store holds by now; start one if need be, without waiting for its end.

    `process` is an engine that was started already. Raises UnavailableError where none can run, DeadlineError.
    """
    home = settings.home_path
    # One that ended by itself has looked, and nothing was left to do.
    ENGINE.ensure(
        home,
        lambda code: True if code == 0 or ENGINE.find(home) else None,
        lambda: ENGINE.start(home),
        process,
        again=[ENGINE.refused],
    )


class EnginePrestart(Closing):
    """An engine that a command starts early for what it will submit; it ends with the block if that is nothing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, for_host: bool = False) -> None:
        """Start an engine, unless one runs; with `for_host` it prepares this machine as a board at once."""
        home = self._settings.home_path
        if not ENGINE.is_held(home):
            self.process = ENGINE.start(home, *([FOR_HOST] if for_host else []), stdin=subprocess.PIPE)

    def ensure(self) -> None:
        """Make sure that an engine executes the store's orders. Raises what `ensure_engine` raises."""
        ensure_engine(self._settings, self.process)
        self.close()

    def close(self) -> None:
        """Let the engine end once the store has no work for it."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()


def is_expected() -> bool:
    """Whether the command that started this engine is still about to submit a campaign. Does not wait."""
    try:
        if not stat.S_ISFIFO(os.fstat(_STDIN).st_mode):
            return False
    except OSError:  # closed
        return False
    # The command never writes: a readable pipe is its end.
    return not select.select([_STDIN], [], [], 0)[0]


def take_over(names: Collection[str]) -> int:
    """Resume those of the campaigns that have no engine, and start one. Returns the exit code of a process."""
    return run_logged("take-over", lambda settings: _take_over(settings, names))


def _take_over(settings: Settings, names: Collection[str]) -> None:
    with Store(settings.store_location) as store:
        left = [name for name in store.campaigns.fetch_left(find_engines_gone(store)) if name in names]
        for name in left:
            try:
                resume(store, name, f"{name_coordinator()}, which takes over")
            except UsageError as error:  # cancelled meanwhile
                _log.info("%s: %s", name, error)
    if left:
        ensure_engine(settings)


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
    """Wait until a campaign is over, paused or interrupted; return it. `on_progress` gets it several times a second.

    Raises UsageError where there is none of this name, DeadlineError after `timeout_s`.
    """
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    gone_since: float | None = None
    failing_since: float | None = None
    while True:
        now = time.monotonic()
        try:
            campaign = store.campaigns.require(name)
            if campaign.engine is not None and not ENGINE.is_held(settings.home_path):
                close_abandoned(store)
                campaign = store.campaigns.require(name)
        except StoreFaultError:
            failing_since = failing_since or now
            if now - failing_since > STORE_PATIENCE_S:
                raise
            time.sleep(_FOLLOW_S)
            continue
        failing_since = None
        on_progress(campaign)
        if is_settled(campaign):
            return campaign
        if now > deadline:
            raise DeadlineError(f"campaign {name} was still {campaign.state} after {timeout_s:g} s")
        if ENGINE.is_held(settings.home_path) or (campaign.engine is not None and not is_here(campaign.engine)):
            gone_since = None
        elif gone_since is None:
            gone_since = now
        elif now - gone_since > _ENGINE_GRACE_S:
            # Submitted to an engine that was killed before it looked: no engine will take it.
            reason = f"its engine ended{ENGINE.explain(settings.home_path)}"
            store.campaigns.note(campaign.id, CampaignState.INTERRUPTED, reason)
        time.sleep(_FOLLOW_S)


def find_error(campaign: FleetCampaign) -> FarmError | None:
    """Return the error of a campaign that has ended; None where it is finished with a good trial, or had no task."""
    told = f"campaign {campaign.name} is {campaign.state}" + (f": {campaign.reason}" if campaign.reason else "")
    if campaign.state is CampaignState.FINISHED:
        progress = campaign.progress or {}
        tried = progress.get("counted") or any(progress.get("faults", {}).values())
        if progress.get("tasks") and not tried:
            return PermanentError(
                f"no trial was made by campaign {campaign.name}" + (f": {campaign.reason}" if campaign.reason else ""),
                "Give it a larger budget; `farm campaign run --dry-run` says what a trial costs.",
            )
        if not progress.get("counted") or any(task["best_s"] is not None for task in progress["tasks"]):
            return None
        return PermanentError(f"all trials of campaign {campaign.name} failed", "Its report says how.")
    if campaign.over:
        return PermanentError(told, "Its trials are kept, and help later campaigns.")
    return UnavailableError(told, f"`farm campaign resume {campaign.name}` goes on with it.")
