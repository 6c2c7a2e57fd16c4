"""The engine's moving parts: the search, the compilers, the board and its farm, each started again when it dies.

What they are told to do is decided in `engine` (trials) and `engine_verify` (winners).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from device_agent.protocol import Outcome, RunSpec, Status
from farm.campaign import engine_actors, engine_ray
from farm.campaign.board_choice import TargetPlan
from farm.campaign.engine_blame import Blame
from farm.campaign.engine_ray import ActorLostError
from farm.errors import (
    BoardLostError,
    BoardNonsenseError,
    BoardUnsafeError,
    DeadlineError,
    FarmError,
    InternalError,
    PermanentError,
    UnavailableError,
)
from farm.fleet.site import Site
from farm.measure.arrays import Arrays
from farm.search.build_pool import BuildPool, BuildResult
from farm.settings import Settings
from farm.store import Store

_log = logging.getLogger(__name__)

BOARD_TIMEOUT_S = 60.0
# A busy machine takes ten times the usual 5 s to start a process that loads TVM; the biggest models take a minute to
# import, and replaying a thousand known candidates another. Whatever takes longer than these hangs.
START_TIMEOUT_S = 180.0
WORK_TIMEOUT_S = 900.0
# What a call to the board may take besides its own deadline: waiting for the board, connecting, asking who it is, and
# the grace of `farm.measure.session`. Twice, because another call may be before it.
_CALL_OVERHEAD_S = 60.0
_SLOWEST_BYTES_PER_S = 5e6
# A call that found the board gone is made again this often, on the agent that took the dead one's place.
_RUN_ATTEMPTS = 3
# How often a free board is looked for while nothing else is going on.
_LOOK_S = 0.25
# Fields of a description that must not change with the board.
_COMMON = ("board_type", "architecture", "simulated")


class Parts:
    """The search actor, the compilers and one board's actor. Not thread-safe; use as a context manager."""

    def __init__(
        self,
        site: Site,
        store: Store,
        settings: Settings,
        plan_target: Callable[[Mapping[str, Any]], TargetPlan],
        pipeline: str,
        host_cores: int,
        request_timeout_s: float = engine_actors.REQUEST_TIMEOUT_S,
    ) -> None:
        """Start them; they load TVM in the background.

        `plan_target` says what to compile for, from what the board says of itself. `host_cores` is how many cores
        search and build may use, `request_timeout_s` how long another client of the board is waited for.
        """
        self.site, self.settings = site, settings
        self.blame = Blame(site)
        self._store = store
        self._plan_target = plan_target
        self._request_timeout_s = request_timeout_s
        self._board_timeout_s = max(BOARD_TIMEOUT_S, request_timeout_s)
        self._search_arguments = (
            pipeline, settings.seed, settings.population, settings.generations, host_cores
        )  # fmt: skip
        self.search = engine_actors.start_search(*self._search_arguments)
        self.builds: BuildPool[Any] = BuildPool(settings.build_workers or host_cores, settings)
        # What a board has to have in common with the first one: code and figures would not fit it otherwise.
        self._like: dict[str, Any] | None = None
        # What the present board's actor was told; another board, or the same under another lease, is another.
        self.held: tuple[object, ...] = ()
        self.board: Any = None
        self._connecting: Any = None
        self._start_board()
        self._target: dict[str, Any] | None = None
        self.threads = 0
        self._opened: list[Any] = []
        self._loose: list[Any] = []

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        # Ray may be what failed: nothing said here may hide the error that brought us here.
        with contextlib.suppress(ray.exceptions.RayError):
            self.builds.close()
        for actor in (self.search, self.board):
            if actor is not None:
                engine_ray.kill(actor)

    def target(self) -> dict[str, Any]:
        """The compile target in TVM's dict form. Raises what `connect` and the plan of the target raise."""
        if self._target is None:
            plan = self._plan_target(self.connect())
            self.threads = plan.threads
            reference = self.search.set_target.remote(plan.config, plan.cores)
            self._target = dict(engine_ray.get(reference, "starting the search", START_TIMEOUT_S))
        return dict(self._target)

    def load(self, onnx_bytes: bytes, shapes: Mapping[str, tuple[int, ...]]) -> list[Any]:
        """Import the model; returns its workloads, the heaviest first. Raises UsageError."""
        self.target()
        reference = self.search.load.remote(onnx_bytes, dict(shapes))
        return list(engine_ray.get(reference, "importing the model", WORK_TIMEOUT_S))

    def connect(self) -> dict[str, Any]:
        """Wait for the board; returns its description. Raises DeadlineError, UnavailableError."""
        for attempt in range(_RUN_ATTEMPTS):
            self.wait_for_board()
            if self._connecting is None:
                self._connecting = self.board.connect.remote(self._board_timeout_s)
            try:
                timeout_s = START_TIMEOUT_S + self._board_timeout_s
                about = dict(engine_ray.get(self._connecting, f"connecting to {self.site.key}", timeout_s))
            except (ActorLostError, BoardUnsafeError, BoardNonsenseError) as error:
                if not isinstance(error, ActorLostError):
                    self.blame.judge_error(error)
                if attempt == _RUN_ATTEMPTS - 1:
                    raise
                self.replace_board()
                continue
            self._like = {field: about[field] for field in _COMMON}
            return about
        raise AssertionError("the last attempt returns or raises")

    @property
    def has_board(self) -> bool:
        """Whether there is a board to measure on now."""
        return self.board is not None

    def wait_for_board(self) -> None:
        """Wait until there is a board. Raises what `look_after_farm` raises, which has the deadline."""
        self.look_after_farm()
        while not self.has_board:
            time.sleep(_LOOK_S)
            self.look_after_farm()

    def open_search(self, workloads: Sequence[Any], known: Mapping[str, list[tuple[str, str, float | None]]]) -> None:
        """Make workloads searchable; `known` holds what was measured (hash -> candidate, trace, latency in s)."""
        self._opened = list(workloads)
        engine_ray.get(self.search.open.remote(self._opened), "preparing the search", WORK_TIMEOUT_S)
        for workload in workloads:
            if items := known.get(workload.hash):
                self._loose.append(self.search.recall.remote(workload.hash, items))

    def observe(self, workload: str, results: list[tuple[str, float | None]]) -> None:
        """Teach the search; nobody waits for it (see `CampaignSearch.observe`)."""
        self._loose.append(self.search.observe.remote(workload, results))

    def forget(self, workload: str, candidate: str) -> None:
        """Let the search drop a candidate (see `CampaignSearch.forget`)."""
        self._loose.append(self.search.forget.remote(workload, candidate))

    def restart_search(self) -> None:
        """Put a new search in a dead one's place; `open_search` then tells it what is known."""
        self.event("restarted", "search", "its process had died or hung")
        engine_ray.kill(self.search)
        self._loose.clear()
        self.search = engine_actors.start_search(*self._search_arguments)
        if self._target is not None:
            self._loose.append(self.search.set_target.remote(self._target, 0))

    def replace_board(self) -> None:
        """Put a new actor in the place of one that is dead or stuck."""
        self.event("restarted", "board actor", "its process had died or hung")
        self._start_board()

    def restart_agent(self) -> None:
        """End an agent that lives but does not answer; `look_after_farm` starts it again."""
        if self.site.restart_agent():
            self.event("stopped", self.site.key, "it did not answer")

    def look_after_farm(self) -> None:
        """Start tracker and agent again where they died, go over to another board where ours was lost.

        Raises UnavailableError where that cannot be done, or not for too long.
        """
        try:
            for what in self.site.ensure_alive():
                self.event("restarted", what, "its process had died")
        except DeadlineError as error:
            raise UnavailableError(
                f"the farm on this machine cannot be kept up: {error.message}", error.hint
            ) from error
        if self.held != self._identify():
            self._start_board()

    def look_after_search(self) -> None:
        """Note what went wrong in calls that nobody waits for; the search is then without that piece of knowledge."""
        if not self._loose:
            return
        done, self._loose = ray.wait(self._loose, num_returns=len(self._loose), timeout=0)
        for reference in done:
            try:
                engine_ray.get(reference, "teaching the search", START_TIMEOUT_S)
            except ActorLostError:  # whoever asks the search next finds out, and deals with it
                continue
            except FarmError as error:
                self.event("search_failed", "search", error.message)

    def replay(self, workload: str, trace_json: str) -> str:
        """The scheduled function that a trace leads to, in TVM's JSON. Raises InternalError where it fits no more."""
        for attempt in range(_RUN_ATTEMPTS):
            try:
                reference = self.search.replay.remote(workload, trace_json)
                return str(engine_ray.get(reference, "replaying a trace", WORK_TIMEOUT_S))
            except ActorLostError as error:
                if attempt == _RUN_ATTEMPTS - 1:
                    raise InternalError(f"a trace takes the search down: {error.message}") from error
                self.restart_search()
                self.open_search(self._opened, {})
            except PermanentError as error:
                raise InternalError(error.message) from error
        raise AssertionError("the last attempt returns or raises")

    def build_all(self, programs: Sequence[tuple[str, bool]], target: Mapping[str, Any]) -> list[BuildResult]:
        """Build functions (TVM's JSON, whether standalone) with all compilers; results in the same order.

        A build whose compiler was killed is made once more.
        """
        results: dict[int, BuildResult] = {}
        waiting = [(index, 0) for index in range(len(programs))][::-1]
        while waiting or self.builds.pending:
            while waiting and self.builds.free:
                job = waiting.pop()
                module_json, standalone = programs[job[0]]
                self.builds.submit(job, module_json, target, standalone)
            ready, _ = ray.wait(self.builds.pending, num_returns=1, timeout=0.5)
            for (index, attempt), result in [*map(self.builds.collect, ready), *self.builds.expire()]:
                if result.status is Status.FARM_ERROR and attempt == 0:
                    waiting.append((index, 1))
                else:
                    results[index] = result
        return [results[index] for index in range(len(programs))]

    def run(self, spec: RunSpec, program: bytes, inputs: Arrays) -> tuple[Outcome, Arrays]:
        """Run a program on the board. A lost board is awaited and the call repeated; raises BoardLostError at last."""
        message = ""
        packed = ray.put(program) if len(program) > 1 << 20 else program
        timeout_s = self.call_timeout_s(spec.limits.timeout_s, len(program))
        for _ in range(_RUN_ATTEMPTS):
            self.wait_for_board()
            try:
                reference = self.board.run_model.remote(spec.to_json(), packed, inputs)
                text, outputs = engine_ray.get(reference, f"a run on {self.site.key}", timeout_s)
            except (BoardUnsafeError, BoardNonsenseError) as error:
                message = self.blame.judge_error(error).message
                continue
            except (ActorLostError, DeadlineError) as error:
                message = error.message
                self.replace_board()
                continue
            outcome = Outcome.from_json(text)
            if outcome.status not in (Status.BOARD_LOST, Status.FARM_ERROR):
                return outcome, dict(outputs)
            message = outcome.message
            outcome = self.blame.judge(outcome, True)
            self.event(str(outcome.status), self.site.key, message)
        raise BoardLostError(f"{self.site.key} was lost {_RUN_ATTEMPTS} times: {message}")

    def call_timeout_s(self, limit_s: float, size: int) -> float:
        """When a call to the board's actor counts as stuck: the board's own deadlines come long before."""
        return 2 * (self._request_timeout_s + _CALL_OVERHEAD_S + limit_s + size / _SLOWEST_BYTES_PER_S)

    def event(self, kind: str, subject: str, message: str) -> None:
        """Log and store what happened."""
        _log.warning("%s %s: %s", kind, subject, message)
        self._store.add_event(kind, subject, message)

    def _identify(self) -> tuple[object, ...]:
        """What an actor for the site's board has to be told."""
        site = self.site
        lease = None if site.lease is None else site.lease.token
        return (site.tracker.host, site.tracker.port, site.key, lease, site.has_board)

    def _start_board(self) -> None:
        """An actor for the board that there is, in the place of the one before, whose session ends."""
        if self.board is not None:
            engine_ray.kill(self.board)
        self.held = self._identify()
        self.board = self._connecting = None
        if self.site.has_board:
            tracker = self.site.tracker
            self.board = engine_actors.start_board(
                tracker.host, tracker.port, self.site.key, self.site.lease, self._like, self._request_timeout_s
            )
            if self._like is None:
                self._connecting = self.board.connect.remote(self._board_timeout_s)
