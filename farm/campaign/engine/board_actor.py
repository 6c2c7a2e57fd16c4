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

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, PinStatus, RunSpec, Status
from farm.boards import blame
from farm.boards.site import find_difference
from farm.errors import BoardBusyError, BoardUnsafeError, FarmError, UnavailableError
from farm.measure.arrays import Arrays
from farm.measure.session import BoardSession
from farm.reach.tracker import Tracker
from farm.values import Lease

_CONTROL = "control"
# What a point that is not reached says about: the board may not have it, or not now. Never about a candidate.
_PIN_TROUBLE = {
    PinStatus.REFUSED: "the board does not have the operating point",
    PinStatus.UNAVAILABLE: "the board's clocks cannot be held",
    PinStatus.BUSY: "somebody else holds the board's clocks",
    PinStatus.FAILED: "the operating point was not reached",
}


class _RevokedError(Exception):
    """What is being done was taken back."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a call ended on its board: the outcome's JSON, the board's time, and what a program put out.

    `pin_failed` says that the operating point was not reached, `busy` that another client had the board: nothing was
    run then.
    """

    outcome_json: str
    board_s: float
    outputs: Arrays = dataclasses.field(default_factory=dict)
    pin_failed: bool = False
    busy: bool = False


class CampaignBoard:
    """Holds one board's session, opens it again after a fault, and holds the operating point that each call names.

    Every answer is an outcome, never an exception, but for a board that is unsafe or answers nonsense: that concerns
    more than a trial. A call answers None where it was revoked. Calls are numbered upwards in the order in which they
    are made.
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
        self._held: OperatingPoint | None = OperatingPoint()
        self._lock = threading.Lock()
        self._running: int | None = None
        self._revoked: set[int] = set()

    def connect(self, timeout_s: float) -> dict[str, Any]:
        """Take the board; returns its description. Raises the farm's errors."""
        return self._open(timeout_s).description.to_dict()

    def close(self) -> None:
        """Give the board back."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def measure_at(self, number: int, point_json: str, spec_json: str, library: bytes) -> Ended | None:
        """Time a candidate at an operating point."""

        def work(session: BoardSession) -> tuple[Outcome, Arrays]:
            return session.measure(MeasureSpec.from_json(spec_json), library), {}

        return self._carry_out(number, point_json, work)

    def run_at(
        self, number: int, point_json: str, spec_json: str, program: bytes, inputs: Mapping[str, Any]
    ) -> Ended | None:
        """Run a program at an operating point."""

        def work(session: BoardSession) -> tuple[Outcome, Arrays]:
            outcome, outputs = session.run_model(RunSpec.from_json(spec_json), program, inputs)
            return outcome, {name: np.asarray(value) for name, value in outputs.items()}

        return self._carry_out(number, point_json, work)

    def revoke(self, number: int) -> None:
        """Take a call back, past those that wait. The session of one that runs is cut; the next call opens another."""
        with self._lock:
            self._revoked.add(number)
            session = self._session
            if self._running == number and session is not None:
                session.cut()

    def _open(self, timeout_s: float) -> BoardSession:
        if self._session is None:
            self._held = OperatingPoint()
            session = BoardSession(self._tracker, self._key, timeout_s, self._lease)
            if different := find_difference(session.description.to_dict(), self._like):
                session.close()
                raise UnavailableError(f"{self._key} cannot go on with this run: {different}")
            self._session = session
        return self._session

    def _carry_out(
        self, number: int, point_json: str, work: Callable[[BoardSession], tuple[Outcome, Arrays]]
    ) -> Ended | None:
        started = time.monotonic()
        with self._as_running(number) as check:
            try:
                check()
                session = self._open(self._request_timeout_s)
                check()
                started = time.monotonic()
                if refusal := self._hold(session, OperatingPoint.from_json(point_json)):
                    return Ended(refusal.to_json(), time.monotonic() - started, pin_failed=True)
                outcome, outputs = work(session)
                return Ended(outcome.to_json(), time.monotonic() - started, outputs)
            except _RevokedError:
                return None
            except FarmError as error:
                if self._is_revoked(number):  # our own cut
                    return None
                self.close()
                outcome = blame.to_outcome(error, self._key.partition("/")[2])
                return Ended(outcome.to_json(), time.monotonic() - started, busy=isinstance(error, BoardBusyError))

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
                    self.close()
                self._revoked = {each for each in self._revoked if each > number}

    def _is_revoked(self, number: int) -> bool:
        with self._lock:
            return number in self._revoked

    def _hold(self, session: BoardSession, point: OperatingPoint) -> Outcome | None:
        """Bring the clocks to a point, unless they are there; the outcome where they cannot be brought there."""
        if point == self._held:
            return None
        self._held = None  # whatever comes of it, the last point is held no more
        report = session.unpin() if point.is_empty else session.pin(point)
        if report.status is PinStatus.OK:
            self._held = point
            return None
        if report.status is PinStatus.UNSAFE:
            raise BoardUnsafeError(
                f"the clocks of {self._key} could not be restored: {report.message}",
                "Look at it; then, on the board: device-agent clocks restore",
            )
        return Outcome(
            Status.CLOCK_DRIFTED,
            f"{_PIN_TROUBLE[report.status]}: {report.message}",
            board=self._key.partition("/")[2],
            simulated=session.description.simulated,
        )


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
