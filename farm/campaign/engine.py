"""Run one tuning: ask the scheduler, search, build, measure, write trials; every failure is attributed, none is lost.

One loop owns all state; search, builds and boards are Ray actors that it waits for. What is tried next is decided in
`scheduler`, what a candidate is in `farm.search`, what the answers mean in `device_agent.protocol`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from device_agent.protocol import FaultSide, Limits, MeasureSpec, Outcome, ProtocolError, Status, TensorSpec
from farm.campaign import engine_ray, scheduler
from farm.campaign.engine_parts import WORK_TIMEOUT_S, Parts
from farm.campaign.engine_ray import ActorLostError
from farm.campaign.engine_state import Job, Measurement, Search, Workload, begin_workload
from farm.errors import (
    BoardNonsenseError,
    BoardUnsafeError,
    DeadlineError,
    FarmError,
    InternalError,
    UnavailableError,
)
from farm.report.progress import Progress, WorkloadProgress
from farm.search.build_pool import BuildResult
from farm.store import Store
from farm.values import DEFAULT_POINT, Trial

# A trial that failed through no fault of the candidate is tried this often in all. A candidate that is there whenever
# a board goes down, or a compiler dies, is given up after that: twice is no accident.
MAX_ATTEMPTS = 3
MAX_LOSSES = 2
# So many trials in a row that failed through no fault of their candidates: nothing says that the next will not.
MAX_FAULTS_IN_A_ROW = 8
# After so many losses of the board in a row an agent that still runs is taken for stuck.
_LOSSES_TO_RESTART = 2
# For an answer that Ray has announced to arrive here.
_FETCH_TIMEOUT_S = 10.0
# How often everything is looked at when nothing finishes.
_TICK_S = 0.5


class Engine:
    """One tuning of one model on the boards of one farm. Not thread-safe."""

    def __init__(
        self,
        parts: Parts,
        store: Store,
        campaign: int,
        workloads: Sequence[Any],
        known: Mapping[str, list[tuple[str, str, float | None]]],
    ) -> None:
        """Begin with these workloads; `known` holds what earlier runs measured (hash -> candidate, trace, latency)."""
        self._parts, self._store, self._settings = parts, store, parts.settings
        self._campaign = campaign
        self._target = parts.target()
        self._known = {workload: list(items) for workload, items in known.items()}
        self._workloads = [begin_workload(workload, self._known.get(workload.hash, [])) for workload in workloads]
        self._searching: dict[Any, Search] = {}
        self._to_build: deque[Job] = deque()
        self._built: deque[Job] = deque()
        self._measuring: dict[Any, Measurement] = {}
        self._faults_in_a_row = 0
        self._losses_in_a_row = 0
        self._quiet_phase = False
        self._first_phase = True
        self.faults = {f"{side}_faults": 0 for side in FaultSide}
        self.first_trial_at: float | None = None
        self.overheads_s: list[float] = []
        self.history: list[tuple[int, float]] = []
        self._parts.open_search(workloads, self._known)

    def tune(self, budget: int, report: Callable[[Progress], None]) -> None:
        """Measure `budget` candidates (or all there are). Trials are in the store as soon as they are known.

        Raises UnavailableError where the board or the farm stays broken, or the store cannot be written.
        """
        self._budget = budget
        self._asked = 0
        self._started = time.monotonic()
        self._counted = 0
        while True:
            self._parts.look_after_farm()
            self._parts.look_after_search()
            self._dispatch()
            pending = [*self._searching, *self._parts.builds.pending, *self._measuring]
            if not pending:
                if not (self._to_build or self._built):
                    break
                if not self._parts.has_board:  # all is built, and nothing can be measured yet
                    time.sleep(_TICK_S)
                    report(self.progress())
                continue
            ready, _ = ray.wait(pending, num_returns=1, timeout=_TICK_S)
            for reference in ready:
                self._collect(reference)
            for job, result in self._parts.builds.expire():
                self._on_built(job, result)
            self._expire()
            report(self.progress())
        report(self.progress(finished=True))

    def progress(self, finished: bool = False) -> Progress:
        """How far the run is."""
        lines = tuple(
            WorkloadProgress(
                index=index,
                name=workload.spec.name,
                flop=workload.spec.flop,
                weight=workload.spec.weight,
                best_s=workload.best_s,
                trials=workload.trials,
                done=finished or workload.state.exhausted,
            )
            for index, workload in enumerate(self._workloads)
        )
        return Progress(
            workloads=lines,
            trials=self._counted,
            budget=self._budget,
            latency_s=scheduler.model_latency_s([w.state for w in self._workloads]),
            boards=1,
            boards_busy=int(bool(self._measuring)),
            faults=dict(self.faults),
            elapsed_s=time.monotonic() - self._started,
            phase=self._name_phase(finished),
        )

    def _name_phase(self, finished: bool) -> str:
        if finished:
            return "done"
        if self._measuring:
            return "measuring"
        return "searching and building" if self._parts.has_board else "waiting for a board"

    # Dispatch: what is started now

    def _dispatch(self) -> None:
        exclusive = self._settings.isolation == "exclusive"
        host_busy = bool(self._searching or self._parts.builds.pending or self._to_build)
        ahead = len(self._built) + len(self._parts.builds.pending) + len(self._to_build) + len(self._measuring)
        # Where the host is the board, work comes in phases: first fill the queue, then measure with the host quiet.
        # The first phase is one batch, so that the user sees a trial soon.
        goal = 1 if self._first_phase else 2 * self._settings.batch
        if exclusive:
            if self._quiet_phase and not self._built and not self._measuring:
                self._quiet_phase = self._first_phase = False
            elif not self._quiet_phase and not host_busy and self._built and (ahead >= goal or not self._may_search()):
                self._quiet_phase = True
        if not (exclusive and self._quiet_phase):
            if not self._searching and ahead < (goal if exclusive else 3 * self._settings.batch):
                self._start_search()
            while self._to_build and self._parts.builds.free:
                job = self._to_build.popleft()
                self._parts.builds.submit(job, job.candidate.module_json, self._target)
        if not exclusive or self._quiet_phase:
            # One runs, one waits at the board's actor, so that the board never waits for this loop.
            while self._built and len(self._measuring) < 2 and self._parts.has_board:
                self._start_measuring(self._built.popleft())

    def _may_search(self) -> bool:
        return scheduler.decide_next(self._states(), self._budget - self._asked, self._scheduling()) is not None

    def _start_search(self) -> None:
        decision = scheduler.decide_next(self._states(), self._budget - self._asked, self._scheduling())
        if decision is None:
            return
        index, count = decision
        self._asked += count
        workload = self._workloads[index]
        workload.state = dataclasses.replace(workload.state, asked=workload.state.asked + count)
        reference = self._parts.search.propose.remote(workload.spec.hash, count)
        self._searching[reference] = Search(index, count, time.monotonic() + WORK_TIMEOUT_S)

    def _start_measuring(self, job: Job) -> None:
        settings = self._settings
        spec = MeasureSpec(
            arguments=tuple(TensorSpec(shape, dtype) for shape, dtype in job.candidate.arguments),
            number=settings.measure_number,
            repeat=settings.measure_repeat,
            min_repeat_s=settings.measure_min_repeat_s,
            cold_weights=True,
            seed=settings.seed,
            limits=Limits(
                timeout_s=settings.measure_timeout_s,
                memory_bytes=settings.measure_memory_bytes,
                threads=self._parts.threads,
            ),
        )
        deadline = time.monotonic() + self._parts.call_timeout_s(spec.limits.timeout_s, len(job.library or b""))
        reference = self._parts.board.measure.remote(spec.to_json(), job.library)
        self._measuring[reference] = Measurement(job, self._parts.board, deadline, self._parts.held)

    # Collect: what has finished

    def _collect(self, reference: Any) -> None:
        if reference in self._searching:
            self._on_searched(reference, self._searching.pop(reference))
        elif reference in self._measuring:
            self._on_measured(reference, self._measuring.pop(reference))
        else:
            self._on_built(*self._parts.builds.collect(reference))

    def _expire(self) -> None:
        """Give up waiting for actors that are stuck; whoever waits for them finds them dead."""
        now = time.monotonic()
        for reference, search in list(self._searching.items()):
            if search.deadline < now:
                self._on_searched(reference, self._searching.pop(reference))
        for reference, measurement in list(self._measuring.items()):
            if measurement.deadline < now:
                self._on_measured(reference, self._measuring.pop(reference))

    def _on_searched(self, reference: Any, search: Search) -> None:
        workload = self._workloads[search.index]
        try:
            candidates = engine_ray.get(reference, f"searching {workload.spec.name}", _FETCH_TIMEOUT_S)
        except (ActorLostError, DeadlineError) as error:
            self._give_back(search.index, search.count)
            workload.search_losses += 1
            self._parts.restart_search()
            self._remember()
            self._parts.open_search([w.spec for w in self._workloads], self._known)
            if workload.search_losses >= MAX_LOSSES:
                self._leave(workload, error)
            return
        except FarmError as error:
            self._give_back(search.index, search.count)
            self._leave(workload, error)
            return
        self._give_back(search.index, search.count - len(candidates))
        if not candidates:
            workload.state = dataclasses.replace(workload.state, exhausted=True)
        workload.open += len(candidates)
        self._to_build.extend(Job(search.index, candidate) for candidate in candidates)

    def _leave(self, workload: Workload, error: FarmError) -> None:
        """Search a workload no further: what it does to the search it would do again. The others go on."""
        workload.state = dataclasses.replace(workload.state, exhausted=True)
        self._parts.event("search_failed", workload.spec.name, error.message)

    def _on_built(self, job: Job, result: BuildResult) -> None:
        job.build_s = result.seconds
        if result.status is Status.OK:
            job.library, job.sha256 = result.library, result.sha256
            self._built.append(job)
            return
        outcome = Outcome(result.status, result.message, started_at=time.time())
        if result.died:
            job.losses += 1
            if job.losses >= MAX_LOSSES:
                outcome = dataclasses.replace(
                    outcome, status=Status.BUILD_FAILED, message=f"took {job.losses} compilers down: {result.message}"
                )
        self._conclude(job, outcome, None)

    def _on_measured(self, reference: Any, measurement: Measurement) -> None:
        job, held_s = measurement.job, None
        try:
            text, held_s = engine_ray.get(reference, "the board's actor", _FETCH_TIMEOUT_S)
            outcome = Outcome.from_json(text)
        except (ActorLostError, DeadlineError) as error:
            outcome = Outcome(Status.FARM_ERROR, error.message, started_at=time.time())
            # Both calls of a dead actor come here; the second one finds a new actor in place.
            if measurement.actor is self._parts.board:
                self._parts.replace_board()
        except (BoardUnsafeError, BoardNonsenseError) as error:
            outcome = dataclasses.replace(self._parts.blame.judge_error(error), started_at=time.time())
        except (FarmError, ProtocolError) as error:
            outcome = Outcome(Status.FARM_ERROR, f"the board's actor failed: {error}", started_at=time.time())
        outcome = self._parts.blame.judge(outcome, measurement.held == self._parts.held)
        if outcome.status is Status.OK and held_s is not None:
            self.overheads_s.append(held_s - outcome.timing_s)
        if outcome.status is Status.BOARD_LOST:
            job.losses += 1
            self._losses_in_a_row += 1
            self._parts.event("board_lost", self._parts.site.key, outcome.message)
            if self._losses_in_a_row % _LOSSES_TO_RESTART == 0:
                self._parts.restart_agent()
        else:
            self._losses_in_a_row = 0
        self._conclude(job, outcome, held_s)

    def _conclude(self, job: Job, outcome: Outcome, held_s: float | None) -> None:
        """Write the trial; teach the search what the candidate itself is to blame for; try the rest again."""
        workload = self._workloads[job.index]
        trial = Trial(
            campaign=self._campaign,
            workload=workload.spec.hash,
            candidate=job.candidate.hash,
            operating_point=DEFAULT_POINT,
            attempt=job.attempt,
            outcome=outcome,
            trace_json=job.candidate.trace_json,
            library_sha256=job.sha256,
            build_s=job.build_s,
            held_s=held_s,
        )
        if not self._store.add_trial(trial):
            raise InternalError(f"trial {trial.workload}/{trial.candidate}/{trial.attempt} was there already")
        side = outcome.status.fault_side
        if side is not None:
            self.faults[f"{side}_faults"] += 1
        self._count_faults(outcome)
        if side in (None, FaultSide.CANDIDATE):
            if self.first_trial_at is None and side is None:
                self.first_trial_at = time.time()
            self._counted += 1
            workload.trials += 1
            self._learn(job, workload, trial.median_s)
        elif job.attempt < MAX_ATTEMPTS and job.losses < MAX_LOSSES:
            job.attempt += 1
            (self._to_build if job.library is None else self._built).append(job)
            return
        else:
            self._parts.event(
                "given_up", job.candidate.hash, f"{outcome.status} {job.attempt} times: {outcome.message}"
            )
            self._parts.forget(workload.spec.hash, job.candidate.hash)
            self._give_back(job.index, 1)
        workload.open -= 1
        if workload.open == 0 and workload.round_best_s is not None:
            best = min([workload.round_best_s, *workload.state.best_s[-1:]])
            workload.state = dataclasses.replace(workload.state, best_s=(*workload.state.best_s, best))
            workload.round_best_s = None
            if (latency := scheduler.model_latency_s(self._states())) is not None:
                self.history.append((self._counted, latency))

    def _count_faults(self, outcome: Outcome) -> None:
        """Raise UnavailableError once nothing has worked for a while: trying on would go on for ever."""
        if outcome.status.fault_side in (None, FaultSide.CANDIDATE):
            self._faults_in_a_row = 0
            return
        self._faults_in_a_row += 1
        if self._faults_in_a_row >= MAX_FAULTS_IN_A_ROW:
            raise UnavailableError(
                f"{self._faults_in_a_row} trials in a row failed through no fault of their candidates; "
                f"the last: {outcome.status}: {outcome.message}",
                "Finished trials are kept. `farm doctor` names the part that fails.",
            )

    def _learn(self, job: Job, workload: Workload, median_s: float | None) -> None:
        self._known.setdefault(workload.spec.hash, []).append((job.candidate.hash, job.candidate.trace_json, median_s))
        self._parts.observe(workload.spec.hash, [(job.candidate.hash, median_s)])
        if median_s is not None:
            workload.round_best_s = min(median_s, workload.round_best_s or median_s)

    # The rest

    def _remember(self) -> None:
        """Candidates under way are lost to the new search's memory; keep it from proposing them twice."""
        at_board = [measurement.job for measurement in self._measuring.values()]
        for job in [*self._to_build, *self._built, *at_board, *self._parts.builds.jobs]:
            self._known.setdefault(self._workloads[job.index].spec.hash, []).append(
                (job.candidate.hash, job.candidate.trace_json, None)
            )

    def _give_back(self, index: int, count: int) -> None:
        """Return unused trials to the budget."""
        if count:
            self._asked -= count
            workload = self._workloads[index]
            workload.state = dataclasses.replace(workload.state, asked=max(0, workload.state.asked - count))

    def _states(self) -> list[scheduler.WorkloadState]:
        return [workload.state for workload in self._workloads]

    def _scheduling(self) -> scheduler.SchedulerSettings:
        return scheduler.SchedulerSettings(self._settings.warmup, self._settings.batch)
