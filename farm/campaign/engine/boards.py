"""The boards that campaigns work on, and what they are given to do: measurements, programs, anchors.

Many at once, and nothing here waits: the engine asks again and again what happened. Which boards are held is in
`board_keeping`, what one is made of in `board_held`; who is to blame is decided as for one board (`farm.crew.blame`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, RunSpec, Status
from farm.campaign.engine import board_actor, board_anchors, ray_calls, timeouts
from farm.campaign.engine.anchors import Rhythm
from farm.campaign.engine.board_events import Arrived, AskedBack, BoardEvent, Left, Ran, TrialMeasured
from farm.campaign.engine.board_held import REQUEST_TIMEOUT_S, Call, CrewBoard
from farm.campaign.engine.board_keeping import BoardKeeping, Reach
from farm.campaign.engine.host import HostBoard
from farm.campaign.engine.ray_calls import ActorLostError
from farm.crew.health import Kind
from farm.errors import BoardBusyError, FarmError, InternalError, UnavailableError
from farm.measure.arrays import Arrays
from farm.settings import Settings
from farm.store import Store

# An answer that has been found to be there is fetched within this.
_FETCH_TIMEOUT_S = 30.0
# How long a board is left alone that could not be used, by why: another client has it; it is not what it is registered
# as, or lacks what was asked for; its actor died or could not reach it, which may be this machine's doing.
_BUSY_PAUSE_S, _MISFIT_PAUSE_S, _TROUBLE_PAUSE_S = 10.0, 300.0, 10.0
# Once may be chance.
_LOSSES_IN_A_ROW = 2

__all__ = ["Arrived", "AskedBack", "BoardCrew", "BoardEvent", "Left", "Ran", "TrialMeasured"]


class BoardCrew(BoardKeeping):
    """The boards at hand, and what they have to do. Not thread-safe; use as a context manager."""

    def __init__(
        self,
        services: Reach,
        store: Store,
        settings: Settings,
        purpose: str,
        note: Callable[[str], None],
        rhythm: Rhythm | None = None,
        host: HostBoard | None = None,
    ) -> None:
        """See `BoardKeeping`. `rhythm`: how often boards measure their type's anchor."""
        super().__init__(services, store, purpose, note, host or HostBoard(settings, store, note))
        self._anchoring = board_anchors.Anchoring(rhythm or Rhythm())

    def __enter__(self) -> BoardCrew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pending(self) -> list[Any]:
        """Ray's references: as soon as one of them is done, `poll` has something to say."""
        return [reference for held in self._held.values() for reference in held.references]

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
        by_reference = {reference: held for held in self._held.values() for reference in held.references}
        for reference in board_actor.find_done(list(by_reference)):
            if (held := by_reference[reference]).name in self._held:  # another's answer may have us leave it
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
        limit_s = timeouts.plan_call_timeout_s(spec, len(library), REQUEST_TIMEOUT_S)
        self._require(board).send(Call("measure", assignment, (point, spec, board_actor.put(library)), limit_s))

    def run(self, job: Any, board: str, point: OperatingPoint, spec: RunSpec, program: bytes, inputs: Arrays) -> None:
        """Run a program, after what the board has to do already. Raises InternalError for a board that is not here."""
        size = 2 * (len(program) + sum(array.nbytes for array in inputs.values()))
        limit_s = timeouts.plan_call_timeout_s(spec, size, REQUEST_TIMEOUT_S)
        self._require(board).send(Call("run", job, (point, spec, board_actor.put(program), inputs), limit_s))

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
        """End what takes too long at its actor."""
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
            message = f"the {call.kind} on {held.key} did not end within {call.limit_s:.0f} s: its actor is stuck"
            self._end_call(held, held.blame.judge(Outcome(Status.BOARD_LOST, message, board=held.name)), call.limit_s)
            self._leave(held, message, _TROUBLE_PAUSE_S)

    # Collecting

    def _collect(self, held: CrewBoard) -> None:
        """Take in what a board's actor answered."""
        if held.connecting is not None:
            self._finish_connecting(held)
            return
        call = held.calls[0]
        try:
            ended = ray_calls.get(call.reference, f"the {call.kind} on {held.key}", _FETCH_TIMEOUT_S)
        except ActorLostError as error:
            self._replace_actor(held, error.message)
            return
        except FarmError as error:
            ended = board_actor.Ended(Outcome(Status.FARM_ERROR, error.message, board=held.name), 0.0)
        if ended is None or call.revoked:
            held.calls.popleft()
            self._begin_next(held)
            return
        if isinstance(ended.result, FarmError):
            outcome = held.blame.judge_error(ended.result)
        else:
            outcome = held.blame.judge(ended.result, ended.pin)
        self._end_call(held, outcome, ended.board_s, ended.outputs)

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
                reason = board_anchors.describe(verdict, since)
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

    def _finish_connecting(self, held: CrewBoard) -> None:
        reference, held.connecting = held.connecting, None
        try:
            held.description = dict(ray_calls.get(reference, f"connecting to {held.key}", _FETCH_TIMEOUT_S))
        except FarmError as error:
            if not isinstance(error, UnavailableError):  # what it is registered as, a probe judges
                held.blame.judge_error(error)
            pauses = {BoardBusyError: _BUSY_PAUSE_S, UnavailableError: _MISFIT_PAUSE_S}
            self._leave(held, error.message, pauses.get(type(error), _TROUBLE_PAUSE_S))
        else:
            self._welcome(held)

    def _replace_actor(self, held: CrewBoard, message: str) -> None:
        """The process that held the session is gone, through no fault of the board: what ran ends, the rest goes on."""
        self._store.add_event("restarted", f"actor of {held.key}", message)
        outcome = Outcome(Status.FARM_ERROR, message, board=held.name)
        self._end_call(held, held.blame.judge(outcome, blameless=True))
        if held.name in self._held:
            held.start_actor()

    def _require(self, board: str) -> CrewBoard:
        held = self._held.get(board)
        if held is None or not held.arrived:
            raise InternalError(f"board {board!r} is not held, so it cannot be given work")
        return held
