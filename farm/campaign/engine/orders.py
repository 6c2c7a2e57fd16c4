"""Read operators' requests from the store, and write there how far campaigns are.

Between two engines a campaign exists in the store alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from farm.campaign.engine.active import Active
from farm.campaign.engine.progress import (
    fetch_foreign,
    fetch_recorded,
    merge_faults,
    sum_latencies,
    to_campaign,
    to_progress,
    to_search_task,
)
from farm.campaign.engine.roster import Roster
from farm.campaign.engine.searches import Known, Searches
from farm.campaign.engine.verifying import Verifying
from farm.campaign.plan_estimate import leave_room, leave_search_s
from farm.campaign.scheduler import events
from farm.campaign.scheduler.fleet import FleetState
from farm.campaign.scheduler.state import GOING, OVER, CampaignEntry, Status, Task, TaskKey
from farm.errors import StoreFaultError, UsageError
from farm.processes.machine import is_gone, process_identity
from farm.search.tuners.decisions import ForeignTrial, SearchTask
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, FleetCampaign, Order
from farm.values import SEARCH_TRIAL

# How often the store is read and written. An operator waits for the sum at most.
_LOOK_S = 0.5
_REPORT_S = 1.0
# How long an engine without work lingers before it ends.
_LINGER_S = 2.0
_BEGIN = ("submitted",)


class CampaignOrders:
    """The running campaigns (`active`, by name), and their requests in the store."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        fleet: FleetState,
        roster: Roster,
        verifying: Verifying,
        searches: Searches,
        note: Callable[[str], None],
    ) -> None:
        self._settings, self._store, self._fleet, self._note = settings, store, fleet, note
        self._roster, self._verifying, self._searches = roster, verifying, searches
        self.active: dict[str, Active] = {}
        self._look_at = self._report_at = 0.0
        self._idle_since = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether there was no running campaign for a while; paused ones do not count."""
        return time.monotonic() - self._idle_since > _LINGER_S

    def poll(self) -> None:
        """Pass new requests on to the scheduler."""
        self._fleet.now_s = now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            rows = self._store.campaigns.fetch(over=False)
            mine = {row.name for row in rows if row.engine == process_identity()}
            if lost := sorted(self.active.keys() - mine):
                raise StoreFaultError(f"this engine gave no heartbeat for too long, and lost {', '.join(lost)}")
            for row in rows:
                self._hear(row)
        if any(active.campaign.status is not Status.PAUSED for active in self.active.values()):
            self._idle_since = time.monotonic()  # a campaign takes seconds to begin

    def change(self, campaign: CampaignEntry) -> None:
        """Write a campaign's new status. One that is over is dropped, unless its verification is still open."""
        name, reason = campaign.name, campaign.reason
        active = self.active[name]
        if campaign.status is Status.WAITING:
            self._explain(active)
            return
        active.alone_since = active.absence = None
        # The scheduler's part ends with the search; for people it ends with verification.
        status = "verifying" if campaign.status is Status.FINISHED else str(campaign.status)
        self._store.campaigns.note(active.id, status, reason)
        if campaign.status is Status.PAUSED:
            # Where no operator asked for it: so that an operator's resume is something new.
            self._store.campaigns.want(name, "pause", "its engine")
        self._note(f"{name} is {status}" + (f": {reason}" if reason else ""))
        if campaign.status is Status.CANCELLED:
            self._leave(active.name)
        self._report_at = 0.0

    def _explain(self, active: Active) -> None:
        """Write why a campaign has no board, if that changed."""
        state, reason = self._roster.explain_absence(active)
        if active.absence != (state, reason):
            active.absence = (state, reason)
            self._store.campaigns.note(active.id, state, reason)
            self._note(f"{active.name} is {state}" + (f": {reason}" if reason else ""))
            self._report_at = 0.0

    def report(self) -> None:
        """Write the progress of all campaigns, at intervals."""
        now, verifying = time.monotonic(), self._verifying
        ended = verifying.take_ended()
        if now < self._report_at and not ended:
            return
        self._report_at = now + _REPORT_S
        for active in list(self.active.values()):
            if active.campaign.status is Status.WAITING:
                self._explain(active)
            phase = "verifying" if verifying.is_open(active.name) else str(active.campaign.status)
            phase, _ = active.absence or (phase, "")
            if active.name in ended:
                active.recorded, active.decided = fetch_recorded(self._store, active.order), True
            boards, winners = self._roster.list_boards(active), verifying.to_progress(active)
            progress = to_progress(active, boards, phase, now, winners)
            active.note_history(progress["counted"], sum_latencies(progress["tasks"]))
            progress["verdict"] = verifying.to_verdict(active)
            progress["search_s"] = active.searched_s + self._searches.get_busy_s(active.name)
            if active.name in ended:
                self._store.campaigns.save_progress(
                    active.id, progress | {"phase": "done", "eta_s": None, "boards": []}
                )
                reason = self._store.campaigns.require(active.name).reason
                self._store.campaigns.note(active.id, "finished", reason)
                self._note(f"{active.name} is finished: {reason}")
                self._leave(active.name)
            else:
                self._store.campaigns.save_progress(active.id, progress)

    def release(self) -> None:
        """Write that paused campaigns have no engine. The process does so for the others."""
        for row in self._store.campaigns.fetch(over=False):
            if row.name in self.active and row.state == "paused":
                self._store.campaigns.note(row.id, "paused", row.reason, {})

    def _hear(self, row: FleetCampaign) -> None:
        """Carry out what is asked of a campaign."""
        active = self.active.get(row.name)
        if active is None:
            if row.state in _BEGIN and row.wanted == "run":
                # another host's engine may be asking, too
                if self._store.campaigns.take(row.id, process_identity()):
                    try:
                        self._begin(row)
                    except UsageError as error:
                        self._leave(row.name)
                        self._store.campaigns.note(row.id, "failed", error.message)
                        self._note(f"{row.name}: {error.message}")
            elif row.state in _BEGIN:
                self._store.campaigns.note(
                    row.id, "cancelled" if row.wanted == "cancel" else "paused", "before it had begun"
                )
            return
        status = active.campaign.status
        if is_gone(active.process):
            active.process = None  # an operator may resume it
            with contextlib.suppress(UsageError):
                row = self._store.campaigns.want(row.name, "pause", "its command, which was killed")
        if row.wanted != "run" and status is Status.FINISHED:
            self._verifying.stop(row.name)
            # Without an engine, so that a resume submits it anew.
            after = "cancelled" if row.wanted == "cancel" else "paused"
            self._store.campaigns.note(row.id, after, "while winners were looked for", {})
            self._leave(row.name)
        if status in OVER:
            return
        if row.wanted == "cancel":
            events.cancel(self._fleet, row.name)
            return
        if row.wanted == "pause" and status in GOING:
            events.pause(self._fleet, row.name)
        if row.wanted == "run" and status is Status.PAUSED:
            events.resume(self._fleet, row.name)
        if row.budget != active.budget:
            active.budget = row.budget
            events.change_budget(self._fleet, row.name, to_search_budget(row.budget, active.order))

    def _begin(self, row: FleetCampaign) -> None:
        """Begin a campaign, or continue where it left off."""
        order = row.order
        counted = self._store.totals.fetch_course(row.id)
        progress = row.progress or {}
        breakers = self._store.trials.fetch_board_breakers(row.id, self._fleet.settings.max_losses)
        campaign = to_campaign(
            order,
            to_search_budget(row.budget, order),
            counted,
            self._store.trials.fetch_board_seconds(row.id),
            breakers,
            float(progress.get("energy_j", 0.0)),
        )
        active = Active(row.id, campaign, dict(self._store.trials.fetch_attempts(row.id)))
        counts = self._store.trials.count(row.id, purpose=SEARCH_TRIAL)
        active.faults = merge_faults(counts, progress)
        active.history = [(number, dict(sums)) for number, sums in progress.get("history", [])]
        active.warm = dict(progress.get("warm_start", {}))
        active.searched_s = float(progress.get("search_s", 0.0))
        active.recorded = fetch_recorded(self._store, order)
        active.process = order.process if row.progress is None else None
        self.active[row.name] = active
        active.budget = row.budget
        self._open_search(active)
        self._store.campaigns.note(row.id, "running", "", process_identity())
        self._note(f"{row.name}: {len(campaign.tasks)} workloads to search, {len(counted)} trials exist")
        self._fleet.now_s = time.monotonic()
        events.add_campaign(self._fleet, campaign, float(progress.get("wall_clock_s", 0.0)))

    def _open_search(self, active: Active) -> None:
        order = active.order
        workloads = {(each.board_type, each.hash): each for each in self._store.workloads.fetch(active.id)}
        tasks = {task.key: task for task in active.campaign.tasks}

        def read(key: TaskKey) -> tuple[SearchTask, list[Known], list[tuple[str, str]], list[ForeignTrial]]:
            task = tasks[key]
            known = self._recall(active, task)
            candidates = [job.candidate for job in self._fleet.jobs.values() if job.task.key == key]
            under_way = [(each.hash, each.trace_json) for each in candidates]
            foreign = fetch_foreign(self._store, task) if order.search.warm_start else []
            return to_search_task(workloads[key.board_type, key.workload], task), known, under_way, foreign

        settings = {
            "tuner": order.search.tuner,
            "loss": order.search.loss,
            "seed": order.search.seed,
            "population": self._settings.population,
            "generations": self._settings.generations,
            # A host that is the board rests while it measures, and has all cores.
            "threads": len(os.sched_getaffinity(0)) if any(of.is_host for of in order.types) else 1,
        }
        self._searches.open(order.name, settings, read)

    def _recall(self, active: Active, task: Task) -> list[Known]:
        """Return what is known of a task: all trials of exactly this task, or only this campaign's."""
        key = task.key
        if active.order.search.warm_start:
            simulated = task.lane.of_type.simulated
            known = self._store.trials.fetch_known_candidates(key.workload, key.board_type, key.point, simulated)
        else:
            known = self._store.trials.fetch_counted(active.id, (key.board_type, key.workload, key.point))
        return [(each.candidate, each.trace_json, each.median_s) for each in known]

    def _leave(self, name: str) -> None:
        self.active.pop(name, None)
        self._searches.close(name)


def to_search_budget(budget: Budget, order: Order) -> Budget:
    """Return the search's part of a budget: verification needs board-hours, energy and wall clock too."""
    wall_clock_s = leave_search_s(order, budget.wall_clock_s)
    return budget.change(
        {"board_s": leave_room(budget.board_s), "wall_clock_s": wall_clock_s, "energy_j": leave_room(budget.energy_j)}
    )
