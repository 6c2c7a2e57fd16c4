"""One board's session inside its process: opened on demand, with a pinned operating point.

Calls wait with a deadline and raise; `blame` judges errors. The calls come from `board_process`: see docs/adr/0028.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from device_agent.protocol import (
    Description,
    MeasureSpec,
    OperatingPoint,
    Outcome,
    PinReport,
    PinStatus,
    PowerSpec,
    PowerTrace,
    RunSpec,
)
from farm.connectivity.tracker import Tracker
from farm.crew.site import find_difference
from farm.errors import BoardLostError, BoardUnsafeError, FarmError, UnavailableError
from farm.measure.arrays import Arrays, BufferName
from farm.measure.asking import AgentAddress
from farm.measure.blocking import BlockingSession
from farm.values import Lease

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a board is requested, its name there, and its lease. Picklable."""

    tracker: Tracker | AgentAddress
    key: str
    lease: Lease | None


def to_address(tracker: Tracker | AgentAddress, key: str, lease: Lease | None) -> Address:
    """Return a board's address; for a tracker that is our child, its host and port."""
    plain = tracker if isinstance(tracker, AgentAddress) else Tracker(tracker.host, tracker.port)
    return Address(plain, key, lease)


class HeldBoard:
    """A board at an address. Not thread-safe, but for `cut`. `description` is None before `open`."""

    def __init__(self) -> None:
        self.description: Description | None = None
        self._where: Address | None = None
        self._like: Mapping[str, Any] = {}
        self._session: BlockingSession | None = None
        self._of: tuple[str, int | None] | None = None
        self._held: OperatingPoint | None = None

    @property
    def has_session(self) -> bool:
        """Whether there is a session, as far as is known."""
        return self._session is not None

    def turn_to(self, where: Address, like: Mapping[str, Any]) -> None:
        """Use this board from the next `open` on; `like` are required fields of its description."""
        self._where, self._like = where, like

    @property
    def name(self) -> str:
        return self._where.key.partition("/")[2] if self._where else ""

    def open(self, timeout_s: float, doubted: bool = False) -> Description:
        """Open a session, waiting for the board; return its description.

        `doubted`: see `BoardSession`. Raises DeadlineError, BoardLostError, UnavailableError, BoardUnsafeError,
        LeaseOverError.
        """
        where = self._where
        if where is None:
            raise BoardLostError("there is no board yet")
        now = (where.key, where.lease.token if where.lease else None)
        if self._session is None or self.description is None or now != self._of:
            self.close()
            session = BlockingSession(where.tracker, where.key, timeout_s, where.lease, doubted=doubted)
            if different := find_difference(session.description.to_dict(), self._like):
                session.close()
                raise UnavailableError(f"{self.name} cannot go on with this run: {different}")
            self._session, self._of, self.description = session, now, session.description
            self._held = OperatingPoint()
        return self.description

    def pin(self, point: OperatingPoint) -> PinReport:
        """Pin the clocks to a point, unless they are there; an empty one releases them.

        A point that is not reached is a report. Raises BoardUnsafeError, and what `run` raises.
        """
        if point == self._held:
            return PinReport(PinStatus.OK, reached=None if point.is_empty else point)
        self._held = None  # in any case the last point is pinned no more
        report = self._ask(lambda session: session.unpin() if point.is_empty else session.pin(point))
        if report.status is PinStatus.OK:
            self._held = point
        if report.status is PinStatus.UNSAFE:
            self.close()
            raise BoardUnsafeError(
                f"the clocks of {self.name} could not be restored: {report.message}",
                "Look at it; then, on the board: device-agent clocks restore",
            )
        return report

    def run(self, spec: RunSpec, program: bytes | BufferName, inputs: Mapping[str, Any]) -> tuple[Outcome, Arrays]:
        """Run a program. Raises what `BoardSession.measure` raises; the session is over then."""
        return self._ask(lambda session: session.run_model(spec, program, inputs))

    def measure(self, spec: MeasureSpec, library: bytes) -> Outcome:
        """Time one kernel. Raises what `run` raises."""
        return self._ask(lambda session: session.measure(spec, library))

    def power(self, spec: PowerSpec) -> PowerTrace:
        """Sample its power and temperature. Raises what `run` raises."""
        return self._ask(lambda session: session.power(spec))

    def cut(self) -> None:
        """End the running call, from another thread."""
        if (session := self._session) is not None:
            session.cut()

    def close(self) -> None:
        """Close the session; the board's agent ends what runs there and restores the clocks. Safe to call twice."""
        session, self._session, self._held = self._session, None, None
        if session is not None:
            session.close()

    def _ask(self, call: Callable[[BlockingSession], T]) -> T:
        if self._session is None:
            raise BoardLostError(f"there is no session with {self.name}")
        try:
            return call(self._session)
        except FarmError:
            self.close()
            raise
