"""A pool of boards: a job runs on any free one, and on another after a failure.

For jobs that any board of a type may run, such as a script's candidates; all on the crew's loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import anyio

from device_agent.protocol import FaultSide, Outcome, Status
from farm.crew.crew import Crew, OpenSite
from farm.crew.driven_board import DrivenBoard
from farm.crew.site import COMMON
from farm.errors import FarmError, InternalError, TransientError

# How often a job of unknown fault is tried; on different boards as far as there are any.
MAX_ATTEMPTS = 3
# How often an idle board is checked.
_LOOK_S = 0.5
# The pause before a failed board is tried again.
_AGAIN_S = 1.0

T = TypeVar("T")
Job = Callable[[DrivenBoard], Awaitable[Outcome]]


@dataclasses.dataclass(frozen=True)
class Tried:
    """The outcome that counts, the board's time for it, and boards where it failed before."""

    outcome: Outcome
    board_s: float
    tried: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class _Slot:
    """Room for a board; `board` is None while there is no usable one."""

    board: DrivenBoard | None = None
    busy: bool = False
    lost: bool = False


class BoardPool:
    """Up to `count` boards, all like the first one. They are returned when the crew ends."""

    def __init__(self, crew: Crew, open_site: OpenSite, count: int, note: Callable[[str], None]) -> None:
        """Begin to take boards. Their sites limit how long jobs wait without any board."""
        self._crew, self._open_site, self._note = crew, open_site, note
        self._under_way = 0
        self._failure: FarmError | None = None
        self._description: Mapping[str, Any] = {}
        self._changed = anyio.Event()
        self._slots = [_Slot() for _ in range(count)]
        for slot in self._slots:
            crew.start(self._keep(slot))

    async def describe(self) -> Mapping[str, Any]:
        """Return the first board's description; waits for one. Raises UnavailableError."""
        self._under_way += 1
        try:
            return await self._until(lambda: self._description or None)
        finally:
            self._under_way -= 1

    async def run(self, job: Job) -> Tried:
        """Run `job` on the first free board, and on another where neither the job nor we are to blame.

        Raises UnavailableError where there is no board.
        """
        tried: list[str] = []
        self._under_way += 1
        try:
            while True:
                slot = await self._until(lambda: self._find_free(tried))
                outcome, board_s = await self._try(slot, job)
                good = outcome.status.fault_side in (None, FaultSide.CANDIDATE)
                if not good:
                    tried.append(outcome.board)
                if good or len(tried) >= MAX_ATTEMPTS:
                    return Tried(outcome, board_s, tuple(tried))
        finally:
            self._under_way -= 1

    async def _until(self, find: Callable[[], T | None]) -> T:
        """Wait until `find` returns a value, and return that. Raises the pool's failure."""
        while True:
            if self._failure is not None:
                raise self._failure
            if (found := find()) is not None:
                return found
            await self._changed.wait()

    def _note_change(self) -> None:
        """Have those look again that wait."""
        self._changed.set()
        self._changed = anyio.Event()

    def _find_free(self, tried: list[str]) -> _Slot | None:
        """Return a free board: one that failed the job before only where there is no other."""
        others = {slot.board.name for slot in self._slots if slot.board is not None} - set(tried)
        for slot in self._slots:
            if slot.board is not None and not slot.busy and not slot.lost and (slot.board.name in others or not others):
                return slot
        return None

    async def _try(self, slot: _Slot, job: Job) -> tuple[Outcome, float]:
        board = slot.board
        assert board is not None  # it was free
        slot.busy, name = True, board.name
        try:
            outcome = await job(board)
        except FarmError as error:
            status = Status.BOARD_LOST if isinstance(error, TransientError) else Status.FARM_ERROR
            outcome = Outcome(status, error.message, board=name)
            slot.lost = True
        finally:
            slot.busy = False
            self._note_change()
        return outcome, board.board_s

    async def _keep(self, slot: _Slot) -> None:
        """Keep a board in a slot, replaced when it is lost, until no board can be had."""
        while self._failure is None:
            try:
                board = await self._crew.take(self._open_site)
                try:
                    while True:
                        await self._open(slot, board)
                        await self._look_after(slot, board)
                finally:
                    slot.board = None
                    self._crew.give_back(board)
            except FarmError as error:
                waiting = self._under_way or not self._description
                if waiting and not any(each.board for each in self._slots):
                    self._failure = error
                    self._note_change()
                    return
                self._note(error.message)
                await anyio.sleep(_AGAIN_S)
            except Exception as error:  # waiting jobs must not wait for ever
                self._failure = InternalError(f"boards are driven no more: {error!r}")
                self._note_change()
                raise

    async def _open(self, slot: _Slot, board: DrivenBoard) -> None:
        """Open a session. The first board determines the others' description."""
        while True:
            if self._description:
                board.require_like({field: self._description[field] for field in COMMON})
            try:
                found = await board.open()
                break
            except TransientError as error:
                self._note(f"{board.name}: {error.message}")
                await anyio.sleep(_AGAIN_S)
        self._description = self._description or found.to_dict()
        slot.board, slot.lost = board, False
        self._note_change()

    async def _look_after(self, slot: _Slot, board: DrivenBoard) -> None:
        """Check the board until its session, or the board itself, has to be replaced."""
        while not slot.lost:
            with anyio.move_on_after(_LOOK_S):
                await self._until(lambda: slot.lost or None)
            slot.lost = slot.lost or (not slot.busy and not board.look())
        slot.board = None
