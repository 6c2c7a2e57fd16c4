"""`farm.optimize`: one model tuned for one kind of board and packed, in one line of Python.

Boards of a fleet are tuned for by a campaign, this machine (`local`) as `farm tune` does.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm import api
from farm import settings as farm_settings
from farm.artifacts.brought import bring
from farm.artifacts.places import require_room
from farm.campaign.artifacts import make_artifacts
from farm.campaign.one_model import OneModelRequest
from farm.campaign.plan_models import to_variant
from farm.campaign.tune import tune
from farm.errors import PermanentError, UsageError
from farm.inventory.board_types import require_board_type
from farm.report.campaign_table import summary_line
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT, FleetCampaign

LOCAL = "local"
# For a free board to verify the compiled model on.
_WAIT_S = 300.0

Say = Callable[[str], None]


# Seconds between two lines of progress.
_TELL_S = 10.0


def print_note(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def optimize(
    model: str | pathlib.Path,
    boards: str | Sequence[str] = LOCAL,
    trials: int = 500,
    *,
    name: str | None = None,
    home: str | pathlib.Path | None = None,
    say: Say = print_note,
) -> Optimization:
    """Begin to tune a model, an ONNX file or a name of the zoo, for types of boards; `wait` waits for the end.

    `name` is the campaign's; default: one made of the model's name and the time. `say` is called with a line for each
    step, and with progress and ETA every ten seconds; it prints on stderr. Raises UsageError.
    """
    types = [boards] if isinstance(boards, str) else list(boards)
    if not types or (LOCAL in types and len(types) > 1):
        raise UsageError("boards are of one kind or more of a fleet, or `local`: this machine alone")
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise UsageError(f"trials must be a whole number of at least 1, not {trials!r}")
    settings = farm_settings.load()
    settings = settings if home is None else dataclasses.replace(settings, home=str(home))
    text = str(model)
    if types == [LOCAL]:
        return Optimization(text, trials, settings, say, None)
    called = name or f"{pathlib.Path(text).stem.replace('.', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    campaign = api.Campaign(name=called, models=[model], boards=types, budget=trials, home=home)
    campaign.submit(say)
    return Optimization(text, trials, settings, say, campaign)


class Optimization:
    """A model that is being tuned. `campaign` is None on this machine, where `wait` does the work."""

    def __init__(self, model: str, trials: int, settings: Settings, say: Say, campaign: api.Campaign | None) -> None:
        self.campaign = campaign
        self._model, self._trials, self._settings, self._say = model, trials, settings, say

    def wait(self, timeout_s: float | None = None) -> Optimized:
        """Wait until it is tuned. Raises what `Campaign.wait` raises; `timeout_s` is for boards of a fleet."""
        if self.campaign is None:
            document = self._tune_here()
        else:
            teller, name = _Listener(self._say), self.campaign.name
            document = self.campaign.wait(
                timeout_s,
                lambda progress: teller.tell(name, str(progress["phase"]), "", {"trials": self._trials}, progress),
            )
        return Optimized(document, self._settings, self._say)

    def _tune_here(self) -> dict[str, Any]:
        brought = bring(self._model)
        kind = require_board_type(LOCAL)
        request = OneModelRequest("optimize", to_variant(brought.source, brought.inputs), kind, self._trials)
        with Store(self._settings.store_location) as store:
            tune(request, self._settings, store, _Listener(self._say))
        return {
            "models": [brought.about.model_dump()],
            "types": [{"type": kind.name, "simulated": False, "points": [DEFAULT_POINT]}],
        }


class Optimized:
    """A model that was tuned; `document` says what for."""

    def __init__(self, document: Mapping[str, Any], settings: Settings, say: Say) -> None:
        self.document = document
        self._settings, self._say = settings, say

    def save_packages(self, folder: str | pathlib.Path) -> list[pathlib.Path]:
        """Compile, verify and pack for every type; returns the wheels. Raises PermanentError where one is wrong.

        The artifacts themselves lie beside the wheels.
        """
        with Store(self._settings.store_location) as store:
            made = make_artifacts(self.document, pathlib.Path(folder), self._settings, store, _WAIT_S, self._say)
        if wrong := [f"{each.name}: {each.reason}" for each in made if not each.matches]:
            raise PermanentError(f"not all compute what ONNX Runtime does: {'; '.join(wrong)}")
        return [each.package for each in made if each.package is not None]

    def save_package(self, out: str | pathlib.Path) -> pathlib.Path:
        """The same for one type of board; returns the wheel's path.

        `out` is a folder, or a name for the wheel: pip installs a wheel under no name but its own, which says where it
        may go, so that the other one is a link to the wheel beside it. Raises UsageError where something has the name.
        """
        if len(self.document["types"]) != 1:
            raise UsageError("there are several types of boards, and so several packages", "Use `save_packages`.")
        path = pathlib.Path(out)
        is_name = path.suffix == ".whl" and not path.is_dir()
        folder = path.parent if is_name else path
        require_room(folder)
        if is_name and path.exists() and not path.is_symlink():
            raise UsageError(f"{path} is there already, and is no link to a wheel", "Give another name, or a folder.")
        (wheel,) = self.save_packages(folder)
        if is_name and path.name != wheel.name:
            path.unlink(missing_ok=True)
            path.symlink_to(wheel.name)
            self._say(f"{path} is a link to {wheel.name}, the only name under which pip installs it")
        return wheel


class _Listener:
    """Notes of a tuning and, now and then, a line of its progress."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._told_at = time.monotonic()

    def note(self, text: str) -> None:
        self._say(text)

    def show(self, campaign: FleetCampaign) -> None:
        self.tell(campaign.name, campaign.state, campaign.reason, campaign.budget, campaign.progress or {})

    def finish(self, campaign: FleetCampaign) -> None:
        self._told_at = float("-inf")
        self.show(campaign)

    def tell(self, name: str, state: str, reason: str, budget: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        if time.monotonic() - self._told_at >= _TELL_S:
            self._told_at = time.monotonic()
            self._say(summary_line(name, state, reason, budget, progress))
