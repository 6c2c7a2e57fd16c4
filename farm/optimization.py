"""Tune a model by one call, as farm tune does: farm.optimize."""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm.api import Campaign
from farm.artifacts.artifact_folder import require_room
from farm.artifacts.given_model import open_model
from farm.campaign.artifacts import make_artifacts
from farm.campaign.plan_models import to_variants
from farm.campaign.submit import OneModelRequest, require_new_name, stamp_name
from farm.campaign.tune import tune
from farm.errors import PermanentError, UsageError
from farm.inventory.board_types import require_board_type
from farm.models.trained import TRAINED
from farm.models.zoo import ZOO
from farm.report.campaign_rows import summary_line
from farm.search import gpus
from farm.search.graph import pipelines
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, FleetCampaign
from farm.values import DEFAULT_POINT

LOCAL = "local"

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
    shape: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    weights: str = "float32",
    device: str = "cpu",
    objective: str = "latency",
    deadline: str | float | None = None,
    period: str | float | None = None,
    name: str | None = None,
    home: str | pathlib.Path | None = None,
    say: Say = print_note,
) -> Optimization:
    """Begin to tune a model, a file or a name of the zoo, for types of boards; `wait` waits for the end.

    `shape` has a shape by input; it, `batch` and the options up to `period` are as in a campaign file. `name` is the
    campaign's; default: the model's name and the time. `say` gets a line for each step, and progress with ETA every ten
    seconds; it prints on stderr. Raises UsageError.
    """
    types = [boards] if isinstance(boards, str) else list(boards)
    if not types or (LOCAL in types and len(types) > 1):
        raise UsageError("boards are of one kind or more of a fleet, or `local`: this machine alone")
    text = str(model)
    about: dict[str, Any] = {"zoo": text} if text in ZOO or text in TRAINED else {"path": text}
    campaign = Campaign(
        name=stamp_name(pathlib.Path(text).stem) if name is None else name,
        models=about | {"shape": shape or {}} | ({} if batch is None else {"batch": batch}),
        boards=types,
        budget=trials,
        objective=objective,
        deadline=deadline,
        period=period,
        device=device,
        weights=weights,
        home=home,
    )
    if types != [LOCAL]:
        campaign.submit(say)
    return Optimization(campaign, say, name or "")


class Optimization:
    """A model being tuned. `campaign` is None on this machine, where `wait` does the work."""

    def __init__(self, ordered: Campaign, say: Say, name: str = "") -> None:
        self._spec, self._settings = ordered._require_file("ordered").spec, ordered._settings
        self._say, self._name = say, name
        self.campaign = None if self._spec.boards.types == (LOCAL,) else ordered

    def __repr__(self) -> str:
        (model,), types = self._spec.models, ", ".join(self._spec.boards.types)
        return f"<farm.Optimization of {model.called} for {types}: {self._spec.budget.trials} trials>"

    def wait(self, timeout_s: float | None = None) -> Optimized:
        """Wait until it is tuned. Raises what `Campaign.wait` raises; `timeout_s` is for boards of a fleet."""
        if self.campaign is None:
            document = self._tune_here()
        else:
            teller, name = _Listener(self._say), self.campaign.name
            document = self.campaign.wait(
                timeout_s,
                lambda progress: teller.print_progress(
                    name, str(progress["phase"]), "", Budget(trials=self._spec.budget.trials), progress
                ),
            )
        return Optimized(document, self._settings, self._say)

    def _tune_here(self) -> dict[str, Any]:
        spec, (model,) = self._spec, self._spec.models
        shapes = [f"{name}={','.join(map(str, sizes))}" for name, sizes in model.shape.items()]
        opened = open_model(model.zoo or str(model.path), shapes, next(iter(model.batch), None))
        opened.source.require_float(spec.weights)
        kind = pipelines.store_weights(gpus.require_device(require_board_type(LOCAL), spec.device), spec.weights)
        request = OneModelRequest(
            "optimize",
            to_variants(opened)[0],
            kind,
            int(spec.budget.trials or 0),
            objective=spec.objective,
            deadline_s=spec.latest_s,
            name=self._name,
        )
        with Store(self._settings.store_location) as store:
            if self._name:
                require_new_name(store, self._name)
            tune(request, self._settings, store, _Listener(self._say))
        return {
            "models": [opened.about.model_dump()],
            "types": [{"type": kind.name, "simulated": False, "points": [DEFAULT_POINT], "pipeline": kind.pipeline}],
        }


class Optimized:
    """A tuned model; `document` says for which boards."""

    def __init__(self, document: Mapping[str, Any], settings: Settings, say: Say) -> None:
        self.document = document
        self._settings, self._say = settings, say

    def __repr__(self) -> str:
        names = [each["name"] for each in self.document["models"]]
        return f"<farm.Optimized {', '.join(names)} for {', '.join(each['type'] for each in self.document['types'])}>"

    def save_packages(self, folder: str | pathlib.Path) -> list[pathlib.Path]:
        """Compile, verify and pack for every type; return the wheels. Raises PermanentError where one is wrong.

        The artifacts themselves lie beside the wheels.
        """
        with Store(self._settings.store_location) as store:
            made = list(make_artifacts(self.document, pathlib.Path(folder), self._settings, store, self._say))
        if wrong := [f"{each['name']}: {each['reason']}" for each in made if not each["matches"]]:
            raise PermanentError(f"not all compute what ONNX Runtime does: {'; '.join(wrong)}")
        return [pathlib.Path(each["package"]) for each in made if each["package"] is not None]

    def save_package(self, out: str | pathlib.Path) -> pathlib.Path:
        """Compile, verify and pack for one type of board; return the wheel's path.

        `out` is a folder, or a path for the wheel: pip installs a wheel only under its own name, so that path becomes a
        link to the wheel beside it. Raises UsageError where the path exists.
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
    """Prints the notes of a run, and at intervals a line of its progress."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._printed_at = time.monotonic()

    def note(self, text: str) -> None:
        self._say(text)

    def show(self, campaign: FleetCampaign) -> None:
        self.print_progress(campaign.name, campaign.state, campaign.reason, campaign.budget, campaign.progress or {})

    def finish(self, campaign: FleetCampaign) -> None:
        self._printed_at = float("-inf")
        self.show(campaign)

    def print_progress(self, name: str, state: str, reason: str, budget: Budget, progress: Mapping[str, Any]) -> None:
        if time.monotonic() - self._printed_at >= _TELL_S:
            self._printed_at = time.monotonic()
            self._say(summary_line(name, state, reason, budget, progress))
