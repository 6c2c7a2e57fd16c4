"""Lease the boards that campaigns want as the queue grants them; leave unfit ones and those asked back.

`boards` gives them work.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from device_agent.protocol import Outcome, Status
from farm.campaign.engine.engine_board import AskedBack, Bell, BoardEvent, EngineBoard, Left
from farm.campaign.engine.host import HostBoard, KeptServices
from farm.connectivity.tracker import Tracker
from farm.crew.choice import plan_choice
from farm.crew.held_board import Ended
from farm.crew.leased_board import free_orphans
from farm.crew.queue_entry import QueueEntry, describe, read_queue
from farm.crew.queue_rules import QueuePlan
from farm.crew.site import find_outage
from farm.errors import BoardUnsafeError, StoreFaultError, TransientError, UnavailableError, UsageError
from farm.store import Store
from farm.types.documents import BoardInfo
from farm.values import BoardRequest, State, WorkKind

# Longer than a command's: an engine may be busy for seconds, and would lose its place in the queue.
_TTL_S = 30.0
# How often to look for free boards and at the health of those held.
_LOOK_S = 0.5
# A look reads all boards: the next one comes after this many times as long as one took.
LOOK_REST = 10.0
# Boards that are leased in one transaction.
_TAKEN_AT_ONCE = 50
# The text of a lease.
_PURPOSE = "campaign"
# For releasing all leases at the engine's end; leases left after that expire.
_CLOSE_TIMEOUT_S = 4.0
# What taking a board may raise; any other error is a bug and ends the engine.
_NOT_TAKEN = (TransientError, UnavailableError, BoardUnsafeError, UsageError)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BoardsAsked:
    """The boards of a type that a campaign may use."""

    campaign: str
    purpose: str
    board_type: str
    boards: frozenset[str]
    priority: int = 0

    def without(self, board: str) -> BoardsAsked:
        return dataclasses.replace(self, boards=self.boards - {board})


class TrialQueue:
    """The campaigns' entries in the queue for boards. Not thread-safe, as its store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places: dict[tuple[str, str], QueueEntry] = {}
        self._plan = QueuePlan()
        self._known: dict[int, BoardRequest] = {}

    def ask(self, asked: Sequence[BoardsAsked]) -> None:
        """Replace the entries by these."""
        wanted = {(each.campaign, each.board_type): each for each in asked if each.boards}
        for key in self._places.keys() - wanted.keys():
            self._places.pop(key).leave()
        for key, each in wanted.items():
            if key in self._places:
                self._places[key].change(each.boards)
            else:
                self._places[key] = QueueEntry(
                    self._store,
                    WorkKind.TRIALS,
                    each.purpose,
                    each.board_type,
                    each.boards,
                    priority=each.priority,
                    campaign=each.campaign,
                    ttl_s=_TTL_S,
                )

    def look(self, rows: Sequence[BoardInfo], leaving: Collection[str]) -> None:
        """Read the queue's state; `rows` are the store's of boards. A busy store changes nothing."""
        if not self._places:
            self._plan = QueuePlan()
            return
        try:
            for place in self._places.values():
                place.stay()
            queue, self._plan = read_queue(self._store, rows, leaving)
        except TransientError as error:
            _log.info("the queue cannot be read: %s", error.message)
            return
        self._known = {each.id: each for each in queue.requests}

    def may_take(self, board: str) -> bool:
        """Whether the queue grants us a free board."""
        return self._plan.grants.get(board) in {place.number for place in self._places.values()} - {None}

    def asked_back(self, held: Collection[str]) -> dict[str, str]:
        """Return which of our boards are granted to others, and to whom."""
        found = {name: self._known.get(number) for name, number in self._plan.yields.items() if name in held}
        return {name: describe(request) for name, request in found.items() if request is not None}

    def priorities(self) -> dict[str, int]:
        """Return the priority of each campaign, as operators have set it."""
        return {campaign: place.priority for (campaign, _), place in self._places.items()}

    def close(self) -> None:
        for place in self._places.values():
            place.leave()
        self._places.clear()


class BoardKeeping:
    """All boards held, and the reports on them. Not thread-safe, as its store."""

    def __init__(self, services: KeptServices, store: Store, note: Callable[[str], None], host: HostBoard) -> None:
        """Lease nothing before `want`. `note` gets messages for operators; `host` is this machine, whose agent runs
        while wanted.
        """
        self._host = host
        self._host_is_wanted = False
        self._services, self._store, self._note = services, store, note
        # Rings once a board has answered.
        self.bell = Bell()
        self._wanted: dict[str, str] = {}
        self._held: dict[str, EngineBoard] = {}
        self._paused: dict[str, float] = {}
        self._look_at = 0.0
        self._events: list[BoardEvent] = []
        self._closing: list[EngineBoard] = []
        self._trouble = ""
        self._queue = TrialQueue(store)
        # Boards that another user gets next.
        self._yielding: set[str] = set()

    def want(self, asked: Sequence[BoardsAsked]) -> None:
        """Use these boards from now on and no others.

        Each is leased once it is free, fit and granted by the queue. A board no longer wanted is left once idle.
        """
        self._wanted = {name: each.board_type for each in asked for name in each.boards}
        self._queue.ask([each.without(self._host.name) for each in asked])

    def priorities(self) -> dict[str, int]:
        """The priority of each campaign that asks for boards, as operators set it in the queue."""
        return self._queue.priorities()

    def has_taken(self, name: str) -> bool:
        """Whether a board is leased, connected or not."""
        return name in self._held

    def want_host(self, wanted: bool) -> str:
        """Use this machine as a board, or stop doing so; return its name, "" where it is none now."""
        self._host_is_wanted = wanted
        if wanted:
            self._host.want()
        return self._host.name

    def close(self) -> None:
        """Leave every board. Waits some seconds at most; leases not returned by then expire."""
        for held in self._held.values():
            self._give_back(held)
        self._held.clear()
        self._queue.close()
        self._host.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for held in self._closing:
            held.keeper.closed.wait(max(0.0, deadline - time.monotonic()))

    def _look(self, now: float) -> bool:
        """Leave boards that are unfit or no longer wanted, and take free ones; at most once an interval."""
        if now < self._look_at:
            return False
        self._closing = [held for held in self._closing if not held.keeper.closed.is_set()]
        self._look_at = now + _LOOK_S
        self._look_after_host()
        rows = {row.name: row for row in self._store.boards.fetch()}
        self._queue.look(list(rows.values()), self._yielding)
        for name, reason in self._queue.asked_back(self._held).items():
            if name not in self._yielding and name != self._host.name:
                self._yielding.add(name)
                self._note(f"{name} goes to {reason}")
                self._events.append(AskedBack(name, reason))
        lost = {name for name, row in rows.items() if row.state is State.OFFLINE}
        offline = [held for held in self._held.values() if held.name in lost]
        for held in list(self._held.values()):
            if reason := held.find_end(rows):
                if held in offline and not held.over:
                    self._lose(held, reason, alone=len(offline) == 1)
                self._leave(held, reason)
            elif held.name not in self._wanted and not held.calls:
                self._leave(held, "not needed any more")
            elif held.name in self._yielding and not held.calls:
                self._leave(held, "another user of the queue gets it")
        self._take(rows)
        if self._look_at:
            self._look_at = max(self._look_at, now + LOOK_REST * (time.monotonic() - now))
        return True

    def _look_after_host(self) -> None:
        """Restart the processes of this machine's board, or end them once unwanted. Raises UnavailableError."""
        host = self._host
        if not host.name:
            return
        held = self._held.get(host.name)
        if held is None:
            if not self._host_is_wanted:
                host.close()
            return
        before = (held.tracker.host, held.tracker.port)
        for what in host.ensure_alive():
            self._store.events.add("restarted", what, "its process had died")
        if (held.tracker.host, held.tracker.port) != before:
            try:
                held.start_session()
            except TransientError as error:  # it is taken again at the next look
                self._leave(held, error.message)

    def _take(self, rows: Mapping[str, BoardInfo]) -> None:
        """Lease boards that are wanted and free."""
        now = time.monotonic()
        names = [
            name
            for name, board_type in self._wanted.items()
            if name not in self._held
            and self._paused.get(name, 0.0) <= now
            and name in rows
            and rows[name].board_type == board_type
        ]
        if free_orphans(self._store, rows, names, _PURPOSE):
            self._look_at = 0.0  # they are seen to be free at the next look
        free = plan_choice(list(rows.values()), names).free
        if mine := [name for name in free if name == self._host.name]:
            self._lease(mine, rows, None)
        free = tuple(name for name in free if name not in mine and self._queue.may_take(name))
        if not free:
            return
        tracker = self._services.tracker
        trouble = find_outage(tracker)
        if trouble != self._trouble:
            self._trouble = trouble
            self._note(trouble or "the farm's services answer again")
        if tracker is not None and not trouble:
            self._lease(free, rows, tracker)

    def _lease(self, names: Sequence[str], rows: Mapping[str, BoardInfo], tracker: Tracker | None) -> None:
        """Lease boards at a tracker; None: this machine."""
        mark, host = self._store.trials.fetch_mark(), self._host if tracker is None else None
        for first in range(0, len(names), _TAKEN_AT_ONCE):
            taken: list[EngineBoard] = []
            try:
                with self._store.together(durably=True):
                    for name in names[first : first + _TAKEN_AT_ONCE]:
                        try:
                            board = EngineBoard(self._store, rows[name], tracker, _PURPOSE, self.bell, mark, host)
                        except StoreFaultError:
                            raise
                        except _NOT_TAKEN as error:  # another user was faster
                            _log.info("%s is not taken: %s", name, error.message, extra={"board": name})
                        else:
                            taken.append(board)
                for board in taken:  # the store knows its token before the board does
                    board.start_session()
                    self._held[board.name] = board
            except _NOT_TAKEN as error:  # the store is busy
                _log.info("no board is taken: %s", error.message)
                for board in taken:
                    if board.name not in self._held:
                        board.give_back()

    def _lose(self, held: EngineBoard, reason: str, alone: bool) -> None:
        """Report a board that failed, and with it the measurement that ran there.

        Boards that fail together share a cause, such as the network: no candidate is to blame.
        """
        if held.calls and held.connecting is None:
            began_s = held.calls[0].began_s
            board_s = 0.0 if began_s is None else time.monotonic() - began_s
            call = held.calls.popleft()
            status, others = (Status.BOARD_LOST, "") if alone else (Status.FARM_ERROR, "; so did others just then")
            if not call.revoked:
                outcome = Outcome(status, f"the board went {reason}{others}", board=held.name)
                call.answer.set_result(Ended(outcome, board_s))

    def _leave(self, held: EngineBoard, reason: str, pause_s: float = 0.0, doubted_after: int | None = None) -> None:
        """Leave a board; `pause_s` is how long it is not taken again."""
        if self._held.pop(held.name, None) is None:
            return
        self._yielding.discard(held.name)
        if pause_s:
            self._paused[held.name] = time.monotonic() + pause_s
        held.note_leaving(reason)
        self._note(f"left {held.name}: {reason}")
        self._give_back(held)
        if held.arrived:
            self._events.append(Left(held.name, reason, doubted_after))

    def _give_back(self, held: EngineBoard) -> None:
        held.give_back()
        self._closing.append(held)
