"""One leased board as campaigns have it: its lease, its process, the calls sent there, and what is seen of it.

When boards are taken and left, and what the engine is told, is `boards`' business.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device_agent.protocol import OperatingPoint, Outcome
from farm.campaign.engine.host import HostBoard
from farm.connectivity.tracker import Tracker
from farm.crew.blame import Blame
from farm.crew.board_calls import BoardProcess, JobOrder, plan_limit_s
from farm.crew.board_process import Open, Request
from farm.crew.health import Kind
from farm.crew.held_board import to_address
from farm.crew.leased_board import LeasedBoard
from farm.errors import InternalError
from farm.measure.arrays import Arrays
from farm.store import Store
from farm.values import WorkKind


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A board is leased and its session is open: it may be given work. `is_host`: while it measures, search and build
    rest, since it is the machine that they run on.
    """

    board: str
    board_type: str
    labels: Mapping[str, str]
    description: Mapping[str, Any]
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class Left:
    """A board may be used no more. Whatever it had still to do ends with this; no `TrialMeasured` or `Ran` follows.

    `lost`: it went down under what it was measuring, of which no `TrialMeasured` told. `doubted_after`: what it
    measured after this mark of the store's (`Store.fetch_mark`) is not to be believed.
    """

    board: str
    reason: str
    lost: bool = False
    doubted_after: int | None = None


@dataclasses.dataclass(frozen=True)
class AskedBack:
    """A board is somebody else's in the queue: it is left as soon as it has nothing more to do, and is to be given
    nothing more. `Left` follows.
    """

    board: str
    reason: str


@dataclasses.dataclass(frozen=True)
class TrialMeasured:
    """A measurement ended. `board_s` is for how long the board was busy with it, bringing its clocks there included."""

    assignment: Any
    board: str
    outcome: Outcome
    board_s: float


@dataclasses.dataclass(frozen=True)
class Ran:
    """A program's run ended; `job` is whose it was."""

    job: Any
    board: str
    outcome: Outcome
    outputs: Arrays = dataclasses.field(repr=False)


BoardEvent = Arrived | Left | AskedBack | TrialMeasured | Ran


# An agent that takes a dead one's place is at the tracker in some seconds, a board whose session was cut at once.
REQUEST_TIMEOUT_S = 30.0
# A process that loads TVM's runtime, on a machine where many start at once; then the board is waited for.
_CONNECT_TIMEOUT_S = 120.0


@dataclasses.dataclass
class Call:
    """Something that a board was asked for. `key` is whose it is (`kind` says what), `order` what its process is to do
    at `point`.

    `number` is the process's for it; `began_s` is when nothing was before it any more, on the monotonic clock.
    """

    kind: str
    key: Any
    point: OperatingPoint
    order: JobOrder
    number: int = 0
    began_s: float | None = None
    revoked: bool = False

    @property
    def limit_s(self) -> float:
        """When it counts as stuck, once it has begun."""
        return plan_limit_s(self.order.job, REQUEST_TIMEOUT_S)


class CrewBoard(LeasedBoard):
    """A leased board. For `Blame` it is the place that a run works at. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        row: Mapping[str, Any],
        tracker: Tracker | None,
        purpose: str,
        log: Path | None,
        host: HostBoard | None = None,
    ) -> None:
        """Take its lease, start the process, and have it open a session, which is not waited for.

        `log` takes what the process prints; `host` is this machine where that is the board, whose tracker is taken
        then. Raises what `LeasedBoard` raises.
        """
        self.host, self._tracker = host, tracker
        self.board_type, self.labels = str(row["board_type"]), dict(row["labels"] or {})
        # When it was taken (monotonic, s), and the mark of the store's (`Store.fetch_mark`) then.
        self.taken_at, self.taken_mark = time.monotonic(), store.fetch_mark()
        _ = self.tracker  # where there is none, nothing is taken
        find_tracker = (lambda: tracker) if host is None else None
        kind = WorkKind.TRIALS if host is None else None  # this machine is in no queue
        super().__init__(store, f"{self.board_type}/{row['name']}", purpose, find_tracker, kind=kind)
        self.description: dict[str, Any] | None = None
        self.arrived = False
        self.calls: collections.deque[Call] = collections.deque()
        self.losses = 0  # in a row
        self.blame = Blame(self)
        self._like = {"board_type": self.board_type, "simulated": bool(row["simulated"])}
        self._log = log
        self.process: BoardProcess | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.give_back)
            self.start_process()
            undo.pop_all()

    @property
    def can_change(self) -> bool:
        """See `Site`: what waits for it is done elsewhere, unless it is this machine."""
        return self.host is None

    @property
    def tracker(self) -> Tracker:
        """Where it is asked for."""
        tracker = self.host.tracker if self.host is not None else self._tracker
        if tracker is None:
            raise InternalError(f"a {self.board_type} is to be taken without a tracker")
        return tracker

    @property
    def work(self) -> list[Call]:
        """The calls that the engine waits for."""
        return [call for call in self.calls if call.kind != "anchor" and not call.revoked]

    def start_process(self) -> None:
        """Put a process in the place of the one before, if any, and send it what is still to do.

        Raises TransientError where there is no room for one.
        """
        if self.process is not None:
            self.process.kill()
        self.process = BoardProcess(self._log)
        self.connecting: int | None = self._ask(JobOrder(Open(REQUEST_TIMEOUT_S)))
        self.connect_by = time.monotonic() + _CONNECT_TIMEOUT_S
        for call in list(self.calls):
            if call.revoked:
                self.calls.remove(call)
            else:
                self._hand_over(call)

    def send(self, call: Call) -> None:
        """Have a call carried out after those before it."""
        self._hand_over(call)
        self.calls.append(call)

    def _hand_over(self, call: Call) -> None:
        call.number, call.began_s = self._ask(call.order, call.point), None

    def _ask(self, order: JobOrder, point: OperatingPoint | None = None) -> int:
        assert self.process is not None  # since `__init__`
        reopen_s = None if point is None else REQUEST_TIMEOUT_S
        where = to_address(self.tracker, self.key, self.lease)
        return self.process.ask(order, Request(where, order.job, point, reopen_s, self._like))

    def revoke(self, call: Call) -> None:
        """Take a call back, begun or not."""
        call.revoked = True
        if self.process is not None:
            self.process.revoke(call.number)

    def observe(self, kind: Kind, detail: str) -> None:
        """See `Site.observe`. This machine is judged by whoever sits at it."""
        if self.host is None:
            super().observe(kind, detail)

    def hang_up(self) -> None:
        """Have the process end the session; the board's agent puts its clocks back. Waits for nothing."""
        if self.process is not None:
            self.process.hang_up()

    def give_back(self) -> None:
        """End the process, then give the lease back. Waits for both. Safe to call twice."""
        if self.process is not None:
            self.process.stop()
        super().give_back()
