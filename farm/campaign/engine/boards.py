"""The boards that campaigns work on and their calls: measurements, programs, reference kernels.

Nothing here waits: the engine polls. `board_keeping` decides which boards are held, `engine_board` is one board,
`farm.crew.site` decides who is to blame.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, RunSpec, Status
from farm.campaign.engine import reference_kernels
from farm.campaign.engine.board_keeping import BoardKeeping
from farm.campaign.engine.engine_board import Arrived, AskedBack, BoardEvent, Call, EngineBoard, Left
from farm.campaign.engine.host import HostBoard, KeptServices
from farm.campaign.engine.reference_kernels import ReferenceKernel, Rhythm
from farm.closing import Closing
from farm.crew.health import Kind
from farm.crew.held_board import Ended, measuring, running
from farm.errors import BoardBusyError, FarmError, InternalError, UnavailableError
from farm.store import Store

# How long a board is left alone, by cause: another client has it; it is not what it is registered as or lacks what was
# asked for; it could not be reached, perhaps by this machine's fault.
_BUSY_PAUSE_S, _MISFIT_PAUSE_S, _TROUBLE_PAUSE_S = 10.0, 300.0, 10.0
# One may be chance.
_LOSSES_IN_A_ROW = 2

__all__ = ["Arrived", "AskedBack", "BoardEvent", "EngineBoards", "Left"]


class EngineBoards(BoardKeeping, Closing):
    """The boards held and their calls. Not thread-safe; use as a context manager."""

    def __init__(
        self,
        services: KeptServices,
        store: Store,
        note: Callable[[str], None],
        host: HostBoard,
        rhythm: Rhythm | None = None,
    ) -> None:
        """See `BoardKeeping`. `rhythm`: how often boards run their type's reference kernel."""
        super().__init__(services, store, note, host)
        self._rhythm = rhythm or Rhythm()
        self._kernels: dict[str, ReferenceKernel] = {}
        # How often each board was found to drift.
        self._drifts: collections.Counter[str] = collections.Counter()

    def offer_reference_kernel(self, board_type: str, point: OperatingPoint, spec: MeasureSpec, library: bytes) -> None:
        """Make this candidate, which ran well, the type's reference kernel; the first one stays, unless it fails.

        Boards run it between trials. One that drifts is left, and the drift is written to the store.
        """
        if board_type not in self._kernels:
            self._kernels[board_type] = ReferenceKernel.of(point, spec, library, self._rhythm)

    def ask_reference_kernels(self, board_types: Collection[str]) -> None:
        """Have boards of these types run their reference kernel before their results are used; see `is_settling`."""
        for held in self._held.values():
            if held.board_type in board_types and (kernel := self._kernels.get(held.board_type)):
                kernel.book.ask(held.name)

    def is_settling(self, board_types: Collection[str]) -> bool:
        """Whether it is still open if a board of these types drifts."""
        return any(
            kernel.book.is_settling(held.name)
            for held in self._held.values()
            if held.board_type in board_types and (kernel := self._kernels.get(held.board_type))
        )

    def poll(self) -> list[BoardEvent]:
        """Report events since the last call. Never waits, but for the store.

        It touches only boards that have answered, but at each look: there may be a thousand.
        """
        while self.bell.answered:
            held = self.bell.answered.popleft()
            if self._held.get(held.name) is held:
                self._collect(held)
                self._send_reference_kernel(held)
        if self._look(time.monotonic()):
            for held in list(self._held.values()):
                self._send_reference_kernel(held)
        events, self._events = self._events, []
        return events

    def measure(self, board: str, point: OperatingPoint, spec: MeasureSpec, library: bytes) -> Future[Ended]:
        """Time a candidate after the board's earlier calls; to cancel the answer revokes it.

        Raises InternalError where the board is not held.
        """
        return self._require(board).send(Call("measure", point, measuring(spec, library)))

    def run(
        self, board: str, point: OperatingPoint, spec: RunSpec, program: bytes, inputs: Mapping[str, Any]
    ) -> Future[Ended]:
        """Run a program. As `measure`."""
        return self._require(board).send(Call("run", point, running(spec, program, inputs)))

    # Collecting

    def _collect(self, held: EngineBoard) -> None:
        """Take in what a board's session has answered, in order."""
        if held.connecting is not None and held.connecting.done():
            opened, held.connecting = held.connecting, None
            self._finish_connecting(held, opened.result())
        while held.connecting is None and held.name in self._held and held.calls:
            call = held.calls[0]
            if call.asked is None or not call.asked.done():
                return
            if call.revoked or call.asked.cancelled():
                held.calls.popleft()
                held.begin_next()
                continue
            ended = call.asked.result()
            if isinstance(ended.result, FarmError):
                outcome = held.blame.judge_error(ended.result)
            else:
                outcome = held.blame.judge(ended.result, ended.pin)
            self._end_call(held, outcome, ended)

    def _end_call(self, held: EngineBoard, outcome: Outcome, ended: Ended) -> None:
        """Answer the ended call at the head, and leave a board that is unfit."""
        call = held.calls.popleft()
        if not call.revoked:
            kernel = self._kernels.get(held.board_type)
            if call.kind == "measure" and kernel:
                kernel.book.note_trial(held.name)
            elif call.kind == reference_kernels.ANCHOR:
                if kernel:
                    kernel.take_in(held.name, outcome, ended.board_s, self._store.trials.fetch_mark())
                    if kernel.is_worn:
                        del self._kernels[held.board_type]
                self._judge_reference_kernels(held)
            call.answer.set_result(dataclasses.replace(ended, result=outcome))
        # This machine's agent starts anew if it was lost twice in a row and still runs.
        held.losses = held.losses + 1 if outcome.status is Status.BOARD_LOST else 0
        if held.host is not None and held.losses >= _LOSSES_IN_A_ROW:
            held.losses = 0
            held.host.restart_agent()
            self._store.events.add("stopped", held.key, "its agent did not answer")
            self._look_at = 0.0
        if outcome.status in (Status.BOARD_LOST, Status.FARM_ERROR, Status.THROTTLED):
            self._look_at = 0.0  # the run may have made the board unfit
        held.begin_next()
        if doubt := held.blame.doubt:
            self._leave(held, doubt.reason, _MISFIT_PAUSE_S if doubt.lasts else _TROUBLE_PAUSE_S)

    def _send_reference_kernel(self, held: EngineBoard) -> None:
        kernel, is_ready = self._kernels.get(held.board_type), held.connecting is None and not held.over
        if kernel and is_ready and held.name in self._wanted and held.name not in self._yielding:
            kernel.send_if_due(held)

    def _judge_reference_kernels(self, ran: EngineBoard) -> None:
        """Leave boards that drift: a run may speak of its own board or change what others are compared with."""
        kernel = self._kernels.get(ran.board_type)
        names = kernel.book.list_suspects(ran.name) if kernel else [ran.name]
        for held in [self._held[name] for name in names if name in self._held]:
            if kernel and (verdict := kernel.book.find_drifting(held.name)):
                kernel.book.doubt(held.name)
                self._drifts[held.name] += 1
                since = held.taken_at if verdict.since is None else verdict.since
                after = held.taken_mark if verdict.mark is None else verdict.mark
                reason = reference_kernels.describe(verdict, since)
                held.observe(Kind.DRIFTED, reason)
                self._leave(held, reason, self._rhythm.plan_pause_s(self._drifts[held.name]), after)
            elif held is ran:
                self._welcome(held)

    def _welcome(self, held: EngineBoard) -> None:
        """Report a board that is ready: its session is open, and it has proved itself where it had to."""
        kernel = self._kernels.get(held.board_type)
        if not held.arrived and not (kernel and kernel.book.needs_proof(held.name)):
            held.arrived = True
            self._note(f"working on {held.name}")
            rests = held.host is not None and held.host.rests
            if held.host is not None:
                self._store.boards.save_description(held.name, held.description or {}, simulated=False)
            self._events.append(Arrived(held.name, held.board_type, held.labels, held.description or {}, rests))

    def _finish_connecting(self, held: EngineBoard, ended: Ended) -> None:
        error = ended.result
        if not isinstance(error, FarmError):
            held.description = error.to_dict()
            held.begin_next()
            self._welcome(held)
            return
        if not isinstance(error, UnavailableError):  # what it is registered as, a probe judges
            held.blame.judge_error(error)
        pauses = {BoardBusyError: _BUSY_PAUSE_S, UnavailableError: _MISFIT_PAUSE_S}
        self._leave(held, error.message, pauses.get(type(error), _TROUBLE_PAUSE_S))

    def _require(self, board: str) -> EngineBoard:
        held = self._held.get(board)
        if held is None or not held.arrived:
            raise InternalError(f"board {board!r} is not held, so it gets no work")
        return held
