"""The engine's process: lock, log, signals, end. `engine.run_engine` does the work.

It ends by itself when no campaign needs it any more.
"""

from __future__ import annotations

import functools
import logging
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from farm.campaign.engine import engine
from farm.campaign.engine.control import (
    RUN,
    close_abandoned,
    is_anothers,
    is_expected,
    needs_engine,
    recount_campaign,
    run_through_outages,
)
from farm.campaign.engine.state import ENGINE, beating, leave_last_words
from farm.errors import FarmError, TransientError, UnavailableError
from farm.processes.machine import process_identity
from farm.settings import Settings
from farm.store import Store
from farm.store.campaign_rows import ENDED_BY_FAULT
from farm.store.routes import name_engine
from farm.types.states import CampaignState

Run = Callable[[Settings, Store, Callable[[], bool], Callable[[str], None]], None]

# A run that fails at once this often has met an error that it takes for no end.
_MAX_EMPTY_RUNS = 5
_EMPTY_S = 1.0
_STOPPED = "its engine was ended by a signal"

_log = logging.getLogger(__name__)


def main(for_host: bool = False) -> int:
    """Be the engine until there is nothing left to do, or until a signal. Returns the exit code.

    `for_host`: see `engine.run_engine`.
    """

    def work(settings: Settings) -> None:
        with Store(settings.store_location) as store:
            serve(settings, store, functools.partial(engine.run_engine, for_host=for_host))

    return ENGINE.main(work)


def serve(settings: Settings, store: Store, run: Run) -> None:
    """Execute campaigns with `run` until none needs it any more, or a signal arrives.

    Waits out faults of the store (`control`). At the end, open campaigns of this process are marked as interrupted.
    Raises what `run` raises.
    """
    with beating(store.location, process_identity()):
        _serve(settings, store, run)


def _serve(settings: Settings, store: Store, run: Run) -> None:
    stop = StopSignal()
    home, me = settings.home_path, process_identity()
    for name in close_abandoned(store, me):
        _log.warning("campaign %s was left by an engine that is gone", name, extra={"campaign": name})
    reason, empty = "", 0

    def carry_out() -> None:
        nonlocal empty
        while not stop.arrived and empty < _MAX_EMPTY_RUNS:
            ENGINE.publish(home)
            # Campaigns that were resumed while their engine was dropping them as paused.
            for campaign in store.campaigns.fetch(over=False):
                if campaign.state is CampaignState.PAUSED and campaign.wanted == RUN:
                    store.campaigns.note(campaign.id, CampaignState.SUBMITTED, "waits for an engine")
            if _is_needed(store, me):
                began = time.monotonic()
                run(settings, store, lambda: stop.arrived, lambda text: _log.info("%s", text))
                empty = empty + 1 if time.monotonic() - began < _EMPTY_S else 0
            ENGINE.withdraw(home)
            # What was ordered before a command saw the file go is in the store by now.
            if not _is_needed(store, me):
                break

    try:
        run_through_outages(carry_out, store, me, lambda: stop.arrived)
        if stop.arrived:
            reason = _STOPPED
        elif empty == _MAX_EMPTY_RUNS:
            reason = "its engine could not begin with it; the log of the engine may say why"
    except FarmError as error:
        reason = _STOPPED if stop.arrived else explain_end(error)
        raise
    except BaseException as error:
        reason = f"its engine ended with {type(error).__name__}: {error}"
        _log.exception("ending")
        raise
    finally:
        _log.info("ending")
        try:
            _leave(store, me, reason)
        except FarmError as error:  # a full store refuses this too; the first error is the one to report
            leave_last_words(home, reason or error.message)


def explain_end(error: FarmError) -> str:
    """Return why a campaign is interrupted, given the engine's error. After a fault another engine may resume it."""
    is_fault = isinstance(error, (TransientError, UnavailableError))
    return ENDED_BY_FAULT + error.message if is_fault else error.message


class StopSignal:
    """Whether a signal asked for the end. A plain flag: a handler may interrupt anything, locks included."""

    def __init__(self) -> None:
        self.arrived = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._hear)

    def _hear(self, *_: object) -> None:
        self.arrived = True


def _is_needed(store: Store, me: Mapping[str, Any]) -> bool:
    # In this order: a command that is done waiting has submitted by then.
    return is_expected() or any(
        needs_engine(each) and not is_anothers(store, each, me) for each in store.campaigns.fetch(over=False)
    )


def _leave(store: Store, me: Mapping[str, Any], reason: str) -> None:
    """Mark this engine's open campaigns as interrupted; with a `reason`, also those not begun: no other engine will
    take them.

    A paused campaign stays paused, with no engine.
    """
    others = store.engines.fetch_living() - {name_engine(me)}
    for campaign in store.campaigns.fetch(over=False):
        if campaign.engine == me and campaign.state is CampaignState.PAUSED:
            store.campaigns.note(campaign.id, CampaignState.PAUSED, campaign.reason, {})
        elif campaign.engine == me or (reason and not campaign.engine and needs_engine(campaign) and not others):
            store.campaigns.note(campaign.id, CampaignState.INTERRUPTED, reason or "its engine has ended")
            recount_campaign(store, campaign.name)
