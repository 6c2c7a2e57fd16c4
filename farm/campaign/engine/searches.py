"""The searches of all running campaigns: one Ray actor each, restarted when it dies or hangs.

`farm.search.tuners.campaign_search` is the search; the scheduler decides how often it may fail.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import ray

from farm.campaign.engine import ray_calls
from farm.campaign.engine.ray_calls import ActorLostError
from farm.campaign.engine.ray_nodes import here
from farm.campaign.scheduler.state import TaskKey
from farm.campaign.verify.programs import Replay
from farm.errors import DeadlineError, FarmError
from farm.processes import home_log
from farm.processes.calls import Calls
from farm.search import tvm_env
from farm.search.tuners import campaign_search

# A candidate in earlier trials: hash, trace, latency (s) or None where it failed by its own fault.
Known = tuple[str, str, float | None]

# Opening a campaign replays hundreds of known candidates before the first answer.
ASK_TIMEOUT_S = 600.0

_log = logging.getLogger(__name__)
# Returns what `SearchActor.open` takes for a task, but for its key.
ReadTask = Callable[[TaskKey], tuple[Any, list[Known], list[tuple[str, str]], list[Any]]]


class SearchAnswer(NamedTuple):
    """A search's answer to a request: candidates, and whether it is exhausted; None: it died or hung, for `reason`."""

    request: int
    candidates: list[Any] | None
    exhausted: bool
    reason: str = ""


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
        """Make a task searchable from `known` results, the candidates built or measured now (hash and trace) and
        `foreign` results of other tasks; return texts about its warm start, and other remarks.
        """
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
class _Ask:
    """A request for candidates, and its time (monotonic, s)."""

    task: TaskKey
    request: int
    count: int
    asked_s: float


class _Replay(NamedTuple):
    task: TaskKey
    answer: Future[Replay]


class Searches:
    """The searches by campaign. Not thread-safe; never waits."""

    def __init__(self, note: Callable[[str, str, str], None], logs: Path) -> None:
        """`note` gets events: kind, campaign, message; the searches write to `log`."""
        self._note, self._logs = note, logs
        self._spare: Any = None
        self._plans: dict[str, tuple[Mapping[str, Any], ReadTask]] = {}
        self._actors: dict[str, Any] = {}
        # The tasks that each actor has opened. Opening one takes a second or two: it is done on the first request.
        self._opened: dict[str, set[TaskKey]] = {}
        # In the order of calls, which is that of answers: an actor dies of the first of its requests.
        self._asked: Calls[_Ask | _Replay] = Calls()
        # Calls without a waiter: results for a search; one that opens its task answers with remarks.
        self._told: Calls[TaskKey] = Calls()
        # Other requests of an actor that died.
        self._again: list[_Ask] = []
        self._died: list[SearchAnswer] = []
        # By campaign, the time that its search worked on requests (s), and when it ended the last (monotonic).
        self._busy: dict[str, tuple[float, float]] = {}

    @property
    def pending(self) -> list[Future[Any]]:
        return self._asked.pending

    def open(self, campaign: str, settings: Mapping[str, Any], read: ReadTask) -> None:
        """Begin a campaign's search; it loads TVM in the background."""
        self._plans[campaign] = settings, read
        self._busy.pop(campaign, None)
        self._start(campaign)

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
        call = ray_calls.call(self._open(task).propose, to_key(task), count)
        self._asked.add(call, _Ask(task, request, count, time.monotonic()), ASK_TIMEOUT_S)

    def replay(self, task: TaskKey, trace_json: str) -> Future[Replay]:
        """Request the scheduled function of a trace."""
        call = ray_calls.call(self._open(task).replay, to_key(task), trace_json)
        asked = _Replay(task, Future())
        self._asked.add(call, asked, ASK_TIMEOUT_S)
        return asked.answer

    def observe(self, task: TaskKey, results: Sequence[tuple[str, float | None]]) -> None:
        """Pass results to a search, without waiting."""
        if task in self._opened.get(task.campaign, ()):
            self._tell(self._actors[task.campaign].observe, task, list(results))

    def forget(self, task: TaskKey, candidate: str) -> None:
        """Have a search drop a candidate that it proposed."""
        if task in self._opened.get(task.campaign, ()):
            self._tell(self._actors[task.campaign].forget, task, candidate)

    def poll(self) -> list[SearchAnswer]:
        """Return the answers since the last call. A search that died or is late fails its first request, and restarts
        with the rest.

        Process the answers before the next call: a restarted search is given the candidates that are under way then.
        """
        answers, self._died = self._died, []
        again, self._again = self._again, []
        for each in again:
            self.ask(each.request, each.task, each.count)
        self._look_at_told()
        for asked, call in self._asked.take():
            answers += self._read(asked, call)
        died, self._died = self._died, []
        return [*answers, *died]

    def _read(self, asked: _Ask | _Replay, call: Future[Any]) -> list[SearchAnswer]:
        """Give a call's answer, done or late, to who waits or return it; restart a search that died or hung."""
        campaign, reason, lost = asked.task.campaign, "", False
        answer: Any = None
        if isinstance(asked, _Ask):
            now = time.monotonic()
            busy_s, free_s = self._busy.get(campaign, (0.0, 0.0))
            # An actor serves one request at a time, in order.
            self._busy[campaign] = (busy_s + now - max(asked.asked_s, free_s), now)
        try:
            what = "searching" if isinstance(asked, _Ask) else "replaying a trace"
            answer = ray_calls.result(call, what, ASK_TIMEOUT_S)
        except FarmError as error:
            reason, lost = error.message, isinstance(error, (ActorLostError, DeadlineError))
        if lost:
            self._restart(campaign, reason)
        if isinstance(asked, _Replay):
            asked.answer.set_result(Replay(answer or None, reason, lost))
            return []
        if reason and not lost:
            self._note("search_failed", campaign, reason)
        candidates, exhausted = answer or (None, False)
        return [SearchAnswer(asked.request, candidates, exhausted, reason)]

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
        if task.campaign not in self._actors:
            self._start(task.campaign)
        actor = self._actors[task.campaign]
        if task not in self._opened[task.campaign]:
            self._opened[task.campaign].add(task)
            _, read = self._plans[task.campaign]
            self._tell(actor.open, task, *read(task))
        return actor

    def _start(self, campaign: str) -> None:
        actor = _start_actor(self._logs) if self._spare is None else self._spare
        self._spare = None
        settings, _ = self._plans[campaign]
        actor.serve.remote(campaign, settings)
        self._actors[campaign] = actor
        self._opened[campaign] = set()

    def _restart(self, campaign: str, reason: str) -> None:
        self._note("restarted", campaign, f"its search died or hung: {reason}")
        self._fail(campaign)
        if campaign in self._plans:
            self._start(campaign)

    def _fail(self, campaign: str) -> None:
        """End an actor; repeat its requests at the next one, or fail them where there is none."""
        actor = self._actors.pop(campaign, None)
        self._opened.pop(campaign, None)
        if actor is not None:
            ray_calls.kill(actor)
        dropped = self._asked.drop(lambda each: each.task.campaign == campaign)
        asked = [each for each in self._again if each.task.campaign == campaign]
        asked += [each for each in dropped if isinstance(each, _Ask)]
        self._again = [each for each in self._again if each not in asked]
        if campaign in self._plans:
            self._again += asked
        else:
            self._died += [SearchAnswer(each.request, None, False) for each in asked]
        for each in dropped:
            if isinstance(each, _Replay):
                each.answer.set_result(Replay(None, "the search was restarted", lost=True))
        self._told.drop(lambda task: task.campaign == campaign)

    def _tell(self, method: Any, task: TaskKey, *arguments: Any) -> None:
        self._told.add(ray_calls.call(method, to_key(task), *arguments), task, math.inf)

    def _look_at_told(self) -> None:
        """Note failures of calls without a waiter, and remarks on opened tasks."""
        for task, call in self._told.take():
            try:
                said = ray_calls.result(call, "teaching the search", math.inf)
            except ActorLostError as error:
                # Its request fails too, and that failure is judged.
                if not any(each.task.campaign == task.campaign for each in self._asked.about):
                    self._restart(task.campaign, error.message)
            except FarmError as error:
                self._note("search_failed", task.campaign, error.message)
            else:
                warm, remarks = said or ("", ())
                name = f"{task.workload} on {task.board_type} at {task.point}"
                if warm:
                    self._note("warm_start", task.campaign, f"{name}: {warm}")
                for remark in remarks:
                    self._note("search_remark", task.campaign, f"{name}: {remark}")


def _start_actor(logs: Path) -> Any:
    return ray.remote(num_cpus=0, max_restarts=0, **here())(SearchActor).remote(str(logs))


def to_key(task: TaskKey) -> str:
    """Name a task for its search."""
    return f"{task.board_type}|{task.point}|{task.workload}"
