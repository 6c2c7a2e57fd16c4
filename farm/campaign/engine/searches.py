"""The searches of all running campaigns: one Ray actor each, restarted when it dies or hangs.

`farm.search.tuners.campaign_search` is the search; the scheduler decides how often it may fail.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray

from farm.campaign.engine import ray_calls
from farm.campaign.engine.ray_calls import ActorLostError
from farm.campaign.engine.ray_nodes import here
from farm.campaign.scheduler.values import TaskKey
from farm.errors import DeadlineError, FarmError
from farm.processes import home_log
from farm.search import tvm_env
from farm.search.tuners import campaign_search

# A candidate in earlier trials: hash, trace, latency (s) or None where it failed by its own fault.
Known = tuple[str, str, float | None]

# Opening a campaign replays hundreds of known candidates before the first answer.
ASK_TIMEOUT_S = 600.0
# In FARM_HOME/logs. For an answer that Ray has announced to arrive here.
_FETCH_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class SearchAnswer(NamedTuple):
    """A search's answer to a request: candidates, and whether it is exhausted; None: it died or hung, for `reason`."""

    request: int
    candidates: list[Any] | None
    exhausted: bool
    reason: str = ""


class Replayed(NamedTuple):
    """A trace's scheduled function in TVM's JSON; "" where there is none, with the reason.

    `job` is the argument of `replay`. `lost`: the search died.
    """

    job: Any
    module_json: str
    reason: str
    lost: bool = False


@dataclasses.dataclass(frozen=True)
class SearchPlan:
    """How a campaign searches. For a task, `recall` returns known results, `under_way` the candidates built or measured
    now (hash and trace), `foreign` the results of other tasks.
    """

    campaign: str
    settings: Mapping[str, Any]
    tasks: Mapping[TaskKey, Any]
    recall: Callable[[TaskKey], list[Known]]
    under_way: Callable[[TaskKey], list[tuple[str, str]]]
    foreign: Callable[[TaskKey], list[Any]]


class SearchActor:
    """A campaign's search in a Ray worker; see `farm.search.tuners.campaign_search.CampaignSearch`."""

    def __init__(self, logs: str) -> None:
        """`logs` is the folder of the home's log."""
        home_log.start_log("search", Path(logs))
        tvm_env.load()

    def serve(self, campaign: str, settings: Mapping[str, Any]) -> None:
        """Search for a campaign; the actor may have been started before there was one."""
        self._campaign, self._search = campaign, campaign_search.CampaignSearch(**settings)
        self._say("searches for %s", campaign)

    def open(
        self, key: str, task: Any, known: list[Known], under_way: list[tuple[str, str]], foreign: list[Any]
    ) -> tuple[str, list[str]]:
        """Make a task searchable from known results; return texts about its warm start, and other remarks."""
        self._search.open(key, task)
        warm = str(self._search.warm_start(key, foreign)) if foreign else ""
        if known:
            self._search.recall(key, known)
        if under_way:
            self._search.hold(key, under_way)
        return warm, self._search.remarks(key)

    def propose(self, key: str, count: int) -> tuple[list[Any], bool]:
        """See `CampaignSearch.propose`."""
        began = time.monotonic()
        candidates, exhausted = self._search.propose(key, count)
        after = ", the last ones" if exhausted else ""
        self._say("%s: %d candidates in %.2f s%s", key, len(candidates), time.monotonic() - began, after)
        return list(candidates), exhausted

    def observe(self, key: str, results: list[tuple[str, float | None]]) -> None:
        self._search.observe(key, results)

    def forget(self, key: str, candidate: str) -> None:
        self._search.forget(key, candidate)

    def replay(self, key: str, trace_json: str) -> str:
        return str(self._search.replay(key, trace_json))

    def _say(self, text: str, *values: object) -> None:
        _log.info(text, *values, extra={"campaign": self._campaign})


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request for candidates, its time and its deadline (monotonic, s)."""

    request: int
    task: TaskKey
    count: int
    asked_s: float

    @property
    def deadline_s(self) -> float:
        return self.asked_s + ASK_TIMEOUT_S


class Searches:
    """The searches by campaign. Not thread-safe; never waits."""

    def __init__(self, note: Callable[[str, str, str], None], logs: Path) -> None:
        """`note` gets events: kind, campaign, message; the searches write to `log`."""
        self._note, self._logs = note, logs
        self._spare: Any = None
        self._plans: dict[str, SearchPlan] = {}
        self._actors: dict[str, Any] = {}
        # The tasks that each actor has opened. Opening one takes a second or two: it is done on the first request.
        self._opened: dict[str, set[TaskKey]] = {}
        # In the order of requests, which is that of answers: an actor dies of the first of its requests.
        self._asked: dict[Any, _Asked] = {}
        # Other requests of an actor that died.
        self._again: list[_Asked] = []
        self._replays: dict[Any, tuple[Any, str, float]] = {}
        self._loose: dict[Any, tuple[str, TaskKey | None]] = {}
        self._died: list[SearchAnswer | Replayed] = []
        # By campaign, the time that its search worked on requests (s), and when it ended the last (monotonic).
        self._busy: dict[str, tuple[float, float]] = {}

    @property
    def pending(self) -> list[Any]:
        return [*self._asked, *self._replays]

    def open(self, plan: SearchPlan) -> None:
        """Begin a campaign's search; it loads TVM in the background."""
        self._plans[plan.campaign] = plan
        self._busy.pop(plan.campaign, None)
        self._start(plan)

    def prepare(self) -> None:
        """Have the search of the next campaign load TVM before that is opened."""
        if self._spare is None:
            self._spare = _start_actor(self._logs)

    def close(self, campaign: str) -> None:
        """End a campaign's search; its open requests fail."""
        self._plans.pop(campaign, None)
        self._fail(campaign)

    def ask(self, request: int, task: TaskKey, count: int) -> None:
        """Request candidates; `poll` returns them."""
        reference = self._open(task).propose.remote(to_key(task), count)
        self._asked[reference] = _Asked(request, task, count, time.monotonic())

    def replay(self, job: Any, task: TaskKey, trace_json: str) -> None:
        """Request the scheduled function of a trace."""
        reference = self._open(task).replay.remote(to_key(task), trace_json)
        self._replays[reference] = (job, task.campaign, time.monotonic() + ASK_TIMEOUT_S)

    def observe(self, task: TaskKey, results: Sequence[tuple[str, float | None]]) -> None:
        """Pass results to a search, without waiting."""
        if task in self._opened.get(task.campaign, ()):
            reference = self._actors[task.campaign].observe.remote(to_key(task), list(results))
            self._loose[reference] = (task.campaign, None)

    def forget(self, task: TaskKey, candidate: str) -> None:
        """Have a search drop a candidate that it proposed."""
        if task in self._opened.get(task.campaign, ()):
            reference = self._actors[task.campaign].forget.remote(to_key(task), candidate)
            self._loose[reference] = (task.campaign, None)

    def poll(self) -> list[SearchAnswer | Replayed]:
        """Return the answers since the last call. A search that died or is late fails its first request, and restarts
        with the rest.

        Process the answers before the next call: a restarted search is given the candidates that are under way then.
        """
        answers, self._died = self._died, []
        again, self._again = self._again, []
        for asked in again:
            self.ask(asked.request, asked.task, asked.count)
        self._look_at_loose()
        waiting = self.pending
        ready = set(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]) if waiting else set()
        now = time.monotonic()
        for reference, asked in list(self._asked.items()):
            if reference not in self._asked or (reference not in ready and now < asked.deadline_s):
                continue
            self._asked.pop(reference)
            busy_s, free_s = self._busy.get(asked.task.campaign, (0.0, 0.0))
            # An actor serves one request at a time, in order.
            self._busy[asked.task.campaign] = (busy_s + now - max(asked.asked_s, free_s), now)
            try:
                if reference not in ready:
                    raise DeadlineError(f"searching did not finish within {ASK_TIMEOUT_S:g} s")
                candidates, exhausted = ray_calls.get(reference, "searching", _FETCH_TIMEOUT_S)
                answers.append(SearchAnswer(asked.request, candidates, exhausted))
            except (ActorLostError, DeadlineError) as error:
                answers.append(SearchAnswer(asked.request, None, False, error.message))
                self._restart(asked.task.campaign, error.message)
            except FarmError as error:
                self._note("search_failed", asked.task.campaign, error.message)
                answers.append(SearchAnswer(asked.request, None, False, error.message))
        for reference, (job, campaign, deadline) in list(self._replays.items()):
            if reference not in self._replays or (reference not in ready and now < deadline):
                continue
            self._replays.pop(reference)
            try:
                if reference not in ready:
                    raise DeadlineError(f"replaying a trace did not finish within {ASK_TIMEOUT_S:g} s")
                module_json = ray_calls.get(reference, "replaying a trace", _FETCH_TIMEOUT_S)
                answers.append(Replayed(job, module_json, ""))
            except (ActorLostError, DeadlineError) as error:
                answers.append(Replayed(job, "", error.message, lost=True))
                self._restart(campaign, error.message)
            except FarmError as error:
                answers.append(Replayed(job, "", error.message))
        died, self._died = self._died, []
        return [*answers, *died]

    def get_busy_s(self, campaign: str) -> float:
        """Return the seconds that a campaign's search has worked since this engine opened it."""
        return self._busy.get(campaign, (0.0, 0.0))[0]

    def close_all(self) -> None:
        for campaign in list(self._actors):
            self.close(campaign)
        if self._spare is not None:
            ray_calls.kill(self._spare)
            self._spare = None

    def _open(self, task: TaskKey) -> Any:
        """Return the actor of a task's campaign, after it has opened the task."""
        plan = self._plans[task.campaign]
        if task.campaign not in self._actors:
            self._start(plan)
        actor = self._actors[task.campaign]
        if task not in self._opened[task.campaign]:
            self._opened[task.campaign].add(task)
            reference = actor.open.remote(
                to_key(task), plan.tasks[task], plan.recall(task), plan.under_way(task), plan.foreign(task)
            )
            self._loose[reference] = (task.campaign, task)
        return actor

    def _start(self, plan: SearchPlan) -> None:
        actor = _start_actor(self._logs) if self._spare is None else self._spare
        self._spare = None
        actor.serve.remote(plan.campaign, plan.settings)
        self._actors[plan.campaign] = actor
        self._opened[plan.campaign] = set()

    def _restart(self, campaign: str, reason: str) -> None:
        self._note("restarted", campaign, f"its search died or hung: {reason}")
        self._fail(campaign)
        if campaign in self._plans:
            self._start(self._plans[campaign])

    def _fail(self, campaign: str) -> None:
        """End an actor; repeat its requests at the next one, or fail them where there is none."""
        actor = self._actors.pop(campaign, None)
        self._opened.pop(campaign, None)
        if actor is not None:
            ray_calls.kill(actor)
        asked = [each for each in (*self._again, *self._asked.values()) if each.task.campaign == campaign]
        self._asked = {reference: each for reference, each in self._asked.items() if each not in asked}
        self._again = [each for each in self._again if each not in asked]
        if campaign in self._plans:
            self._again += asked
        else:
            self._died += [SearchAnswer(each.request, None, False) for each in asked]
        for reference, (job, owner, _) in list(self._replays.items()):
            if owner == campaign:
                self._replays.pop(reference)
                self._died.append(Replayed(job, "", "the search was restarted", lost=True))
        self._loose = {ref: about for ref, about in self._loose.items() if about[0] != campaign}

    def _look_at_loose(self) -> None:
        """Note failures of calls without a waiter, and results of warm starts."""
        if not self._loose:
            return
        done, _ = ray.wait(list(self._loose), num_returns=len(self._loose), timeout=0)
        for reference in done:
            if reference not in self._loose:  # an actor that was just replaced
                continue
            campaign, task = self._loose.pop(reference)
            try:
                said = ray_calls.get(reference, "teaching the search", _FETCH_TIMEOUT_S)
                if task is not None:
                    self._tell(campaign, f"{task.workload} on {task.board_type} at {task.point}", *said)
            except ActorLostError as error:
                # Its request fails too, and that failure is judged.
                if not any(each.task.campaign == campaign for each in self._asked.values()):
                    self._restart(campaign, error.message)
            except DeadlineError:
                continue
            except FarmError as error:
                self._note("search_failed", campaign, error.message)

    def _tell(self, campaign: str, name: str, warm: str, remarks: Sequence[str]) -> None:
        """Note a search's remarks on opening a task."""
        if warm:
            self._note("warm_start", campaign, f"{name}: {warm}")
        for remark in remarks:
            self._note("search_remark", campaign, f"{name}: {remark}")


def _start_actor(logs: Path) -> Any:
    return ray.remote(num_cpus=0, max_restarts=0, **here())(SearchActor).remote(str(logs))


def to_key(task: TaskKey) -> str:
    """Name a task for its search."""
    return f"{task.board_type}|{task.point}|{task.workload}"
