"""Boards that are kept for whatever is to be done: work runs on whichever is free, and elsewhere where that failed.

For work that any board of a type may do, as a script's candidates; all of it on the crew's thread.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from device_agent.protocol import FaultSide, Outcome, Status
from farm.crew.coroutines import pause, until
from farm.crew.crew import Crew, OpenSite
from farm.crew.driven_board import DrivenBoard
from farm.crew.site import COMMON
from farm.errors import FarmError, InternalError, TransientError

# How often work is done where nobody can say that it is to blame; on other boards as far as there are any.
MAX_ATTEMPTS = 3
# How often a board without work is looked at.
_LOOK_S = 0.5
# What is wrong with a board is looked at again this soon.
_AGAIN_S = 1.0

Job = Callable[[DrivenBoard], Awaitable[Outcome]]


@dataclasses.dataclass(frozen=True)
class Tried:
    """The outcome that counts, for how long the board was busy with it, and boards where it was tried in vain."""

    outcome: Outcome
    board_s: float
    tried: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class _Slot:
    """Room for a board; `board` is None while there is none that may be given work."""

    board: DrivenBoard | None = None
    busy: bool = False
    lost: bool = False

    def is_due(self, look_at: float) -> bool:
        """Whether the board is to be looked at, where nothing was seen to be wrong at that time at the latest."""
        return self.lost or (not self.busy and time.monotonic() >= look_at)


class BoardPool:
    """Up to `count` boards, all like the first one. They are given back when the crew ends."""

    def __init__(self, crew: Crew, open_site: OpenSite, count: int, note: Callable[[str], None]) -> None:
        """Start to take boards. Sites say how long work may wait while there is no board at all."""
        self._crew, self._open_site, self._note = crew, open_site, note
        self._under_way = 0
        self._failure: FarmError | None = None
        self._description: Mapping[str, Any] = {}
        self._slots = [_Slot() for _ in range(count)]
        for slot in self._slots:
            crew.start(self._keep(slot))

    async def describe(self) -> Mapping[str, Any]:
        """What the first board says of itself; waits for one. Raises UnavailableError."""
        self._under_way += 1
        try:
            return await until(self._find_description)
        finally:
            self._under_way -= 1

    async def run(self, job: Job) -> Tried:
        """Have a board do `job`, the first that is free; another one where neither the job nor we are to blame.

        Raises UnavailableError where no board can be had.
        """
        tried: list[str] = []
        self._under_way += 1
        try:
            while True:
                slot = await until(lambda: self._find_free(tried))
                outcome, board_s = await self._try(slot, job)
                good = outcome.status.fault_side in (None, FaultSide.CANDIDATE)
                if not good:
                    tried.append(outcome.board)
                if good or len(tried) >= MAX_ATTEMPTS:
                    return Tried(outcome, board_s, tuple(tried))
        finally:
            self._under_way -= 1

    def pids(self) -> dict[str, int]:
        """Process id of each board's process, for tests that harm it."""
        boards = [slot.board for slot in self._slots if slot.board is not None]
        return {board.name: board.pid for board in boards if board.pid is not None}

    def _require_hope(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _find_description(self) -> Mapping[str, Any] | None:
        self._require_hope()
        return self._description or None

    def _find_free(self, tried: list[str]) -> _Slot | None:
        """A board that is free: one on which it was tried only where there is no other board."""
        self._require_hope()
        others = {slot.board.name for slot in self._slots if slot.board is not None} - set(tried)
        for slot in self._slots:
            if slot.board is not None and not slot.busy and not slot.lost and (slot.board.name in others or not others):
                return slot
        return None

    async def _try(self, slot: _Slot, job: Job) -> tuple[Outcome, float]:
        board = slot.board
        assert board is not None  # it was found to be free
        slot.busy, name = True, board.name
        try:
            outcome = await job(board)
        except FarmError as error:
            status = Status.BOARD_LOST if isinstance(error, TransientError) else Status.FARM_ERROR
            outcome = Outcome(status, error.message, board=name)
            slot.lost = True
        finally:
            slot.busy = False
        return outcome, board.board_s

    async def _keep(self, slot: _Slot) -> None:
        """Have a board, and another one when that cannot be used any more, until nobody can be served."""
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
                    return
                self._note(error.message)
                await pause(_AGAIN_S)
            except Exception as error:  # who waits must not wait for ever
                self._failure = InternalError(f"boards are driven no more: {error!r}")
                raise

    async def _open(self, slot: _Slot, board: DrivenBoard) -> None:
        """Have a session there. The first board says what the others have to be like."""
        while True:
            if self._description:
                board.require_like({field: self._description[field] for field in COMMON})
            try:
                found = await board.open()
                break
            except TransientError as error:
                self._note(f"{board.name}: {error.message}")
                await pause(_AGAIN_S)
        self._description = self._description or found.to_dict()
        slot.board, slot.lost = board, False

    async def _look_after(self, slot: _Slot, board: DrivenBoard) -> None:
        """Until its session, or the board itself, has to be found again."""
        while not slot.lost:
            await until(functools.partial(slot.is_due, time.monotonic() + _LOOK_S))
            slot.lost = slot.lost or not board.look()
        slot.board = None
