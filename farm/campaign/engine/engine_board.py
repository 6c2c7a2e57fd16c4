"""One leased board of the engine: its lease, its session, its queue of calls, its observations.

`boards` decides when boards are taken and left.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

from device_agent.protocol import OperatingPoint
from farm.campaign.engine.host import HostBoard
from farm.connectivity.tracker import Tracker
from farm.crew.health import Kind
from farm.crew.held_board import Address, Ended, HeldBoard, Job, Request, opening
from farm.crew.leased_board import LeasedBoard
from farm.crew.site import Blame
from farm.errors import InternalError
from farm.store import Store
from farm.types.documents import BoardInfo
from farm.values import WorkKind

# An agent that replaces a dead one registers within seconds, a board whose session was cut at once.
REQUEST_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A board is leased and its session is open.

    `is_host`: it is the machine that searches and builds, which rest while it measures.
    """

    board: str
    board_type: str
    labels: Mapping[str, str]
    description: Mapping[str, Any]
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class Left:
    """A board may be used no more; its open calls get no answer.

    `doubted_after`: results after this mark (`store.trials.fetch_mark`) are not
    trusted.
    """

    board: str
    reason: str
    doubted_after: int | None = None


@dataclasses.dataclass(frozen=True)
class AskedBack:
    """The queue has given a board to another user: it gets no more work and is left once idle. `Left` follows."""

    board: str
    reason: str


BoardEvent = Arrived | Left | AskedBack


class Bell:
    """Has the engine's thread wait until something happened. Used by it alone, but for `ring` and `note`.

    `answered` are the boards that have answered since they were taken from it.
    """

    def __init__(self) -> None:
        self.answered: collections.deque[EngineBoard] = collections.deque()
        self._rung = threading.Event()
        self._waited_for: frozenset[Future[Any]] = frozenset()

    def ring(self, _: object = None) -> None:
        """End the wait, or the next one."""
        self._rung.set()

    def note(self, board: EngineBoard) -> None:
        """Have the engine look at a board."""
        self.answered.append(board)
        self._rung.set()

    def wait(self, timeout_s: float, calls: Collection[Future[Any]] = ()) -> None:
        """Wait until `ring` was called, one of these calls is done or the time is over.

        A `ring` whose cause was handled already ends the wait, too.
        """
        now = frozenset(calls)
        for call in now - self._waited_for:
            call.add_done_callback(self.ring)
        self._waited_for = now
        self._rung.wait(timeout_s)
        self._rung.clear()


@dataclasses.dataclass
class Call:
    """A call to a board: `job` is done at `point`.

    `answer` is the caller's, who cancels it to revoke the call, and `asked` the session's; `began_s` (monotonic) is
    when it became first in the queue.
    """

    kind: str
    point: OperatingPoint
    job: Job
    answer: Future[Ended] = dataclasses.field(default_factory=Future)
    asked: Future[Ended] | None = None
    began_s: float | None = None

    @property
    def revoked(self) -> bool:
        return self.answer.cancelled()

    def revoke(self) -> None:
        """End it, begun or not."""
        if self.asked is not None:
            self.asked.cancel()


class EngineBoard(LeasedBoard):
    """A leased board. For `Blame` it is the site of a run. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        row: BoardInfo,
        tracker: Tracker | None,
        purpose: str,
        bell: Bell,
        mark: int,
        host: HostBoard | None = None,
    ) -> None:
        """Take the lease; `start_session` is to follow. Each answer rings `bell`.

        `mark` is the store's now (`store.trials.fetch_mark`). `host` is this machine where it is the board; its tracker
        is used then. Raises what `LeasedBoard` raises.
        """
        self.host, self._tracker, self._bell = host, tracker, bell
        self.board_type, self.labels = row.board_type, dict(row.labels)
        # When it was taken (monotonic, s), and the store's mark then.
        self.taken_at, self.taken_mark = time.monotonic(), mark
        _ = self.tracker  # raises before the lease is taken
        find_tracker = (lambda: tracker) if host is None else None
        kind = WorkKind.TRIALS if host is None else None  # this machine is in no queue
        super().__init__(store, f"{self.board_type}/{row.name}", purpose, find_tracker, kind=kind)
        self.description: dict[str, Any] | None = None
        self.arrived = False
        self.calls: collections.deque[Call] = collections.deque()
        self.losses = 0  # in a row
        self.blame = Blame(self)
        self._like = {"board_type": self.board_type, "simulated": row.simulated}
        self.session: HeldBoard | None = None
        self.connecting: Future[Ended] | None = None

    @property
    def can_change(self) -> bool:
        """Whether another board could do its work: not where it is this machine."""
        return self.host is None

    @property
    def tracker(self) -> Tracker:
        tracker = self.host.tracker if self.host is not None else self._tracker
        if tracker is None:
            raise InternalError(f"a {self.board_type} cannot be taken without a tracker")
        return tracker

    def start_session(self) -> None:
        """End the session, if any, and give a new one the open calls. Raises TransientError."""
        if self.session is not None:
            self.session.hang_up()
        self.session = HeldBoard()
        self.connecting = self._ask(opening(REQUEST_TIMEOUT_S))
        for call in list(self.calls):
            if call.revoked:
                self.calls.remove(call)
            else:
                call.asked, call.began_s = self._ask(call.job, call.point), None

    def send(self, call: Call) -> Future[Ended]:
        """Queue a call; return its answer, whose result is an outcome."""
        call.asked = self._ask(call.job, call.point)
        call.answer.add_done_callback(lambda answer: call.revoke() if answer.cancelled() else None)
        self.calls.append(call)
        self.begin_next()
        return call.answer

    def begin_next(self) -> None:
        """Note when the first call has the board to itself."""
        if self.calls and self.calls[0].began_s is None and self.connecting is None:
            self.calls[0].began_s = time.monotonic()

    def _ask(self, job: Job, point: OperatingPoint | None = None) -> Future[Ended]:
        assert self.session is not None  # since `start_session`
        reopen_s = None if point is None else REQUEST_TIMEOUT_S
        where = Address(self.tracker, self.key, self.lease)
        answer = self.session.ask(Request(where, job, point, reopen_s, self._like))
        answer.add_done_callback(lambda _: self._bell.note(self))
        return answer

    def observe(self, kind: Kind, detail: str) -> None:
        if self.host is None:
            super().observe(kind, detail)

    def give_back(self) -> None:
        """End the session, and then return the lease, without waiting; the board's agent restores its clocks."""
        if self.session is None:
            self.keeper.leave()
        else:
            self.session.hang_up().add_done_callback(lambda _: self.keeper.leave())
