"""The engine's moving parts: the search, the compilers, the board and its farm, each started again when it dies.

What they are told to do is decided in `engine` (trials) and `engine_verify` (winners).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from device_agent.protocol import Outcome, RunSpec, Status
from farm.campaign import engine_actors, engine_ray
from farm.campaign.engine_ray import ActorLostError
from farm.errors import BoardLostError, DeadlineError, FarmError, InternalError, PermanentError, UnavailableError
from farm.fleet.local import LocalFarm
from farm.measure.session import Arrays
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
_CALL_OVERHEAD_S = 2 * (engine_actors.REQUEST_TIMEOUT_S + 60.0)
_SLOWEST_BYTES_PER_S = 5e6
# A call that found the board gone is made again this often, on the agent that took the dead one's place.
_RUN_ATTEMPTS = 3


class Parts:
    """The search actor, the compilers and one board's actor. Not thread-safe; use as a context manager."""

    def __init__(
        self,
        farm: LocalFarm,
        store: Store,
        settings: Settings,
        target: Mapping[str, Any] | None,
        pipeline: str,
        host_cores: int,
        board_cores: int,
    ) -> None:
        """Start them; they load TVM in the background.

        `target` None stands for this machine's own, with `board_cores` cores. `host_cores` is how many cores search
        and build may use.
        """
        self.farm, self.settings = farm, settings
        self._store = store
        self._search_arguments = (
            None if target is None else dict(target), board_cores, pipeline,
            settings.seed, settings.population, settings.generations, host_cores,
        )  # fmt: skip
        self.search = engine_actors.start_search(*self._search_arguments)
        self.builds: BuildPool[Any] = BuildPool(settings.build_workers or host_cores, settings)
        self.board = self._start_board()
        self._address = (farm.tracker.host, farm.tracker.port)
        self._connecting = self.board.connect.remote(BOARD_TIMEOUT_S)
        self._target: dict[str, Any] | None = None
        self._opened: list[Any] = []
        self._loose: list[Any] = []

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        # Ray may be what failed: nothing said here may hide the error that brought us here.
        with contextlib.suppress(ray.exceptions.RayError):
            self.builds.close()
        for actor in (self.search, self.board):
            engine_ray.kill(actor)

    def target(self) -> dict[str, Any]:
        """The compile target in TVM's dict form."""
        if self._target is None:
            self._target = dict(engine_ray.get(self.search.target.remote(), "starting the search", START_TIMEOUT_S))
        return dict(self._target)

    def load(self, onnx_bytes: bytes, shapes: Mapping[str, tuple[int, ...]]) -> list[Any]:
        """Import the model; returns its workloads, the heaviest first. Raises UsageError."""
        reference = self.search.load.remote(onnx_bytes, dict(shapes))
        return list(engine_ray.get(reference, "importing the model", WORK_TIMEOUT_S))

    def connect(self) -> dict[str, Any]:
        """Wait for the board; returns its description. Raises DeadlineError, UnavailableError."""
        what = f"connecting to {self.farm.key}"
        for _ in range(_RUN_ATTEMPTS - 1):
            with contextlib.suppress(ActorLostError):
                return dict(engine_ray.get(self._connecting, what, START_TIMEOUT_S))
            self.replace_board()
            self._connecting = self.board.connect.remote(BOARD_TIMEOUT_S)
        return dict(engine_ray.get(self._connecting, what, START_TIMEOUT_S))

    def open_search(self, workloads: Sequence[Any], known: Mapping[str, list[tuple[str, str, float | None]]]) -> None:
        """Make workloads searchable; `known` holds what was measured (hash -> candidate, trace, latency in s)."""
        self._opened = list(workloads)
        engine_ray.get(self.search.open.remote(self._opened), "preparing the search", WORK_TIMEOUT_S)
        for workload in workloads:
            if items := known.get(workload.hash):
                self._loose.append(self.search.recall.remote(workload.hash, items))

    def observe(self, workload: str, results: list[tuple[str, float | None]]) -> None:
        """Teach the search; nobody waits for it (see `WorkloadSearch.observe`)."""
        self._loose.append(self.search.observe.remote(workload, results))

    def forget(self, workload: str, candidate: str) -> None:
        """Let the search drop a candidate (see `WorkloadSearch.forget`)."""
        self._loose.append(self.search.forget.remote(workload, candidate))

    def restart_search(self) -> None:
        """Put a new search in a dead one's place; `open_search` then tells it what is known."""
        self.event("restarted", "search", "its process had died or hung")
        engine_ray.kill(self.search)
        self._loose.clear()
        self.search = engine_actors.start_search(*self._search_arguments)

    def replace_board(self) -> None:
        """Put a new actor in the place of one that is dead or stuck."""
        self.event("restarted", "board actor", "its process had died or hung")
        engine_ray.kill(self.board)
        self.board = self._start_board()

    def restart_agent(self) -> None:
        """End an agent that lives but does not answer; `look_after_farm` starts it again. It is our own child."""
        self.event("stopped", self.farm.key, "it did not answer")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.farm.agent_pid, signal.SIGKILL)

    def look_after_farm(self) -> None:
        """Start tracker and agent again where they died. Raises UnavailableError where they do not start."""
        try:
            for what in self.farm.ensure_alive():
                self.event("restarted", what, "its process had died")
        except DeadlineError as error:
            raise UnavailableError(
                f"the farm on this machine cannot be kept up: {error.message}", error.hint
            ) from error
        if self._address != (self.farm.tracker.host, self.farm.tracker.port):
            self._address = (self.farm.tracker.host, self.farm.tracker.port)
            self.replace_board()

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
            try:
                reference = self.board.run_model.remote(spec.to_json(), packed, inputs)
                text, outputs = engine_ray.get(reference, f"a run on {self.farm.key}", timeout_s)
            except (ActorLostError, DeadlineError) as error:
                message = error.message
                self.replace_board()
                self.look_after_farm()
                continue
            outcome = Outcome.from_json(text)
            if outcome.status not in (Status.BOARD_LOST, Status.FARM_ERROR):
                return outcome, dict(outputs)
            message = outcome.message
            self.event(str(outcome.status), self.farm.key, message)
            self.look_after_farm()
        raise BoardLostError(f"{self.farm.key} was lost {_RUN_ATTEMPTS} times: {message}")

    @staticmethod
    def call_timeout_s(limit_s: float, size: int) -> float:
        """When a call to the board's actor counts as stuck: the board's own deadlines come long before."""
        return _CALL_OVERHEAD_S + 2 * (limit_s + size / _SLOWEST_BYTES_PER_S)

    def event(self, kind: str, subject: str, message: str) -> None:
        """Log and store what happened."""
        _log.warning("%s %s: %s", kind, subject, message)
        self._store.add_event(kind, subject, message)

    def _start_board(self) -> Any:
        tracker = self.farm.tracker
        return engine_actors.start_board(tracker.host, tracker.port, self.farm.key)
