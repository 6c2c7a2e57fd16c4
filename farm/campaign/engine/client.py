"""The engine from a command: start it, and follow a campaign by polling the store."""

from __future__ import annotations

import logging
import os
import select
import stat
import subprocess
import time
from collections.abc import Callable, Collection

from farm.campaign.engine import control
from farm.campaign.engine.state import ENGINE
from farm.closing import Closing
from farm.errors import DeadlineError, FarmError, PermanentError, StoreFaultError, UnavailableError, UsageError
from farm.processes.home_process import run_logged
from farm.processes.machine import find_engines_gone, is_here, name_coordinator
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import FleetCampaign
from farm.types.states import CampaignState

_log = logging.getLogger(__name__)


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


# The engine's argument: a campaign for its own machine is about to be submitted.
FOR_HOST = "--for-host"

_STDIN = 0


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
                control.resume(store, name, f"{name_coordinator()}, which takes over")
            except UsageError as error:  # cancelled meanwhile
                _log.info("%s: %s", name, error)
    if left:
        ensure_engine(settings)


_FOLLOW_S = 0.2
# An engine that was asked for has the lock well within this (`client.ensure_engine` has waited for it).
_ENGINE_GRACE_S = 10.0


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
                control.close_abandoned(store)
                campaign = store.campaigns.require(name)
        except StoreFaultError:
            failing_since = failing_since or now
            if now - failing_since > control.STORE_PATIENCE_S:
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
