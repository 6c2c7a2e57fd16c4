"""The boards that campaigns work on, and what they are given to do: measurements, programs, anchors.

Many at once, and nothing here waits: the engine asks again and again what happened. Which boards are held is in
`board_keeping`, what one is made of in `board_held`; who is to blame is decided as for one board (`farm.crew.blame`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, RunSpec, Status
from farm.campaign.engine import anchors
from farm.campaign.engine.anchors import Rhythm
from farm.campaign.engine.board_held import Arrived, AskedBack, BoardEvent, Call, CrewBoard, Left, Ran, TrialMeasured
from farm.campaign.engine.board_keeping import BoardKeeping, TrackerSource
from farm.campaign.engine.host import HostBoard
from farm.closing import Closing
from farm.crew import board_calls
from farm.crew.board_calls import ProcessLostError
from farm.crew.board_process import Ended
from farm.crew.health import Kind
from farm.errors import BoardBusyError, FarmError, InternalError, TransientError, UnavailableError
from farm.measure.arrays import Arrays
from farm.settings import Settings
from farm.store import Store

# How long a board is left alone that could not be used, by why: another client has it; it is not what it is registered
# as, or lacks what was asked for; its process died or could not reach it, which may be this machine's doing.
_BUSY_PAUSE_S, _MISFIT_PAUSE_S, _TROUBLE_PAUSE_S = 10.0, 300.0, 10.0
# Once may be chance.
_LOSSES_IN_A_ROW = 2

__all__ = ["Arrived", "AskedBack", "BoardCrew", "BoardEvent", "Left", "Ran", "TrialMeasured"]


class BoardCrew(BoardKeeping, Closing):
    """The boards at hand, and what they have to do. Not thread-safe; use as a context manager."""

    def __init__(
        self,
        services: TrackerSource,
        store: Store,
        settings: Settings,
        purpose: str,
        note: Callable[[str], None],
        rhythm: Rhythm | None = None,
        host: HostBoard | None = None,
    ) -> None:
        """See `BoardKeeping`. `rhythm`: how often boards measure their type's anchor."""
        log = settings.home_path / "logs" / "boards.log"
        super().__init__(services, store, purpose, note, host or HostBoard(settings, store, note), log)
        self._anchoring = anchors.Anchoring(rhythm or Rhythm())

    @property
    def pending(self) -> list[Connection]:
        """As soon as one of them can be read, `poll` has something to say."""
        return [held.process.connection for held in self._held.values() if held.process is not None]

    @property
    def anchor_s(self) -> float:
        """What boards have spent on anchors so far, in s; no campaign's."""
        return self._anchoring.board_s

    def has_anchor(self, board_type: str) -> bool:
        """Whether boards of a type are compared by an anchor already."""
        return self._anchoring.has(board_type)

    def set_anchor(self, board_type: str, point: OperatingPoint, spec: MeasureSpec, library: bytes) -> None:
        """Compare boards of a type by this candidate from now on, which ended well on one of them.

        They measure it between trials; one that is slower than the others beyond chance is left, and the store told
        that it drifted. The first anchor of a type stays, unless it proves to fail.
        """
        self._anchoring.set(board_type, point, spec, library)

    def ask_anchors(self, board_types: Collection[str]) -> None:
        """Have boards of these types show once more that they are as fast as the others; see `is_settling`."""
        for held in self._held.values():
            if held.board_type in board_types:
                self._anchoring.ask(held)

    def is_settling(self, board_types: Collection[str]) -> bool:
        """Whether it is still open if a board of these types lies."""
        return any(self._anchoring.is_settling(each) for each in self._held.values() if each.board_type in board_types)

    def poll(self) -> list[BoardEvent]:
        """What happened since the last time. Never waits, but for the store."""
        for held in list(self._held.values()):
            if held.over:
                self._leave(held, held.over)
        for held in list(self._held.values()):
            while held.name in self._held and held.process is not None and held.process.has_answer:
                self._collect(held)
        now = time.monotonic()
        for held in list(self._held.values()):
            self._look_at_clock(held, now)
        for held in self._held.values():
            if held.connecting is None and not held.over and held.name in self._wanted.keys() - self._yielding:
                self._anchoring.send_if_due(held)
        self._look(now)
        events, self._events = self._events, []
        return events

    def measure(self, assignment: Any, board: str, point: OperatingPoint, spec: MeasureSpec, library: bytes) -> None:
        """Time a candidate; up to two at a board, one runs and one waits there. Raises InternalError for no board."""
        self._require(board).send(Call("measure", assignment, point, board_calls.measure(spec, library)))

    def run(self, job: Any, board: str, point: OperatingPoint, spec: RunSpec, program: bytes, inputs: Arrays) -> None:
        """Run a program, after what the board has to do already. Raises InternalError for a board that is not here."""
        self._require(board).send(Call("run", job, point, board_calls.run(spec, program, inputs)))

    def revoke(self, assignment: int) -> None:
        """Take a measurement back: no `TrialMeasured` follows. One that has ended meanwhile is forgotten too."""
        for held in self._held.values():
            for call in held.calls:
                if call.kind == "measure" and call.key == assignment and not call.revoked:
                    held.revoke(call)
        self._events = [
            event for event in self._events if not (isinstance(event, TrialMeasured) and event.assignment == assignment)
        ]

    def busy(self, board: str) -> bool:
        """Whether a board has anything to do for its user."""
        held = self._held.get(board)
        return held is not None and bool(held.work)

    def _look_at_clock(self, held: CrewBoard, now: float) -> None:
        """End what takes too long at its process."""
        if held.connecting is not None:
            if now > held.connect_by:
                self._leave(held, "its session was not opened in time", _TROUBLE_PAUSE_S)
            return
        if not held.calls:
            return
        call = held.calls[0]
        if call.began_s is None:
            call.began_s = now
        elif now > call.began_s + call.limit_s:
            message = f"the {call.kind} on {held.key} did not end within {call.limit_s:.0f} s: its process is stuck"
            self._end_call(held, held.blame.judge(Outcome(Status.BOARD_LOST, message, board=held.name)), call.limit_s)
            self._leave(held, message, _TROUBLE_PAUSE_S)

    # Collecting

    def _collect(self, held: CrewBoard) -> None:
        """Take in what a board's process answered."""
        assert held.process is not None
        try:
            number, ended = held.process.receive()
        except ProcessLostError as error:
            self._replace_process(held, error)
            return
        if number == held.connecting:
            self._finish_connecting(held, ended)
            return
        if not held.calls or held.calls[0].number != number:
            return  # that call was given up before
        if ended is None or held.calls[0].revoked:
            held.calls.popleft()
            self._begin_next(held)
            return
        outputs: Arrays = {}
        try:
            outputs = board_calls.read_outputs(ended)
        except TransientError as error:  # its process has died since
            outcome = held.blame.judge(Outcome(Status.FARM_ERROR, error.message, board=held.name), blameless=True)
        else:
            if isinstance(ended.result, FarmError):
                outcome = held.blame.judge_error(ended.result)
            else:
                outcome = held.blame.judge(ended.result, ended.pin)
        self._end_call(held, outcome, ended.board_s, outputs)

    def _end_call(self, held: CrewBoard, outcome: Outcome, board_s: float = 0.0, outputs: Arrays | None = None) -> None:
        """The call at the head is over, and its outcome judged: tell of it, and leave a board that does not do."""
        call = held.calls.popleft()
        if not call.revoked:
            if call.kind == "measure":
                self._anchoring.note_trial(held)
                self._events.append(TrialMeasured(call.key, held.name, outcome, board_s))
            elif call.kind == "run":
                self._events.append(Ran(call.key, held.name, outcome, outputs or {}))
            else:
                self._anchoring.take_in(held, outcome, board_s, self._store.fetch_mark())
                self._judge_anchors(held)
        self._count_losses(held, outcome)
        if outcome.status in (Status.BOARD_LOST, Status.FARM_ERROR, Status.THROTTLED):
            self._look_at = 0.0  # what is seen of a board may make it unfit
        self._begin_next(held)
        if doubt := held.blame.doubt:
            self._leave(held, doubt.reason, _MISFIT_PAUSE_S if doubt.lasts else _TROUBLE_PAUSE_S)

    def _count_losses(self, held: CrewBoard, outcome: Outcome) -> None:
        """An agent of this machine's that was lost twice in a row and still runs is taken for stuck."""
        held.losses = held.losses + 1 if outcome.status is Status.BOARD_LOST else 0
        if held.host is not None and held.losses >= _LOSSES_IN_A_ROW:
            held.losses = 0
            held.host.restart_agent()
            self._store.add_event("stopped", held.key, "its agent did not answer")
            self._look_at = 0.0

    def _judge_anchors(self, ran: CrewBoard) -> None:
        """Leave who lies: the latest run may tell of its own board, or be what others are measured by."""
        for held in [each for each in self._held.values() if each.board_type == ran.board_type]:
            verdict = self._anchoring.find_liar(held)
            if verdict is not None:
                since = held.taken_at if verdict.since is None else verdict.since
                after = held.taken_mark if verdict.mark is None else verdict.mark
                reason = anchors.describe(verdict, since)
                held.observe(Kind.DRIFTED, reason)
                self._leave(held, reason, self._anchoring.plan_pause_s(held.name), after)
            elif held is ran:
                self._welcome(held)

    def _welcome(self, held: CrewBoard) -> None:
        """Tell of a board that may be given work: its session is open, and it has proved itself where it had to."""
        if not held.arrived and not self._anchoring.needs_proof(held):
            held.arrived = True
            self._note(f"working on {held.name}")
            rests = held.host is not None and held.host.rests
            if held.host is not None:
                self._store.save_description(held.name, held.description or {}, simulated=False)
            self._events.append(Arrived(held.name, held.board_type, held.labels, held.description or {}, rests))

    @staticmethod
    def _begin_next(held: CrewBoard) -> None:
        if held.calls:
            held.calls[0].began_s = time.monotonic()

    def _finish_connecting(self, held: CrewBoard, ended: Ended | None) -> None:
        held.connecting = None
        error = ended.result if ended is not None else InternalError("it was not opened")
        if not isinstance(error, FarmError):
            held.description = error.to_dict()
            self._begin_next(held)
            self._welcome(held)
            return
        if not isinstance(error, UnavailableError):  # what it is registered as, a probe judges
            held.blame.judge_error(error)
        pauses = {BoardBusyError: _BUSY_PAUSE_S, UnavailableError: _MISFIT_PAUSE_S}
        self._leave(held, error.message, pauses.get(type(error), _TROUBLE_PAUSE_S))

    def _replace_process(self, held: CrewBoard, error: ProcessLostError) -> None:
        """The process that held the session is gone, through no fault of the board: what ran ends, the rest goes on."""
        self._store.add_event("restarted", f"process of {held.key}", error.message)
        if held.connecting is not None:
            self._leave(held, error.message, _TROUBLE_PAUSE_S)
            return
        if held.calls:
            outcome = Outcome(Status.FARM_ERROR, error.message, board=held.name)
            self._end_call(held, held.blame.judge(outcome, blameless=True))
        if held.name not in self._held:
            return
        try:
            held.start_process()
        except TransientError as refused:
            self._leave(held, refused.message, _TROUBLE_PAUSE_S)

    def _require(self, board: str) -> CrewBoard:
        held = self._held.get(board)
        if held is None or not held.arrived:
            raise InternalError(f"board {board!r} is not held, so it cannot be given work")
        return held
