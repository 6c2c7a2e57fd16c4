"""Campaigns from Python, as with `farm campaign`: `farm.Campaign` and `farm.campaigns`.

Objects are names of what is in the store and hold nothing open: each call opens the store under FARM_HOME. The engine's
process does the work, and continues when the program ends.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from farm import settings as farm_settings
from farm.campaign import plan_document
from farm.campaign.engine import control
from farm.campaign.engine.control import EnginePrestart, ensure_engine
from farm.campaign.plan import make_plan
from farm.campaign.spec import CampaignFile, check_campaign, read_campaign
from farm.campaign.submit import clone, read_limits, submit
from farm.errors import UnavailableError, UsageError
from farm.processes.machine import name_user
from farm.report import campaign_words
from farm.report.campaign_document import make_document, make_report
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, FleetCampaign
from farm.values import Record

Model = str | pathlib.Path | Mapping[str, Any]
OnProgress = Callable[[Mapping[str, Any]], None]

# Durations, which are numbers of seconds in Python and need a unit in a file.
_SPANS = frozenset({"wall_clock", "min_repeat", "timeout", "deadline", "period"})


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
        period: str | float | None = None,
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
            **_name_units({k: v for k, v in (("deadline", deadline), ("period", period)) if v is not None}),
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
            document = plan_document.to_document(make_plan(file, store, self._settings, note))
        plan_document.keep_plan(self._settings.home_path, {"file": str(file.path.absolute()), **document})
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
            error = control.find_error(control.wait_settled(self._settings, store, self.name, timeout_s, tell))
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
        changes = read_limits(f"campaign {self.name}", limits)
        with self._open() as store:
            return control.change_budget(store, self.name, changes, name_user())

    def clone(self, name: str, **limits: Any) -> Campaign:
        """Submit the same order under another name; `limits` as for `change_budget`."""
        changes = read_limits(f"campaign {name}", limits)
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
        return campaign_words.write_campaign_report(document, pathlib.Path(folder))

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

    def _open(self) -> Store:
        return Store(self._settings.store_location)


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
