"""The Ray actors of the engine: one that searches, one per leased board. They hold state; the engine decides."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from device_agent.protocol import MeasureSpec, Outcome, RunSpec, Status
from farm.errors import (
    BoardBusyError,
    BoardNonsenseError,
    BoardUnsafeError,
    FarmError,
    TransientError,
    UnavailableError,
)
from farm.fleet.tracker import Tracker
from farm.measure.arrays import Arrays
from farm.measure.session import BoardSession
from farm.values import DEFAULT_POINT, Lease

# An agent that takes a dead one's place is at the tracker in some seconds, a released board at once.
REQUEST_TIMEOUT_S = 30.0


class SearchActor:
    """Holds a prepared model's workloads, their searches and the cost model they share."""

    def __init__(
        self,
        pipeline: str,
        seed: int,
        population: int,
        generations: int,
        threads: int,
    ) -> None:
        from farm.search import tvm_env
        from farm.search.campaign_search import CampaignSearch

        tvm_env.load()
        self._target_config: dict[str, Any] = {}
        self._pipeline = pipeline
        self._search = CampaignSearch("xgb", None, seed, population, generations, threads)

    def set_target(self, target: Mapping[str, Any] | None, cores: int) -> dict[str, Any]:
        """Search for a target in TVM's dict form (None: this host's, with `cores` cores) from now on; returns it."""
        from farm.search.target import host_target

        self._target_config = host_target(cores) if target is None else dict(target)
        return self._target_config

    def load(self, onnx_bytes: bytes, shapes: Mapping[str, tuple[int, ...]]) -> list[Any]:
        """Import a model and extract its workloads. Raises UsageError where TVM cannot import it."""
        import onnx

        from farm.search.prepared import prepare_model

        model = onnx.load_from_string(onnx_bytes)
        return list(prepare_model(model, shapes, self._target_config, self._pipeline).workloads)

    def open(self, chosen: list[Any]) -> None:
        """Make these workloads searchable."""
        from farm.search.campaign_search import SearchTask
        from farm.search.traits import derive_traits

        for workload in chosen:
            traits = derive_traits(self._target_config)
            self._search.open(workload.hash, SearchTask(workload, "one", DEFAULT_POINT, traits))

    def recall(self, workload: str, known: list[tuple[str, str, float | None]]) -> None:
        """See `CampaignSearch.recall`."""
        self._search.recall(workload, known)

    def propose(self, workload: str, count: int) -> list[Any]:
        """See `CampaignSearch.propose`."""
        return self._search.propose(workload, count)[0]

    def observe(self, workload: str, results: list[tuple[str, float | None]]) -> None:
        """See `CampaignSearch.observe`."""
        self._search.observe(workload, results)

    def replay(self, workload: str, trace_json: str) -> str:
        """See `CampaignSearch.replay`."""
        return self._search.replay(workload, trace_json)

    def forget(self, workload: str, candidate: str) -> None:
        """See `CampaignSearch.forget`."""
        self._search.forget(workload, candidate)

    def pid(self) -> int:
        """Process id, for tests that harm it."""
        return os.getpid()


class BoardActor:
    """Holds one board's session and opens it again after a fault.

    Every answer is an outcome, never an exception, but for a board that is unsafe or answers nonsense: that concerns
    more than a trial.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: str,
        lease: Lease | None,
        like: Mapping[str, Any] | None,
        request_timeout_s: float,
    ) -> None:
        """`like`: what a board has to say of itself in order to stand in for another one of its type.

        `request_timeout_s`: how long a call waits for a board whose session was lost.
        """
        self._request_timeout_s = request_timeout_s
        self._tracker = Tracker(host, port)
        self._key = key
        self._lease = lease
        self._like = dict(like or {})
        self._session: BoardSession | None = None

    def connect(self, timeout_s: float) -> dict[str, Any]:
        """Take the board; returns its description. Raises the farm's errors."""
        return self._open(timeout_s).description.to_dict()

    def measure(self, spec_json: str, library: bytes) -> tuple[str, float]:
        """An outcome's JSON and for how many seconds the session was busy with it."""
        started = time.monotonic()
        try:
            session = self._open(self._request_timeout_s)
            started = time.monotonic()
            outcome = session.measure(MeasureSpec.from_json(spec_json), library)
        except FarmError as error:
            outcome = self._fault(error)
        return outcome.to_json(), time.monotonic() - started

    def run_model(self, spec_json: str, program: bytes, inputs: Mapping[str, Any]) -> tuple[str, Arrays]:
        """An outcome's JSON and the outputs."""
        try:
            session = self._open(self._request_timeout_s)
            outcome, outputs = session.run_model(RunSpec.from_json(spec_json), program, inputs)
        except FarmError as error:
            return self._fault(error).to_json(), {}
        return outcome.to_json(), {name: np.asarray(value) for name, value in outputs.items()}

    def close(self) -> None:
        """Give the board back."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _open(self, timeout_s: float) -> BoardSession:
        if self._session is None:
            session = BoardSession(self._tracker, self._key, timeout_s, self._lease)
            about = session.description.to_dict()
            for field, value in self._like.items():
                if about[field] != value:
                    session.close()
                    raise UnavailableError(
                        f"{self._key} cannot go on with this run: {field} is {about[field]}, not {value}"
                    )
            self._session = session
        return self._session

    def _fault(self, error: FarmError) -> Outcome:
        self.close()
        if isinstance(error, BoardUnsafeError | BoardNonsenseError):
            raise error
        # What may pass is the board's doing; what cannot work by trying again is ours, as is that others may have it.
        is_boards = isinstance(error, TransientError) and not isinstance(error, BoardBusyError)
        status = Status.BOARD_LOST if is_boards else Status.FARM_ERROR
        return Outcome(status, str(error), board=self._key.partition("/")[2])


def start_search(*arguments: Any) -> Any:
    """A search actor on this host."""
    return ray.remote(num_cpus=0, max_restarts=0)(SearchActor).remote(*arguments)


def start_board(*arguments: Any) -> Any:
    """A board actor on this host, which is where the board's tunnel ends."""
    return ray.remote(num_cpus=0, max_restarts=0)(BoardActor).remote(*arguments)
