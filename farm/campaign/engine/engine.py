"""Run campaigns: report to the scheduler, carry out what it decides, write every trial before it counts.

One loop on one thread owns all state. It polls boards, builds, searches and verification, and never waits for one.
`farm.campaign.scheduler` decides what is done next; `orders` reads campaigns and requests from the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from device_agent.protocol import FaultSide, Outcome, Status
from farm.campaign.engine import boards, builds, searches
from farm.campaign.engine.active import Active, to_measure_spec
from farm.campaign.engine.board_keeping import BoardsAsked
from farm.campaign.engine.control import is_expected, needs_engine
from farm.campaign.engine.host import BOARD_TYPE, HostBoard, KeptServices
from farm.campaign.engine.orders import CampaignOrders
from farm.campaign.engine.ray_nodes import farm_ray
from farm.campaign.engine.roster import Roster
from farm.campaign.engine.verifying import Verifying
from farm.campaign.scheduler import events
from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.scheduler import step
from farm.campaign.scheduler.state import Assignment, CampaignEntry, Job, SchedulerSettings, SearchRequest, Task
from farm.campaign.scheduler.state import Status as CampaignStatus
from farm.crew.held_board import Ended
from farm.errors import InternalError
from farm.search.codegen.build_pool import BuildResult
from farm.search.tuners.decisions import Candidate
from farm.settings import Settings
from farm.store import Store
from farm.values import Trial

# How long the loop waits while nothing finishes; orders, leases and deadlines are checked that often.
_TICK_S = 0.2

_log = logging.getLogger(__name__)


def run_engine(
    settings: Settings, store: Store, stopping: Callable[[], bool], note: Callable[[str], None], for_host: bool = False
) -> None:
    """Run the store's campaigns until none is left or `stopping` returns true; `note` gets messages.

    Running campaigns then stay as they are in the store. `for_host`: the command that started this engine is about to
    submit a campaign for this machine, whose agent starts at once. Raises UnavailableError where a part of the farm is
    missing.
    """
    orders = [each.order for each in store.campaigns.fetch(over=False)]
    expected = is_expected()
    on_host = for_host and expected
    only_host = on_host or (orders and not expected and all(of.is_host for order in orders for of in order.types))
    settings.share_linker_cache()
    with contextlib.ExitStack() as stack:
        host = HostBoard(settings, store, note)
        stack.callback(host.close)
        if on_host:  # before Ray, which takes the cores that are left
            host.open()
        cores = len(os.sched_getaffinity(0))
        services = stack.enter_context(KeptServices(settings, note, () if only_host else None))
        stack.enter_context(farm_ray(settings, cores))
        engine_boards = stack.enter_context(boards.EngineBoards(services, store, note, host))
        compilers = stack.enter_context(builds.BuildFarm(settings, settings.builds_path, cores))
        engine = CampaignEngine(settings, store, engine_boards, compilers, note, services.need)
        stack.callback(engine.close)
        if expected:
            engine.prepare(on_host)
        # The loop leaves boards that no campaign wants.
        while on_host and is_expected() and not stopping():
            if any(map(needs_engine, store.campaigns.fetch(over=False))):
                break
            time.sleep(_TICK_S)
        engine.run(stopping)


class CampaignEngine:
    """All campaigns of one farm, and the worker of their scheduler. Not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        engine_boards: boards.EngineBoards,
        compilers: builds.BuildFarm,
        note: Callable[[str], None],
        need: Callable[[Collection[str]], None] = lambda names: None,
    ) -> None:
        """`need` connects boards by name."""
        self._store, self._boards, self._compilers = store, engine_boards, compilers
        self._searches = searches.Searches(self._tell, settings.home_path / "logs")
        self.fleet = FleetState(
            SchedulerSettings(batch=settings.batch, warmup=settings.warmup, builders=compilers.workers), self
        )
        self._roster = Roster(store, engine_boards, self.fleet, need)
        self._verifying = Verifying(settings, store, self.fleet, self._roster, engine_boards, compilers, self._searches)
        self._orders = CampaignOrders(settings, store, self.fleet, self._roster, self._verifying, self._searches, note)
        # Running campaigns by name.
        self.active: dict[str, Active] = self._orders.active
        # Measurements under way, by assignment; measurements and builds that ended, to be reported.
        self._measuring: dict[int, Future[Ended]] = {}
        self._ended: deque[tuple[Assignment | Job, Future[Any]]] = deque()
        # Trials that count and are not written yet, with their jobs and latencies.
        self._counted: list[tuple[Trial, Job, float | None]] = []

    def prepare(self, on_host: bool) -> None:
        """Prepare for a campaign that is about to be ordered: its search's process, and this machine's session."""
        self._searches.prepare()
        if on_host:
            self._boards.want([BoardsAsked("", "", BOARD_TYPE, frozenset({self._boards.want_host(True)}))])
            self._boards.poll()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Run until nothing is left to do."""
        while not stopping():
            expected = is_expected()
            self._orders.poll()
            idle = self._orders.idle  # read now: the next lines take seconds where this machine's agent is started
            self._gather()
            step(self.fleet, time.monotonic())
            self._verifying.step()
            self._orders.report()
            if idle and not self._verifying.busy and not expected:
                return
            self._boards.bell.wait(_TICK_S, [*self._compilers.pending, *self._searches.pending])

    def close(self) -> None:
        """End searches and drop campaigns."""
        self._verifying.close()
        self._searches.close_all()
        self._orders.release()

    # What happened

    def _gather(self) -> None:
        """Report to the scheduler what happened since the last call."""
        fleet = self.fleet
        fleet.now_s = time.monotonic()
        self._roster.want(self.active.values())
        for name, priority in self._boards.priorities().items():
            if name in fleet.campaigns and fleet.campaigns[name].priority != priority:
                events.change_priority(fleet, name, priority)
        reports = self._boards.poll()
        self._compilers.poll()
        self._verifying.poll()
        while self._ended:
            of, ended = self._ended.popleft()
            if isinstance(of, Job):
                self._on_built(of, ended.result())
            elif self._measuring.pop(of.number, None) is not None and not ended.cancelled():
                self._on_measured(of, ended.result())
        # Together: a check that goes on must find none of them.
        self._verifying.take([report.board for report in reports if not isinstance(report, boards.Arrived)])
        for report in reports:
            if isinstance(report, boards.Arrived):
                self._roster.arrive(report)
            elif isinstance(report, boards.Left):
                self._roster.leave(report)
            else:
                self._roster.yields(report.board)
        self._write_counted()  # before a search that starts again reads what is known
        for answer in self._searches.poll():
            if answer.candidates is None:
                events.search_failed(fleet, answer.request, answer.reason)
            else:
                events.proposed(fleet, answer.request, answer.candidates, answer.exhausted)

    def _on_built(self, job: Job, result: BuildResult) -> None:
        if job.number not in self.fleet.jobs:
            return
        job.build_s, side = result.seconds, result.status.fault_side
        job.outcome, job.held_s = Outcome(result.status, result.message, started_at=time.time()), None
        if result.status is Status.OK:
            job.library, job.sha256 = result.library, result.sha256
            # Thousands of built candidates may wait for boards: they need their modules no more.
            job.candidate = dataclasses.replace(job.candidate, module_json="")
        elif side is not FaultSide.CANDIDATE:
            self._store.trials.add(self._to_trial(job, job.outcome))
        events.built(self.fleet, job.number, side)

    def _on_measured(self, assignment: Assignment, ended: Ended) -> None:
        job, outcome = assignment.job, ended.result
        side = outcome.status.fault_side
        job.outcome, job.held_s = outcome, ended.board_s
        if side not in (None, FaultSide.CANDIDATE):
            self._store.trials.add(self._to_trial(job, outcome))
        latency_s = None if side or not outcome.latency_s else statistics.median(outcome.latency_s)
        energy_j = self._find_active(job.task).find_energy_j(assignment.board.name, outcome, ended.board_s)
        events.measured(self.fleet, assignment.number, side, ended.board_s, latency_s, energy_j)

    def _find_active(self, task: Task) -> Active:
        return self.active[task.key.campaign]

    def _to_trial(self, job: Job, outcome: Outcome) -> Trial:
        """Return an attempt as it is to be written, and count its fault."""
        task, active = job.task.key, self._find_active(job.task)
        if outcome.status.fault_side is not None:
            active.count_fault(outcome.status.fault_side)
        return Trial(
            campaign=active.id,
            workload=task.workload,
            candidate=job.candidate.hash,
            operating_point=task.point,
            attempt=active.next_attempt(job),
            outcome=outcome,
            trace_json=job.candidate.trace_json,
            library_sha256=job.sha256,
            build_s=job.build_s,
            held_s=job.held_s,
            board_type=task.board_type,
        )

    def _write_counted(self) -> None:
        """Write the trials that count, all at once, and only then let searches learn from them.

        Raises what the store raises: nothing goes on without it.
        """
        counted, self._counted = self._counted, []
        if counted and self._store.trials.add_several([trial for trial, _, _ in counted]) < len(counted):
            raise InternalError(f"one of {len(counted)} trials was counted already")
        for trial, job, latency_s in counted:
            task, lane, active = job.task, job.task.lane, self._find_active(job.task)
            active.forget(job)
            active.note_clocks(lane, trial.outcome)
            self._searches.observe(task.key, [(job.candidate.hash, latency_s)])
            heaviest = max(lane.of_type.workloads, key=lambda each: each.flop)
            if latency_s is not None and job.library is not None and task.workload is heaviest:
                self._roster.offer_reference_kernel(lane, to_measure_spec(job, latency_s), job.library)

    # What to do: the scheduler's worker

    def search(self, request: SearchRequest) -> None:
        self._searches.ask(request.number, request.task.key, request.count)

    def build(self, job: Job) -> None:
        built = self._compilers.submit(job.candidate.module_json, job.task.lane.of_type.target)
        built.add_done_callback(functools.partial(self._note_end, job))

    def measure(self, assignment: Assignment) -> None:
        job, lane = assignment.job, assignment.job.task.lane
        if job.library is None:
            raise InternalError(f"job {job.number} went to a board before it was built")
        spec = to_measure_spec(job, job.task.best_s)
        measured = self._boards.measure(assignment.board.name, lane.of_type.points[lane.point], spec, job.library)
        self._measuring[assignment.number] = measured
        measured.add_done_callback(functools.partial(self._note_end, assignment))

    def revoke(self, assignment: Assignment) -> None:
        if (measured := self._measuring.pop(assignment.number, None)) is not None:
            measured.cancel()

    def _note_end(self, of: Assignment | Job, ended: Future[Any]) -> None:
        """Have the loop report it, where errors are not lost."""
        self._ended.append((of, ended))
        self._boards.bell.ring()

    def count(self, job: Job, latency_s: float | None) -> None:
        if job.outcome is None:
            raise InternalError(f"job {job.number} counts and has no outcome")
        self._counted.append((self._to_trial(job, job.outcome), job, latency_s))

    def drop(self, task: Task, candidate: Candidate, banned: str) -> None:
        if banned:
            self._tell("banned", task.key.campaign, f"{candidate.hash}: {banned}")
        self._searches.forget(task.key, candidate.hash)

    def change(self, campaign: CampaignEntry) -> None:
        self._orders.change(campaign)
        if campaign.status is CampaignStatus.FINISHED:
            self._verifying.begin(self.active[campaign.name])

    def _tell(self, kind: str, subject: str, message: str) -> None:
        """Log and keep an event."""
        if kind == "warm_start" and subject in self.active:
            name, _, said = message.partition(": ")
            self.active[subject].warm[name] = said
        _log.info("%s %s: %s", kind, subject, message, extra={"campaign": subject})
        self._store.events.add(kind, subject, message)
