"""Tune one model: submit a campaign, watch it until its end, read its result.

`farm tune` is this, and the first half of quickstart. `submit` makes the order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from device_agent.protocol import Outcome
from farm.campaign import submit
from farm.campaign.engine import control
from farm.campaign.engine.control import find_error, is_settled
from farm.campaign.engine.progress import merge_faults
from farm.campaign.engine.state import ENGINE
from farm.campaign.plan_models import WorkloadSurvey, start_surveys, take_surveys
from farm.campaign.submit import MeasuringPlace, OneModelRequest
from farm.crew.choice import find_left_out, plan_choice
from farm.errors import FarmError, PermanentError, UnavailableError
from farm.processes.jobs import JobProcess
from farm.processes.machine import close_abandoned_campaigns, machine_lock, name_user, wait_for_machine
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import FleetCampaign
from farm.types.states import CampaignState
from farm.values import DEFAULT_POINT, SEARCH_TRIAL, Workload

# An engine ends within seconds of its last campaign.
_RELEASE_TIMEOUT_S = 15.0


class TuneListener(Protocol):
    """Receives the progress of a run."""

    def note(self, text: str) -> None:
        """Take one line about a step or decision."""

    def show(self, campaign: FleetCampaign) -> None:
        """Take the progress; called several times a second."""

    def finish(self, campaign: FleetCampaign) -> None:
        """Take the progress at the end."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of tuning. Times in seconds; `overheads_s`: how long each good trial held the session untimed.

    `board` is the store's row of the board that measured most, `measured` each board's trials, `tasks` those of the
    campaign's progress, with the best that is known, `history` pairs of trials and the model's latency. `final` is the
    model's end-to-end A/B test (`final_report`), None where nothing could be tuned.
    """

    campaign: int
    name: str
    board: Mapping[str, Any]
    target: Mapping[str, Any]
    workloads: tuple[Workload, ...]
    tasks: tuple[Mapping[str, Any], ...]
    trials: dict[str, int]
    verdict: Mapping[str, Any]
    latency_s: float | None
    recalled: int
    seconds_to_first_trial: float | None
    seconds_tuning: float
    overheads_s: tuple[float, ...]
    history: tuple[tuple[int, float], ...]
    measured: Mapping[str, int] = dataclasses.field(default_factory=dict)
    final: Mapping[str, Any] | None = None

    @property
    def records(self) -> int:
        """Count its workloads with a record, new or kept."""
        return int(self.verdict.get("records", 0)) + int(self.verdict.get("held", 0))


def find_failure(trials: Mapping[str, int], records: int) -> PermanentError | None:
    """Return the error of a run with these `trials` (by fault side) and this many checked records; None: it worked."""
    if records and (trials["ok"] or not any(trials.values())):
        return None
    if not any(trials.values()):
        return PermanentError("no trial was made", "Give it a larger budget, or more time.")
    if trials["ok"]:
        said = f"none of {trials['ok']} good trials computes what it should"
    else:
        faults = ", ".join(f"{side.removesuffix('_faults')} {count}" for side, count in trials.items() if count)
        said = f"all {sum(trials.values())} trials failed; faults: {faults}"
    return PermanentError(said, "`farm doctor` tries each part of the farm; logs are in the folder logs of FARM_HOME.")


def tune(request: OneModelRequest, settings: Settings, store: Store, listener: TuneListener) -> Tuned:
    """Tune a model and return the result. The campaign is paused, or cancelled before its first trial, if this ends.

    Raises UsageError, UnavailableError, BoardUnsafeError, MachineBusyError, and the error of a campaign that was not
    finished (`control.find_error`).
    """
    place = submit.choose_place(request, store, settings)
    if place.boards and request.board is None:
        left_out = find_left_out(store.boards.fetch(), request.board_type.name, place.boards)
        if left_out and not request.virtual:
            listener.note(left_out)
    if place.is_host and not ENGINE.is_held(settings.home_path):
        with machine_lock(request.wait_s, listener.note):
            pass  # the engine takes it
    run = _Run(request, place, settings, store, listener)
    with control.EnginePrestart(settings) as engine:
        try:
            return run.carry_out(engine)
        finally:
            run.await_release(engine)


class _Run:
    """One tuning run."""

    def __init__(
        self, request: OneModelRequest, place: MeasuringPlace, settings: Settings, store: Store, listener: TuneListener
    ) -> None:
        self._request, self._place, self._settings = request, place, settings
        self._store, self._listener = store, listener
        self._waiting_since: float | None = None
        self._recalled = 0
        self._workloads: tuple[Workload, ...] = ()
        # The calls in one inference, at the greatest length.
        self._weights: dict[str, float] = {}

    def carry_out(self, engine: control.EnginePrestart) -> Tuned:
        """Submit the campaign and watch it until it has ended."""
        form = submit.to_form(self._request, self._place)
        close_abandoned_campaigns(self._store)
        with JobProcess() as process:
            surveys = start_surveys(process, [(model, form) for model in self._request.models], texts=True)
            engine.begin(for_host=self._place.is_host)
            name = self._submit(take_surveys(surveys, self._listener.note))
        if name is None:
            return self._conclude_without()
        try:
            engine.ensure()
            campaign = control.wait_settled(self._settings, self._store, name, on_progress=self._look)
        except BaseException:
            # A full store refuses this too; the first error is the one to report.
            with contextlib.suppress(FarmError):
                begun = any(self._store.trials.count(self._store.campaigns.require(name).id).values())
                (control.pause if begun else control.cancel)(self._settings, self._store, name, name_user())
            raise
        self._listener.finish(campaign)
        return self._conclude(campaign)

    def await_release(self, engine: control.EnginePrestart) -> None:
        """Wait until the engine has released its boards, unless other campaigns need it."""
        engine.close()
        if any(map(control.needs_engine, self._store.campaigns.fetch(over=False))):
            return
        if engine.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.process.wait(_RELEASE_TIMEOUT_S)
        elif self._place.is_host:
            wait_for_machine(_RELEASE_TIMEOUT_S)

    def _submit(self, answers: Sequence[WorkloadSurvey | FarmError]) -> str | None:
        """Order the campaign; None where the model has nothing that can be tuned."""
        if error := next((each for each in answers if isinstance(each, FarmError)), None):
            raise error
        surveys = [each for each in answers if isinstance(each, WorkloadSurvey)]
        request, place, note = self._request, self._place, self._listener.note
        found = {each.hash: each for survey in reversed(surveys) for each in survey.workloads}
        chosen = submit.choose_workloads(list(found.values()), request.ops)
        self._workloads = submit.drop_known(request, chosen, self._store) if request.only_unknown else chosen
        if request.only_unknown:
            note(f"tuning {len(self._workloads)} of {len(chosen)} workloads, which have no record")
        if not self._workloads:
            return None
        tuned = {each.hash for each in self._workloads}
        self._weights = {each.hash: each.weight for each in surveys[0].workloads if each.hash in tuned}
        gflop = sum(each.flop * self._weights.get(each.hash, 0) for each in self._workloads) / 1e9
        note(f"{request.model.name}: {len(self._workloads)} workloads, {gflop:.2f} GFLOP per inference")
        if not request.fresh:
            kind = request.board_type.name
            self._recalled = sum(
                len(self._store.trials.fetch_known_candidates(each.hash, kind, DEFAULT_POINT, place.simulated))
                for each in self._workloads
            )
        if self._recalled:
            note(f"starting from {self._recalled} candidates measured by earlier runs (--fresh would not)")
        return submit.submit_one(request, place, surveys, self._workloads, self._store, self._settings, name_user())

    def _look(self, campaign: FleetCampaign) -> None:
        """Show its progress. Raises UnavailableError where no board was free in time."""
        now = time.monotonic()
        if is_settled(campaign):
            return
        self._listener.show(campaign)
        if campaign.state not in (CampaignState.WAITING, CampaignState.CONNECTING):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > self._request.wait_s and not self._place.is_host:
            kind = self._request.board_type.name
            choice = plan_choice(self._store.boards.fetch(), self._place.boards)
            raise UnavailableError(
                f"no {kind} became free within {self._request.wait_s:g} s ({choice.text})",
                "`farm board list` shows who holds what; --wait 10m waits longer.",
            )

    def _conclude(self, campaign: FleetCampaign) -> Tuned:
        store, name = self._store, campaign.name
        if campaign.state is not CampaignState.FINISHED:
            raise find_error(campaign) or UnavailableError(f"campaign {name} is {campaign.state}")
        columns = ("board", "fault_side", "held_s", "recorded_at", "outcome")
        rows = store.trials.fetch(campaign.id, purpose=SEARCH_TRIAL, columns=columns)
        good = [row for row in rows if row["fault_side"] is None]
        boards = Counter(row["board"] for row in good or rows if row["board"])
        progress = campaign.progress or {}
        counts = store.trials.count(campaign.id, purpose=SEARCH_TRIAL)
        tasks = tuple(task if self._request.fresh else self._with_known(task) for task in progress["tasks"])
        mine = [task for task in tasks if task["workload"] in self._weights]
        parts = [self._weights[task["workload"]] * task["best_s"] for task in mine if task["best_s"] is not None]
        first = min((row["recorded_at"] for row in good), default=None)
        began = time.time() - (time.monotonic() - self._request.since)
        return Tuned(
            campaign=campaign.id,
            name=name,
            board=self._find_board(boards),
            target=dict(self._workloads[0].target),
            workloads=self._workloads,
            tasks=tasks,
            trials=counts | merge_faults(counts, progress),
            verdict=progress.get("verdict") or {},
            latency_s=math.fsum(parts) if len(parts) == len(mine) else None,
            recalled=self._recalled,
            seconds_to_first_trial=None if first is None else first - began,
            seconds_tuning=max(row["recorded_at"] for row in rows) - campaign.started_at if rows else 0.0,
            overheads_s=tuple(row["held_s"] - Outcome.from_dict(row["outcome"]).timing_s for row in good),
            history=tuple((int(count), math.fsum(sums.values())) for count, sums in progress["history"]),
            measured=dict(boards.most_common()),
            final=next(iter((progress.get("verdict") or {}).get("finals", ())), None),
        )

    def _with_known(self, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a task with its record's latency, or else the best trial of all runs."""
        if task["from"] == "record":
            return task
        rows = self._store.trials.fetch_known_candidates(
            task["workload"], task["board_type"], DEFAULT_POINT, self._place.simulated
        )
        return {**task, "best_s": min((row.median_s for row in rows if row.median_s is not None), default=None)}

    def _conclude_without(self) -> Tuned:
        """Return the result where nothing of the model can be tuned."""
        store, request = self._store, self._request
        kind, source = request.board_type.name, request.model.source
        campaign = store.campaigns.start(request.command, source.name, source.sha256, kind, request.trials, {})
        store.campaigns.finish(campaign, "finished")
        target = submit.to_form(request, self._place).to_target()
        trials = store.trials.count(campaign)
        board = self._find_board(Counter())
        return Tuned(campaign, "", board, target, (), (), trials, {}, None, 0, None, 0.0, (), ())

    def _find_board(self, measured: Counter[str]) -> Mapping[str, Any]:
        name = measured.most_common(1)[0][0] if measured else next(iter(self._place.boards), "")
        rows = {row.name: row for row in self._store.boards.fetch()}
        kind = self._request.board_type.name
        mine = (row for row in rows.values() if row.board_type == kind)
        row = rows.get(name) or next(mine, None)
        if row is None:
            return {"name": None, "board_type": kind, "simulated": self._place.simulated}
        return {key: getattr(row, key) for key in ("name", "board_type", "simulated", "description")}
