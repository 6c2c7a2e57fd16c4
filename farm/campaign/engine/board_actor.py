"""The Ray actor that holds one leased board's session for campaigns, and the few things that others do with it.

One call is carried out after the other; `revoke` alone goes past them, on a thread of its own. Which call is made, and
what an outcome means, is decided by `boards`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, PinStatus, RunSpec
from farm.connectivity.tracker import Tracker
from farm.crew.blame import pin_outcome
from farm.crew.held_board import Address, HeldBoard
from farm.errors import FarmError
from farm.measure.arrays import Arrays
from farm.values import Lease

_CONTROL = "control"


class _RevokedError(Exception):
    """What is being done was taken back."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a call ended on its board: with an outcome, or an error that ended the session too, and the board's time.

    `pin` says what came of bringing the board to the operating point; unless that is `ok`, nothing was run.
    """

    result: Outcome | FarmError
    board_s: float
    outputs: Arrays = dataclasses.field(default_factory=dict)
    pin: PinStatus = PinStatus.OK


class CampaignBoard:
    """Holds one board's session, opens it again after a fault, and holds the operating point that each call names.

    A call answers None where it was revoked. Calls are numbered upwards in the order in which they are made.
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
        self._board = HeldBoard(Address(Tracker(host, port), key, lease), like)
        self._lock = threading.Lock()
        self._running: int | None = None
        self._revoked: set[int] = set()

    def connect(self, timeout_s: float) -> dict[str, Any]:
        """Take the board; returns its description. Raises the farm's errors."""
        return self._board.open(timeout_s).to_dict()

    def measure_at(self, number: int, point: OperatingPoint, spec: MeasureSpec, library: bytes) -> Ended | None:
        """Time a candidate at an operating point."""
        return self._carry_out(number, point, lambda: (self._board.measure(spec, library), {}))

    def run_at(
        self, number: int, point: OperatingPoint, spec: RunSpec, program: bytes, inputs: Mapping[str, Any]
    ) -> Ended | None:
        """Run a program at an operating point."""

        def work() -> tuple[Outcome, Arrays]:
            outcome, outputs = self._board.run(spec, program, inputs)
            return outcome, {name: np.asarray(value) for name, value in outputs.items()}

        return self._carry_out(number, point, work)

    def revoke(self, number: int) -> None:
        """Take a call back, past those that wait. The session of one that runs is cut; the next call opens another."""
        with self._lock:
            self._revoked.add(number)
            if self._running == number:
                self._board.cut()

    def _carry_out(
        self, number: int, point: OperatingPoint, work: Callable[[], tuple[Outcome, Arrays]]
    ) -> Ended | None:
        started = time.monotonic()
        with self._as_running(number) as check:
            try:
                check()
                description = self._board.open(self._request_timeout_s)
                check()
                started = time.monotonic()
                report = self._board.pin(point)
                if report.status is not PinStatus.OK:
                    outcome = pin_outcome(report, self._board.name, description.simulated)
                    return Ended(outcome, time.monotonic() - started, pin=report.status)
                outcome, outputs = work()
                return Ended(outcome, time.monotonic() - started, outputs)
            except _RevokedError:
                return None
            except FarmError as error:
                if self._is_revoked(number):  # our own cut
                    return None
                return Ended(error, time.monotonic() - started)

    @contextlib.contextmanager
    def _as_running(self, number: int) -> Iterator[Callable[[], None]]:
        """`number` is what runs; gives what raises _RevokedError once it was taken back."""

        def check() -> None:
            if self._is_revoked(number):
                raise _RevokedError

        with self._lock:
            self._running = number
        try:
            yield check
        finally:
            with self._lock:
                self._running = None
                if number in self._revoked:  # a cut that came late has spoilt the session all the same
                    self._board.close()
                self._revoked = {each for each in self._revoked if each > number}

    def _is_revoked(self, number: int) -> bool:
        with self._lock:
            return number in self._revoked


def start_campaign_board(
    host: str, port: int, key: str, lease: Lease | None, like: Mapping[str, Any], request_timeout_s: float
) -> Any:
    """A board's actor on this host, which is where the board's tunnel ends, whatever else the cluster has."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    kind = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={_CONTROL: 1}, scheduling_strategy=here)(
        CampaignBoard
    )
    return kind.remote(host, port, key, lease, dict(like), request_timeout_s)


def revoke(actor: Any, number: int) -> None:
    """Have an actor take a call back; waits for nothing."""
    actor.revoke.options(concurrency_group=_CONTROL).remote(number)


def put(data: bytes) -> Any:
    """Big data as Ray's reference, so that sending it again costs nothing; small data as it is."""
    return ray.put(data) if len(data) > 1 << 20 else data


def find_done(references: Sequence[Any]) -> list[Any]:
    """Those of the references whose answer, or failure, is there. Never waits."""
    if not references:
        return []
    done, _ = ray.wait(list(references), num_returns=len(references), timeout=0, fetch_local=False)
    return list(done)
