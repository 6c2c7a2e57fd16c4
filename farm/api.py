"""Campaigns from Python, as with `farm campaign`: `farm.Campaign` and `farm.campaigns`.

Objects are names of what is in the store and hold nothing open: each call opens the store under FARM_HOME. The engine's
process does the work, and continues when the program ends.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from farm import settings as farm_settings
from farm.artifacts.given_model import open_model
from farm.artifacts.places import require_room
from farm.campaign import plan as planned
from farm.campaign.artifacts import make_artifacts
from farm.campaign.engine import client, control
from farm.campaign.engine.client import EnginePrestart, ensure_engine
from farm.campaign.one_model import OneModelRequest, stamp_name
from farm.campaign.plan import make_plan
from farm.campaign.plan_models import to_variants
from farm.campaign.spec import BudgetSpec, CampaignFile, check_campaign, read_campaign
from farm.campaign.submit import clone, require_new_name, submit, to_budget
from farm.campaign.tune import tune
from farm.errors import PermanentError, UnavailableError, UsageError
from farm.inventory.board_types import require_board_type
from farm.inventory.documents import check_document
from farm.models.trained import TRAINED
from farm.models.zoo import ZOO
from farm.processes.machine import name_user
from farm.report import campaign_page
from farm.report.campaign_document import make_document, make_report
from farm.report.campaign_table import summary_line
from farm.search import gpus
from farm.search.graph import pipelines
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, FleetCampaign
from farm.values import DEFAULT_POINT, Record

Model = str | pathlib.Path | Mapping[str, Any]
# The keys of a file's budget, as fields of `Budget`.
_LIMITS = {
    "trials": "trials",
    "wall_clock": "wall_clock_s",
    "board_hours": "board_s",
    "per_workload": "per_workload",
    "joules": "energy_j",
}
OnProgress = Callable[[Mapping[str, Any]], None]


# Durations, which are numbers of seconds in Python and need a unit in a file.
_SPANS = frozenset({"wall_clock", "min_repeat", "timeout", "deadline"})


def _name_units(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: f"{value}s" if key in _SPANS and isinstance(value, int | float) and not isinstance(value, bool) else value
        for key, value in document.items()
    }


class Campaign:
    """A campaign: models x boards x operating points within a budget.

    All arguments are as in a campaign file and checked alike; wrong input raises the same `farm.errors.UsageError`.
    `models` are names of the zoo, ONNX or TFLite files, or mappings; `boards` a type, several, or
    `{"types": …, "labels": …}`; `budget` a number of trials or a mapping; durations are texts such as "6h" or seconds.
    `home` replaces the environment's FARM_HOME. The constructor starts nothing.
    """

    def __init__(
        self,
        *,
        name: str,
        models: Model | Sequence[Model],
        boards: str | Sequence[str] | Mapping[str, Any],
        budget: int | Mapping[str, Any],
        operating_points: Any = "default",
        search: Mapping[str, Any] | None = None,
        measure: Mapping[str, Any] | None = None,
        priority: int = 0,
        objective: str = "latency",
        deadline: str | float | None = None,
        device: str = "cpu",
        weights: str = "float32",
        home: str | pathlib.Path | None = None,
    ) -> None:
        document = {
            "name": name,
            "models": _list_models(models),
            "boards": boards if isinstance(boards, Mapping) else {"types": boards},
            "budget": _name_units(budget) if isinstance(budget, Mapping) else {"trials": budget},
            "operating_points": operating_points,
            "search": search or {},
            "measure": _name_units(measure or {}),
            "priority": priority,
            "objective": objective,
            "device": device,
            "weights": weights,
            **_name_units({} if deadline is None else {"deadline": deadline}),
        }
        self._settle(name, check_campaign(document, f"campaign {name}"), home)

    @classmethod
    def from_file(cls, path: str | pathlib.Path, home: str | pathlib.Path | None = None) -> Campaign:
        """Read a campaign file. Raises UsageError naming the line of every error."""
        file = read_campaign(pathlib.Path(path))
        return cls._make(file.spec.name, file, home)

    @classmethod
    def named(cls, name: str, home: str | pathlib.Path | None = None) -> Campaign:
        """Return a submitted campaign, also another program's. Raises UsageError where there is none of this name."""
        campaign = cls._make(name, None, home)
        campaign.fetch()
        return campaign

    def __repr__(self) -> str:
        return f"<farm.Campaign {self.name}>"

    # Before it runs

    def plan(self, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
        """Plan it as `farm campaign run --dry-run` does; keep the plan, so that a run refuses models that changed."""
        file = self._require_file("planned")
        with self._open() as store:
            document = planned.to_document(make_plan(file, store, self._settings, note))
        planned.keep_plan(self._settings.home_path, {"file": str(file.path.absolute()), **document})
        return document

    def submit(self, note: Callable[[str], None] = lambda text: None) -> Campaign:
        """Submit it, without waiting for it; return itself.

        Raises UsageError where it is impossible, or its name is taken; UnavailableError where no engine can run.
        """
        file = self._require_file("submitted")
        with self._open() as store, EnginePrestart(self._settings) as engine:
            submit(file, store, self._settings, name_user(), "farm.Campaign", note, engine.begin)
            engine.ensure()
        return self

    def run(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> dict[str, Any]:
        """Submit it and wait for its end, as `wait` does. Ctrl-C pauses it."""
        self.submit()
        try:
            return self.wait(timeout_s, on_progress)
        except KeyboardInterrupt:
            self.pause()
            raise

    # Under way

    def wait(self, timeout_s: float | None = None, on_progress: OnProgress | None = None) -> dict[str, Any]:
        """Wait for its end; return what `farm campaign show --json` prints.

        `on_progress` gets the progress whenever it changes. Raises PermanentError where the campaign failed or was
        cancelled, UnavailableError where it is paused or interrupted, DeadlineError after `timeout_s`; the campaign
        then continues.
        """
        told: list[Any] = [None]

        def tell(campaign: FleetCampaign) -> None:
            if on_progress is not None and campaign.progress is not None and campaign.progress.get("at") != told[0]:
                told[0] = campaign.progress.get("at")
                on_progress(campaign.progress)

        with self._open() as store:
            error = client.find_error(client.wait_settled(self._settings, store, self.name, timeout_s, tell))
            if error is not None:
                raise error
            return make_document(store, self.name)

    def pause(self) -> str:
        """Pause it; return its state, which is `paused` unless its engine is slow to answer."""
        with self._open() as store:
            return str(control.pause(self._settings, store, self.name, name_user()).state)

    def resume(self) -> Campaign:
        """Resume it, without waiting for it; return itself."""
        with self._open() as store:
            control.resume(store, self.name, name_user())
        ensure_engine(self._settings)
        return self

    def cancel(self) -> str:
        """End it for good; return its state. Its trials stay."""
        with self._open() as store:
            return str(control.cancel(self._settings, store, self.name, name_user()).state)

    def change_budget(self, **limits: Any) -> Budget:
        """Change limits, named and written as in a file; None removes one. Return the whole budget."""
        changes = _read_limits(f"campaign {self.name}", limits)
        with self._open() as store:
            return control.change_budget(store, self.name, changes, name_user())

    def clone(self, name: str, **limits: Any) -> Campaign:
        """Submit the same order under another name; `limits` as for `change_budget`."""
        changes = _read_limits(f"campaign {name}", limits)
        with self._open() as store:
            clone(store, self.name, name, changes, name_user(), f"farm.Campaign.clone of {self.name}")
        ensure_engine(self._settings)
        return self._make(name, None, self._settings.home)

    # Results

    def fetch(self) -> FleetCampaign:
        """Return the store's row. Raises UsageError where it was not submitted."""
        with self._open() as store:
            with suppress(UnavailableError):  # a full disk can be read
                control.close_abandoned(store)
            return store.campaigns.require(self.name)

    @property
    def state(self) -> str:
        """Its state: `submitted`, `running`, `waiting`, `paused`, `verifying`, `interrupted`, `finished`, …"""
        return str(self.fetch().state)

    @property
    def progress(self) -> Mapping[str, Any] | None:
        """Return its engine's progress as a plain document; None before it has begun."""
        return self.fetch().progress

    def show(self) -> dict[str, Any]:
        """Return what `farm campaign show --json` prints."""
        with self._open() as store:
            return make_document(store, self.name)

    def records(self) -> list[Record]:
        """Return the records of its workloads on its board types at its operating points."""
        with self._open() as store:
            types = {each.board_type: each for each in store.campaigns.require(self.name).order.types}
            found = store.records.fetch(simulated=None)
        return [
            record
            for record in found
            if (kind := types.get(record.board_type)) is not None
            and record.simulated == kind.simulated
            and record.operating_point in kind.points
            and any(each.hash == record.workload for each in kind.workloads)
        ]

    def report(self, folder: str | pathlib.Path) -> dict[str, str]:
        """Write its report into a folder; return the paths of the files."""
        with self._open() as store:
            document = make_report(store, self.name)
        return campaign_page.write_campaign_report(document, pathlib.Path(folder))

    # Inside

    @classmethod
    def _make(cls, name: str, file: CampaignFile | None, home: str | pathlib.Path | None) -> Campaign:
        campaign = cls.__new__(cls)
        campaign._settle(name, file, home)
        return campaign

    def _settle(self, name: str, file: CampaignFile | None, home: str | pathlib.Path | None) -> None:
        self.name, self._file, self._settings = name, file, _load_settings(home)

    def _require_file(self, what: str) -> CampaignFile:
        if self._file is None:
            raise UsageError(f"campaign {self.name} was {what} already", "Campaign.clone does the same again.")
        return self._file

    @contextmanager
    def _open(self) -> Iterator[Store]:
        with Store(self._settings.store_location) as store:
            yield store


def campaigns(home: str | pathlib.Path | None = None) -> list[Campaign]:
    """Return the campaigns in the store, the oldest first."""
    with Store(_load_settings(home).store_location) as store:
        names = [each.name for each in store.campaigns.fetch()]
    return [Campaign._make(name, None, home) for name in names]


def _load_settings(home: str | pathlib.Path | None) -> Settings:
    settings = farm_settings.load()
    return settings if home is None else dataclasses.replace(settings, home=str(home))


def _list_models(models: Model | Sequence[Model]) -> list[Any]:
    several = [models] if isinstance(models, str | pathlib.Path | Mapping) else list(models)
    return [{"path": str(each)} if isinstance(each, pathlib.Path) else each for each in several]


def _read_limits(called: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Convert limits written as in a file, None for none, to fields of a `Budget`. Raises UsageError."""
    if unknown := sorted(limits.keys() - _LIMITS.keys()):
        raise UsageError(f"{called}: a budget has no {', '.join(unknown)}", f"It has: {', '.join(_LIMITS)}.")
    given = {key: value for key, value in limits.items() if value is not None}
    checked = to_budget(check_document(given, BudgetSpec, called)) if given else Budget()
    return {_LIMITS[key]: getattr(checked, _LIMITS[key]) for key in limits}


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
    shape: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    weights: str = "float32",
    device: str = "cpu",
    objective: str = "latency",
    deadline: str | float | None = None,
    name: str | None = None,
    home: str | pathlib.Path | None = None,
    say: Say = print_note,
) -> Optimization:
    """Begin to tune a model, a file or a name of the zoo, for types of boards; `wait` waits for the end.

    `shape` has a shape by input; it, `batch` and the options up to `deadline` are as in a campaign file. `name` is the
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
            deadline_s=spec.deadline,
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
            made = make_artifacts(self.document, pathlib.Path(folder), self._settings, store, _WAIT_S, self._say)
        if wrong := [f"{each.name}: {each.reason}" for each in made if not each.matches]:
            raise PermanentError(f"not all compute what ONNX Runtime does: {'; '.join(wrong)}")
        return [each.package for each in made if each.package is not None]

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
