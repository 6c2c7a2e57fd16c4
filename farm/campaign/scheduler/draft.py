"""A fleet's state while one call of the scheduler works on it: the steps that events and decisions are made of.

A draft belongs to one call and never leaves it; the state that it began from stays as it was. Which step to take is
decided in `events`, `dispatch` and `supply`; tables and boards are in `edit`.
"""

from __future__ import annotations

from farm.campaign.scheduler.edit import AGAIN, BUILDING, ON_BOARD, Edit
from farm.campaign.scheduler.state import CampaignEntry, JobEntry, Pool, change
from farm.campaign.scheduler.values import OVER, Ban, Changed, Count, Discard, Status, TaskEnded


class Draft(Edit):
    """A state that is being changed at one moment, `now_s`."""

    # Jobs

    def queue(self, job_number: int, stage: str) -> None:
        """Put a job into a queue of its lane; it must be in none. A job of a workload that ended is discarded."""
        job = self.jobs[job_number]
        if self.tasks[job.task].closed:
            self.jobs[job_number] = change(job, stage=ON_BOARD)
            self.discard(job_number, "its workload ended")
            return
        lane = self.lane_of(job)
        self.jobs[job_number] = change(job, stage=stage, since_s=self.now_s)
        self.set_lane(lane.number, **{stage: (*getattr(lane, stage), job_number)})

    def requeue(self, job_number: int) -> None:
        """Let a job that a board did not finish go to another, unless another has it already."""
        if not self.jobs[job_number].assignments:
            self.queue(job_number, AGAIN)

    def discard(self, job_number: int, reason: str) -> None:
        """Give a job up, wherever it is; its place goes back to the budget."""
        job = self._close(job_number, reason)
        self.decisions.append(Discard(job_number, self.tasks[job.task].key, job.candidate, reason))
        self.give_back(job.task, 1)

    def ban(self, job_number: int, reason: str) -> None:
        """Give up a job for good: its candidate is not taken again."""
        job = self._close(job_number, reason)
        task = self.tasks[job.task]
        self.set_task(job.task, banned=task.banned | {job.candidate})
        self.decisions.append(Ban(job_number, task.key, job.candidate, reason))
        self.give_back(job.task, 1)

    def _close(self, job_number: int, reason: str) -> JobEntry:
        for number in self.jobs[job_number].assignments:
            self.revoke(number, reason)
        self.unqueue(job_number)
        return self.jobs.pop(job_number)

    def give_back(self, task_number: int, count: int) -> None:
        """Return trials that were asked for and did not come to be."""
        if not count:
            return
        task = self.tasks[task_number]
        state = change(task.state, asked=task.state.asked - count)
        self.tasks[task_number] = change(task, open=task.open - count, state=state)
        campaign = self.campaign_of(task)
        self.set_campaign(task.key.campaign, open=campaign.open - count)
        self.may_ask_again(campaign)

    def may_ask_again(self, campaign: CampaignEntry) -> None:
        """Lanes of a campaign that had nothing to ask for may have something now."""
        for number in campaign.lanes:
            if self.lanes[number].dry:
                self.set_lane(number, dry=False)

    # Trials

    def count(self, job_number: int, assignment: int | None, latency_s: float | None) -> None:
        """Count a trial, once: whoever else has the job is told to leave it."""
        job = self._close(job_number, "another board was first")
        task = self.tasks[job.task]
        campaign = self.campaign_of(task)
        self.decisions.append(Count(job_number, assignment, task.key, job.candidate, latency_s))
        better = latency_s is not None and (task.best_s is None or latency_s < task.best_s)
        best_s = latency_s if better else task.best_s
        in_round, state = task.in_round + 1, task.state
        if in_round >= self.settings.batch or (len(state.best_s) == 0 and best_s is not None):
            in_round = 0
            if best_s is not None:
                # The scheduler of one model looks at the last two rounds only, and state must not grow with trials.
                state = change(state, best_s=(*state.best_s[-1:], best_s))
        since_best = 0 if better else task.since_best + 1
        self.tasks[job.task] = change(
            task,
            counted=task.counted + 1,
            open=task.open - 1,
            since_best=since_best,
            best_s=best_s,
            in_round=in_round,
            state=state,
        )
        self.campaigns[task.key.campaign] = change(
            campaign,
            counted=campaign.counted + 1,
            open=campaign.open - 1,
            since_best=0 if better else campaign.since_best + 1,
            faults_in_a_row=0,
            faulty=frozenset(),
        )
        patience = campaign.spec.early_stopping
        if patience is not None and since_best >= patience and not task.ended:
            self.end_task(job.task, f"no better one in {since_best} trials")

    # Ends

    def end_search(self, task_number: int, reason: str) -> None:
        """Search a workload no further; what was proposed is still measured."""
        task = self.tasks[task_number]
        self.tasks[task_number] = change(task, ended=reason, state=change(task.state, exhausted=True))
        self.decisions.append(TaskEnded(task.key, reason))
        # What was kept for it is there for others.
        self.may_ask_again(self.campaign_of(task))
        self.stale = True

    def end_task(self, task_number: int, reason: str) -> None:
        """End a workload. What boards measure of it now still counts; everything else is discarded."""
        self.end_search(task_number, reason)
        self.set_task(task_number, closed=True)
        for job in self.jobs.values():
            running = any(self.assignments[number].started_s is not None for number in job.assignments)
            # One that is being built is discarded when it comes out of the build, which cannot be stopped.
            if job.task == task_number and not running and job.stage != BUILDING:
                self.discard(job.number, "its workload ended")

    def set_status(self, name: str, status: Status, reason: str) -> None:
        """Change a campaign's status and say so."""
        self.set_campaign(name, status=status, reason=reason)
        self.decisions.append(Changed(name, status, reason))
        self.stale = True

    def jobs_of(self, name: str) -> list[JobEntry]:
        """A campaign's jobs, oldest first. Looks at all of them: not for every event."""
        return [job for job in self.jobs.values() if self.tasks[job.task].key.campaign == name]

    def end_campaign(self, name: str, status: Status, reason: str) -> None:
        """End a campaign: its jobs are discarded, its measurements revoked, its searches' answers will be late."""
        for job in self.jobs_of(name):
            self.discard(job.number, f"the campaign ended: {reason}")
        campaign = self.campaigns[name]
        for number in campaign.lanes:
            for task_number in self.lanes.pop(number).tasks:
                self.tasks.pop(task_number)
        for request in self.requests.values():
            if request.task not in self.tasks:
                self.requests.pop(request.number)
        for key, pool in self.pools.items():
            self.pools[key] = self._without(pool, campaign)
        self.set_campaign(name, lanes=(), open=0)
        self.set_status(name, status, reason)

    def _without(self, pool: Pool, campaign: CampaignEntry) -> Pool:
        """The pool without the accounts of a campaign that ended, and of its owner if that was the last one."""
        owner, name = campaign.spec.owner, campaign.spec.name
        others = any(
            other.spec.owner == owner and other.spec.name != name and other.status not in OVER
            for other in self.campaigns.values()
        )
        return change(
            pool,
            lanes=tuple(n for n in pool.lanes if n not in campaign.lanes),
            owner_used={key: used for key, used in pool.owner_used.items() if others or key != owner},
            campaign_used={key: used for key, used in pool.campaign_used.items() if key != name},
            lane_used={key: used for key, used in pool.lane_used.items() if key not in campaign.lanes},
        )
