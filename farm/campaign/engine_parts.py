"""The engine's moving parts: Ray itself, the search, the compilers and the board, each started again when it dies.

What they are told to do is decided in `engine` (trials) and `engine_verify` (winners).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from device_agent.protocol import Outcome, RunSpec, Status
from farm.campaign import engine_actors
from farm.errors import BoardLostError, FarmError, PermanentError
from farm.fleet.local import LocalFarm
from farm.measure.session import Arrays
from farm.search.build_pool import BuildPool, BuildResult
from farm.settings import Settings
from farm.store import Store

_log = logging.getLogger(__name__)

BOARD_TIMEOUT_S = 60.0
# A call that found the board gone is made again this often, on the agent that took the dead one's place.
_RUN_ATTEMPTS = 3


@contextlib.contextmanager
def ray_running(cores: int) -> Iterator[None]:
    """A local Ray for the block; ended with it."""
    # Ray's usage report would go over the network; its dashboard and its workers' prints are nobody's business here.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        num_cpus=cores,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=256 << 20,
    )
    try:
        yield
    finally:
        ray.shutdown()


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
        self._connecting = self.board.connect.remote(BOARD_TIMEOUT_S)
        self._model: tuple[bytes, dict[str, tuple[int, ...]]] | None = None

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.builds.close()
        for actor in (self.search, self.board):
            ray.kill(actor)

    def target(self) -> dict[str, Any]:
        """The compile target in TVM's dict form."""
        return dict(get(self.search.target.remote()))

    def load(self, onnx_bytes: bytes, shapes: Mapping[str, tuple[int, ...]]) -> list[Any]:
        """Import the model; returns its workloads, the heaviest first. Raises UsageError."""
        self._model = (onnx_bytes, dict(shapes))
        return list(get(self.search.load.remote(*self._model)))

    def connect(self) -> dict[str, Any]:
        """Wait for the board; returns its description. Raises DeadlineError, UnavailableError."""
        return dict(get(self._connecting))

    def open_search(self, workloads: Sequence[Any], known: Mapping[str, list[tuple[str, str, float | None]]]) -> None:
        """Make workloads searchable; `known` holds what was measured (hash -> candidate, trace, latency in s)."""
        get(self.search.open.remote(list(workloads)))
        for workload in workloads:
            if items := known.get(workload.hash):
                self.search.recall.remote(workload.hash, items)

    def restart_search(self) -> None:
        """Put a new search in a dead one's place; `open_search` then tells it what is known."""
        self.event("restarted", "search", "its process had died")
        self.search = engine_actors.start_search(*self._search_arguments)
        assert self._model is not None
        get(self.search.load.remote(*self._model))

    def replace_board(self) -> None:
        """Put a new actor in a dead one's place."""
        self.board = self._start_board()

    def look_after_farm(self) -> None:
        """Start tracker and agent again where they died."""
        for what in self.farm.ensure_alive():
            self.event("restarted", what, "its process had died")

    def replay(self, workload: str, trace_json: str) -> str:
        """The scheduled function that a trace leads to, in TVM's JSON."""
        return str(get(self.search.replay.remote(workload, trace_json)))

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
        for _ in range(_RUN_ATTEMPTS):
            try:
                text, outputs = ray.get(self.board.run_model.remote(spec.to_json(), packed, inputs))
            except ray.exceptions.RayActorError as error:
                message = f"the board's actor died: {str(error).splitlines()[0]}"
                self.replace_board()
                continue
            outcome = Outcome.from_json(text)
            if outcome.status not in (Status.BOARD_LOST, Status.FARM_ERROR):
                return outcome, dict(outputs)
            message = outcome.message
            self.event(str(outcome.status), self.farm.key, message)
            self.look_after_farm()
        raise BoardLostError(f"{self.farm.key} was lost {_RUN_ATTEMPTS} times: {message}")

    def event(self, kind: str, subject: str, message: str) -> None:
        """Log and store what happened."""
        _log.warning("%s %s: %s", kind, subject, message)
        self._store.add_event(kind, subject, message)

    def _start_board(self) -> Any:
        tracker = self.farm.tracker
        return engine_actors.start_board(tracker.host, tracker.port, self.farm.key)


def get(reference: Any) -> Any:
    """A Ray result; the farm's own errors come out as they were raised over there."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FarmError):
            raise error.cause from None
        raise PermanentError(f"{type(error.cause).__name__}: {error.cause}") from error
    except ray.exceptions.RayActorError as error:
        raise PermanentError(f"a farm process died: {str(error).splitlines()[0]}") from error
