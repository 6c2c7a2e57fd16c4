"""Run campaigns: feed events to the scheduler, execute its decisions, write every trial before it counts.

One loop on one thread owns all state. It polls boards, builds, searches and verification, and never waits for one.
`farm.campaign.scheduler` decides what is done next; `orders` reads campaigns and requests from the store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

from device_agent.protocol import FaultSide, Outcome, Status
from farm.campaign.engine import boards, builds, searches
from farm.campaign.engine.active import Active, Work, to_measure_spec
from farm.campaign.engine.client import is_expected
from farm.campaign.engine.control import needs_engine
from farm.campaign.engine.host import BOARD_TYPE, HostBoard, KeptServices
from farm.campaign.engine.orders import CampaignOrders
from farm.campaign.engine.ray_nodes import farm_ray
from farm.campaign.engine.roster import Roster
from farm.campaign.engine.verifying import Verifying
from farm.campaign.scheduler import scheduler as fleet_scheduler
from farm.campaign.scheduler import values as v
from farm.campaign.scheduler.fleet import FleetState
from farm.errors import InternalError, UsageError
from farm.settings import Settings
from farm.store import Store
from farm.values import Trial


class Journal:
    """Writes trials. Raises what the store raises: the engine cannot go on without it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @staticmethod
    def find_median_s(outcome: Outcome) -> float | None:
        """Return the median latency of a good outcome in seconds."""
        if outcome.status.fault_side is not None or not outcome.latency_s:
            return None
        return statistics.median(outcome.latency_s)

    def write_counted(self, active: Active, work: Work, outcome: Outcome, held_s: float | None) -> None:
        """Write a trial that ended well or by its candidate's fault. Raises InternalError if it was counted before."""
        if not self.write(active, work, outcome, held_s):
            raise InternalError(f"trial {work.task} {work.candidate.hash} was counted already")
        active.forget(work.task, work.candidate.hash)

    def write(self, active: Active, work: Work, outcome: Outcome, held_s: float | None) -> bool:
        """Write an attempt; return whether it is new."""
        side = outcome.status.fault_side
        if side is not None:
            active.count_fault(side)
        return self._store.trials.add(
            Trial(
                campaign=active.id,
                workload=work.task.workload,
                candidate=work.candidate.hash,
                operating_point=work.task.point,
                attempt=active.next_attempt(work.task, work.candidate.hash),
                outcome=outcome,
                trace_json=work.candidate.trace_json,
                library_sha256=work.sha256,
                build_s=work.build_s,
                held_s=held_s,
                board_type=work.task.board_type,
            )
        )


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
        engine_boards = stack.enter_context(boards.EngineBoards(services, store, settings, "campaign", note, host=host))
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
    """All campaigns of one farm. Not thread-safe."""

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
        self._settings = settings
        self._store, self._boards, self._compilers, self._note = store, engine_boards, compilers, note
        self._journal = Journal(store)
        self._searches = searches.Searches(self._tell, settings.home_path / "logs")
        self._orders = CampaignOrders(settings, store, self._searches, self._list_under_way, note)
        self._roster = Roster(store, engine_boards, need)
        self._verifying = Verifying(settings, store, engine_boards, compilers, self._searches, self._tell)
        self._state = FleetState(
            v.SchedulerSettings(batch=settings.batch, warmup=settings.warmup, builders=compilers.workers)
        )
        # Running campaigns by name, and their searches' candidates until they count or are dropped.
        self.active: dict[str, Active] = self._orders.active
        self._works: dict[tuple[v.TaskKey, str], Work] = {}
        self._wake_s: float | None = None

    def prepare(self, on_host: bool) -> None:
        """Prepare for a campaign that is about to be ordered: its search's process, and this machine's session."""
        self._searches.prepare()
        if on_host:
            self._boards.want({BOARD_TYPE: [self._boards.want_host(True)]})
            self._boards.poll()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Run until nothing is left to do."""
        while not stopping():
            expected = is_expected()
            self._obey()
            idle = self._orders.idle  # read now: the next lines take seconds where this machine's agent is started
            events = self._gather()
            now_s = time.monotonic()
            if events or self._state.decisions or self._state.stale or (self._wake_s or now_s + 1.0) <= now_s:
                self._carry_out(fleet_scheduler.step(self._state, events, now_s))
            self._verifying.step(self._state, self._roster)
            self._orders.report(self._state, self._roster, self._verifying)
            if idle and not self._verifying.busy and not expected:
                return
            self._boards.bell.wait(_TICK_S, [*self._compilers.pending, *self._searches.pending])

    def close(self) -> None:
        """End searches and drop campaigns."""
        self._verifying.close()
        self._searches.close_all()
        self._orders.release()

    # What happened

    def _obey(self) -> None:
        """Pass on operators' requests one by one, so that an invalid one stops no other."""
        for event in self._orders.poll(self._state, self._verifying):
            try:
                fleet_scheduler.observe(self._state, [event], time.monotonic())
            except UsageError as error:
                self._orders.refuse(event, error)

    def _gather(self) -> list[v.Event]:
        events: list[v.Event] = [*self._verifying.poll()]
        events += self._roster.want(self.active.values(), self._state)
        events += [
            v.PriorityChanged(name, priority)
            for name, priority in self._boards.priorities().items()
            if name in self._state.campaigns and self._state.campaigns[name].spec.priority != priority
        ]
        for report in self._boards.poll():
            events += self._on_report(report)
        for built in self._compilers.poll():
            if not self._verifying.on_built(built):
                events += self._on_built(built)
        for answer in self._searches.poll():
            if isinstance(answer, searches.Replayed):
                self._verifying.on_replayed(answer)
            elif answer.candidates is None:
                events.append(v.SearchFailed(answer.request, answer.reason))
            else:
                events.append(self._on_proposed(answer))
        return events

    def _on_proposed(self, answer: searches.SearchAnswer) -> v.Event:
        candidates = answer.candidates or []
        request = self._state.requests.get(answer.request)
        if request is not None:
            task = self._state.tasks[request.task].key
            for candidate in candidates:
                self._works[task, candidate.hash] = Work(task, candidate)
        return v.Proposed(answer.request, tuple(each.hash for each in candidates), answer.exhausted)

    def _on_built(self, built: builds.BuildAnswer) -> list[v.Event]:
        job, result = built.job, built.result
        if not isinstance(job, int) or job not in self._state.jobs:
            return []
        work = self._find_work(job)
        work.build_s = result.seconds
        if result.status is Status.OK:
            work.library, work.sha256 = result.library, result.sha256
            return [v.Built(job)]
        outcome = Outcome(result.status, result.message, started_at=time.time())
        side = result.status.fault_side
        if side is FaultSide.CANDIDATE:
            work.failure = outcome
        else:
            self._journal.write(self.active[work.task.campaign], work, outcome, None)
        return [v.Built(job, side)]

    def _on_report(self, report: Any) -> list[v.Event]:
        """Translate a board's report for the scheduler."""
        if isinstance(report, boards.Arrived):
            return self._roster.arrive(report)
        if isinstance(report, boards.Left):
            self._verifying.take(report)
            return self._roster.leave(report)
        if isinstance(report, boards.AskedBack):
            self._verifying.take(report)
            return self._roster.yields(report)
        if isinstance(report, boards.Ran):
            self._verifying.on_ran(report)
            return []
        if self._verifying.on_measured(report):
            return []
        assignment = self._state.assignments.get(report.assignment)
        if assignment is None:
            return []
        work = self._find_work(assignment.job)
        active = self.active[work.task.campaign]
        side = report.outcome.status.fault_side
        energy_j = active.find_energy_j(report)
        if side in (None, FaultSide.CANDIDATE):
            work.measured[report.assignment] = report
            latency_s = self._journal.find_median_s(report.outcome)
            return [v.Measured(report.assignment, side, report.board_s, latency_s, energy_j)]
        self._journal.write(active, work, report.outcome, report.board_s)
        return [v.Measured(report.assignment, side, report.board_s, None, energy_j)]

    def _find_work(self, job: int) -> Work:
        entry = self._state.jobs[job]
        return self._works[self._state.tasks[entry.task].key, entry.candidate]

    def _list_under_way(self, task: v.TaskKey) -> list[tuple[str, str]]:
        """List hash and trace of a task's candidates that are built or measured now."""
        candidates = [work.candidate for work in self._works.values() if work.task == task]
        return [(each.hash, each.trace_json) for each in candidates]

    # What to do

    def _carry_out(self, decided: fleet_scheduler.Decided) -> None:
        self._wake_s = decided.wake_s
        for decision in decided.decisions:
            match decision:
                case v.Search():
                    self._searches.ask(decision.request, decision.task, decision.count)
                case v.Build():
                    self._build(decision)
                case v.Measure():
                    self._measure(decision)
                case v.Revoke():
                    self._boards.revoke(decision.assignment)
                case v.Count():
                    self._count(decision)
                case v.Discard() | v.Ban():
                    self._drop(decision)
                case v.TaskEnded():
                    self.active[decision.task.campaign].note_ended(decision.task, decision.reason)
                case v.Changed():
                    self._orders.change(decision, self._roster)
                    if decision.status is v.Status.FINISHED:
                        self._verifying.begin(self.active[decision.campaign])

    def _build(self, decision: v.Build) -> None:
        candidate = self._works[decision.task, decision.candidate].candidate
        target = self.active[decision.task.campaign].type_of(decision.task.board_type).target
        self._compilers.submit(decision.job, candidate.module_json, target)

    def _measure(self, decision: v.Measure) -> None:
        work = self._works[decision.task, decision.candidate]
        active = self.active[decision.task.campaign]
        task = self._state.tasks[self._state.jobs[decision.job].task]
        point = active.type_of(decision.task.board_type).points[decision.task.point]
        spec = to_measure_spec(active, work, task.best_s)
        if work.library is None:
            raise InternalError(f"job {decision.job} went to a board before it was built")
        self._boards.measure(decision.assignment, decision.board, point, spec, work.library)

    def _count(self, decision: v.Count) -> None:
        """Write a trial, and only then let the search learn from it."""
        work = self._works.pop((decision.task, decision.candidate))
        active = self.active[decision.task.campaign]
        report = None if decision.assignment is None else work.measured[decision.assignment]
        outcome = work.failure if report is None else report.outcome
        if outcome is None:
            raise InternalError(f"job {decision.job} counts and has no outcome")
        self._journal.write_counted(active, work, outcome, None if report is None else report.board_s)
        active.note_clocks(decision.task, outcome)
        active.note_counted(decision.task, decision.latency_s)
        self._searches.observe(decision.task, [(decision.candidate, decision.latency_s)])
        if decision.latency_s is not None and work.library is not None and active.is_heaviest(decision.task):
            point = active.type_of(decision.task.board_type).points[decision.task.point]
            self._roster.offer_reference_kernel(
                decision.task.board_type, point, to_measure_spec(active, work, decision.latency_s), work.library
            )

    def _drop(self, decision: v.Discard | v.Ban) -> None:
        self._works.pop((decision.task, decision.candidate), None)
        if isinstance(decision, v.Ban):
            self._tell("banned", decision.task.campaign, f"{decision.candidate}: {decision.reason}")
        self._searches.forget(decision.task, decision.candidate)

    def _tell(self, kind: str, subject: str, message: str) -> None:
        """Log and keep an event."""
        if kind == "warm_start" and subject in self.active:
            name, _, said = message.partition(": ")
            self.active[subject].warm[name] = said
        _log.info("%s %s: %s", kind, subject, message, extra={"campaign": subject})
        self._store.events.add(kind, subject, message)
