"""Tune one model from start to finish: a campaign run by this process, or by the running engine.

`farm tune` is this, and the first half of quickstart. `one_model` makes the order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from device_agent.protocol import Outcome
from device_agent.protocol.interpreters import python_command
from farm import folders
from farm.campaign import one_model
from farm.campaign.engine import client, control
from farm.campaign.engine.client import find_error, is_settled, watch
from farm.campaign.engine.control import run_through_outages
from farm.campaign.engine.engine import engine_up
from farm.campaign.engine.host import lock_engine
from farm.campaign.engine.process import explain_end
from farm.campaign.engine.progress import merge_faults
from farm.campaign.engine.state import beating, publish, withdraw
from farm.campaign.one_model import MeasuringPlace, OneModelRequest
from farm.campaign.plan_models import Surveying, WorkloadSurvey
from farm.crew.choice import find_left_out, plan_choice
from farm.errors import FarmError, PermanentError, UnavailableError
from farm.processes import children
from farm.processes.machine import (
    close_abandoned_campaigns,
    name_user,
    process_identity,
    wait_for_machine,
)
from farm.search import workloads as search_workloads
from farm.settings import Settings
from farm.store import Store
from farm.values import DEFAULT_POINT, SEARCH_TRIAL, CampaignState, FleetCampaign

# A child process, so that an interrupt of the farm ends it completely.
_WARM_LINKER = """
import pathlib, sys
from farm import linker
linker.warm(pathlib.Path(sys.argv[1]), sys.argv[2] or None)
"""
# The linker's very first use takes 5 to 30 s; without this the first build takes it.
_WARM_TIMEOUT_S = 120.0
# How often progress is read.
_LOOK_S = 0.2
# An engine ends the agent of this machine within a second or two of the last campaign that wanted it.
_MACHINE_TIMEOUT_S = 15.0


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
    workloads: tuple[search_workloads.Workload, ...]
    tasks: tuple[Mapping[str, Any], ...]
    trials: dict[str, int]
    verdict: Mapping[str, Any]
    latency_s: float | None
    recalled: int
    seconds_to_first_trial: float | None
    seconds_starting: float
    seconds_tuning: float
    overheads_s: tuple[float, ...]
    history: tuple[tuple[int, float], ...]
    measured: Mapping[str, int] = dataclasses.field(default_factory=dict)
    final: Mapping[str, Any] | None = None

    @property
    def trials_per_minute(self) -> float:
        """The trials per minute, start-up included."""
        counted = self.trials["ok"] + self.trials["candidate_faults"]
        return counted / self.seconds_tuning * 60 if self.seconds_tuning > 0 else 0.0

    @property
    def records(self) -> int:
        """Count its workloads with a record, new or kept."""
        return int(self.verdict.get("records", 0)) + int(self.verdict.get("held", 0))


def find_failure(trials: Mapping[str, int], records: int) -> PermanentError | None:
    """Return the error of a run with these `trials` (by fault side) and this many checked records; None: it worked."""
    if not any(trials.values()) or (trials["ok"] and records):
        return None
    if trials["ok"]:
        said = f"none of {trials['ok']} good trials computes what it should"
    else:
        faults = ", ".join(f"{side.removesuffix('_faults')} {count}" for side, count in trials.items() if count)
        said = f"all {sum(trials.values())} trials failed; faults: {faults}"
    return PermanentError(said, "`farm doctor` tries each part of the farm; logs are in the folder logs of FARM_HOME.")


def tune(request: OneModelRequest, settings: Settings, store: Store, listener: TuneListener) -> Tuned:
    """Tune a model and return the result. Raises as `tuning` does."""
    with tuning(request, settings, store, listener) as tuned:
        return tuned


@contextlib.contextmanager
def tuning(request: OneModelRequest, settings: Settings, store: Store, listener: TuneListener) -> Iterator[Tuned]:
    """Tune a model and yield the result; where this machine was the board, it is reserved for the block.

    Raises UsageError, UnavailableError, BoardUnsafeError, and the error of a campaign that was not finished
    (`watch.find_error`).
    """
    place = one_model.choose_place(request, store, settings)
    if place.boards and request.board is None:
        left_out = find_left_out(store.boards.fetch(), request.board_type.name, place.boards)
        if left_out and not request.virtual:
            listener.note(left_out)
    run = _Run(request, place, settings, store, listener)
    with contextlib.ExitStack() as machine, contextlib.ExitStack() as engine:
        if not lock_engine(
            settings.home_path, engine, machine if place.is_host else None, request.wait_s, listener.note
        ):
            listener.note("another command is this farm's engine, and carries it out")
            tuned = run.follow()
            if place.is_host:
                wait_for_machine(_MACHINE_TIMEOUT_S)  # its engine releases it about now
        else:
            try:
                tuned = run.carry_out()
            finally:
                engine.close()
                run.hand_over()
        yield tuned


class _Run:
    """One tuning run."""

    def __init__(
        self, request: OneModelRequest, place: MeasuringPlace, settings: Settings, store: Store, listener: TuneListener
    ) -> None:
        self._request, self._place, self._settings = request, place, settings
        self._store, self._listener = store, listener
        self._waiting_since: float | None = None
        self._look_at = 0.0
        self._recalled = 0
        self._submitted_at = request.since
        self._workloads: tuple[search_workloads.Workload, ...] = ()

    def carry_out(self) -> Tuned:
        """Be the engine until the campaign has ended."""
        store, settings, me = self._store, self._settings, process_identity()
        control.close_abandoned(store, me)
        close_abandoned_campaigns(store)
        name: str | None = None
        submitted = False
        with self._letting_go(me), beating(store.location, me), self._surveying() as surveying:

            def run() -> None:
                nonlocal name, submitted
                with engine_up(settings, store, self._note, self._place.boards, self._place.is_host) as engine:
                    engine.prepare(one_model.to_search(self._request, settings), self._place.is_host)
                    if not submitted:
                        with self._warming():
                            survey = surveying.take_all(self._note)[0]
                        name = self._submit(survey)
                        submitted = True
                    if name is not None:
                        publish(settings.home_path)
                        engine.run(lambda: self._has_ended(str(name)))

            try:
                # Before there is a campaign, the user tries the command again.
                run_through_outages(run, store, me, lambda: not submitted)
            except BaseException as error:
                self._note_end(name, explain_end(error) if isinstance(error, FarmError) else "its command was ended")
                raise
            self._note_end(name, "its command was ended")
        return self._conclude(name)

    def follow(self) -> Tuned:
        """Have the running engine execute it."""
        with self._surveying() as surveying:
            survey = surveying.take_all(self._note)[0]
        name = self._submit(survey)
        try:
            if name is not None:
                client.ensure_engine(self._settings)
                for campaign in watch(self._settings, self._store, name):
                    self._look(campaign)
        except BaseException:
            # The command has ended; a full store refuses this too.
            with contextlib.suppress(FarmError):
                begun = self._has_begun(self._store.campaigns.require(str(name)))
                self._store.campaigns.want(str(name), control.PAUSE if begun else control.CANCEL, name_user())
            raise
        return self._conclude(name)

    def _surveying(self) -> Surveying:
        return Surveying([(self._request.model, one_model.to_form(self._request, self._place))], texts=True)

    def _note(self, text: str) -> None:
        self._listener.note(text)

    def _submit(self, survey: WorkloadSurvey | FarmError) -> str | None:
        """Order the campaign; None where the model has nothing that can be tuned."""
        if isinstance(survey, FarmError):
            raise survey
        request, place = self._request, self._place
        chosen = one_model.choose_workloads(survey.workloads, request.ops)
        self._workloads = one_model.drop_known(request, chosen, self._store) if request.only_unknown else chosen
        if request.only_unknown:
            self._note(f"tuning {len(self._workloads)} of {len(chosen)} workloads, which have no record")
        if not self._workloads:
            return None
        gflop = sum(each.flop * each.weight for each in self._workloads) / 1e9
        count = len(self._workloads)
        self._note(f"{request.model.name}: {count} workloads, {gflop:.2f} GFLOP per inference")
        if not request.fresh:
            kind = request.board_type.name
            self._recalled = sum(
                len(self._store.trials.fetch_known_candidates(each.hash, kind, DEFAULT_POINT, place.simulated))
                for each in self._workloads
            )
        self._submitted_at = time.monotonic()
        if self._recalled:
            self._note(f"starting from {self._recalled} candidates measured by earlier runs (--fresh would not)")
        return one_model.submit(request, place, survey, self._workloads, self._store, self._settings, name_user())

    @contextlib.contextmanager
    def _warming(self) -> Iterator[None]:
        """Use the linker for the first time beside the block, where that would disturb this machine's measurements."""
        if not self._place.is_host:
            yield
            return
        home = self._settings.home_path
        folder = home / "cache" / "warm"
        folders.make_private(folder)
        triple = self._request.board_type.link_triple or ""
        command = python_command("-c", _WARM_LINKER, str(folder), triple)
        warming = children.start(command, home / "logs" / "linker.log", os.environ)
        try:
            yield
            with contextlib.suppress(subprocess.TimeoutExpired):
                warming.wait(_WARM_TIMEOUT_S)
        finally:
            children.stop(warming)

    def _note_end(self, name: str | None, reason: str) -> None:
        """Note why a campaign that is not over stops here."""
        # A full store refuses this too; the first error is the one to report.
        with contextlib.suppress(FarmError):
            campaign = None if name is None else self._store.campaigns.require(name)
            if campaign is not None and not campaign.over and campaign.state is not CampaignState.PAUSED:
                begun = self._has_begun(campaign)
                after = CampaignState.INTERRUPTED if begun else CampaignState.CANCELLED
                self._store.campaigns.note(campaign.id, after, reason)
                control.recount_campaign(self._store, campaign.name)

    @contextlib.contextmanager
    def _letting_go(self, me: Mapping[str, Any]) -> Iterator[None]:
        """Pass other users' campaigns to another engine after the block."""
        home = self._settings.home_path
        try:
            yield
        finally:
            withdraw(home)
            with contextlib.suppress(FarmError):
                left = [each for each in self._store.campaigns.fetch(over=False) if each.engine == me]
                for each in left:
                    after = each.state if each.state is CampaignState.PAUSED else CampaignState.SUBMITTED
                    self._store.campaigns.note(each.id, after, each.reason or "waits for an engine", {})

    def hand_over(self) -> None:
        """Start an engine for other users' campaigns, if there are any; this process must be none any more."""
        me = process_identity()
        with contextlib.suppress(FarmError):
            left = self._store.campaigns.fetch(over=False)
            if any(control.needs_engine(each) and not control.is_anothers(self._store, each, me) for each in left):
                client.spawn_engine(self._settings)

    def _has_begun(self, campaign: FleetCampaign) -> bool:
        """Whether it has a trial; progress is written at intervals and may not show it yet."""
        return any(self._store.trials.count(campaign.id).values())

    def _has_ended(self, name: str) -> bool:
        """Read its state at intervals: the engine's loop asks after every step."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_S
        return self._look(self._store.campaigns.require(name))

    def _look(self, campaign: FleetCampaign) -> bool:
        """Show its progress; return whether it has ended. Raises UnavailableError where no board was free in time."""
        now = time.monotonic()
        if is_settled(campaign):
            self._listener.finish(campaign)
            return True
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
        return False

    def _conclude(self, name: str | None) -> Tuned:
        if name is None:
            return self._conclude_without()
        store = self._store
        campaign = store.campaigns.require(name)
        if campaign.state is not CampaignState.FINISHED:
            raise find_error(campaign) or UnavailableError(f"campaign {name} is {campaign.state}")
        columns = ("board", "fault_side", "held_s", "recorded_at", "outcome")
        rows = store.trials.fetch(campaign.id, purpose=SEARCH_TRIAL, columns=columns)
        good = [row for row in rows if row["fault_side"] is None]
        boards = Counter(row["board"] for row in good or rows if row["board"])
        progress = campaign.progress or {}
        counts = store.trials.count(campaign.id, purpose=SEARCH_TRIAL)
        tasks = tuple(task if self._request.fresh else self._with_known(task) for task in progress["tasks"])
        parts = [task["weight"] * task["best_s"] for task in tasks if task["best_s"] is not None]
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
            latency_s=math.fsum(parts) if len(parts) == len(tasks) else None,
            recalled=self._recalled,
            seconds_to_first_trial=None if first is None else first - began,
            seconds_starting=self._submitted_at - self._request.since,
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
        return {**task, "best_s": min((row["median_s"] for row in rows if row["median_s"] is not None), default=None)}

    def _conclude_without(self) -> Tuned:
        """Return the result where nothing of the model can be tuned."""
        store, request = self._store, self._request
        kind, source = request.board_type.name, request.model.source
        campaign = store.campaigns.start(request.command, source.name, source.sha256, kind, request.trials, {})
        store.campaigns.finish(campaign, "finished")
        target = one_model.to_form(request, self._place).to_target()
        trials = store.trials.count(campaign)
        board = self._find_board(Counter())
        return Tuned(campaign, "", board, target, (), (), trials, {}, None, 0, None, 0.0, 0.0, (), ())

    def _find_board(self, measured: Counter[str]) -> Mapping[str, Any]:
        name = measured.most_common(1)[0][0] if measured else next(iter(self._place.boards), "")
        rows = {row["name"]: row for row in self._store.boards.fetch()}
        kind = self._request.board_type.name
        mine = (row for row in rows.values() if row["board_type"] == kind)
        return rows.get(name) or next(mine, {"name": None, "board_type": kind, "simulated": self._place.simulated})
