"""Having boards measure their type's anchor between trials, for the crew. What the runs say is judged in `anchors`."""

from __future__ import annotations

import collections
import dataclasses
import logging
import statistics
import time

from device_agent.protocol import FaultSide, MeasureSpec, OperatingPoint, Outcome, Status
from farm.campaign.engine.anchors import AnchorBook, AnchorRun, AnchorVerdict, Rhythm
from farm.campaign.engine.board_held import Call, CrewBoard
from farm.crew import board_calls

_log = logging.getLogger(__name__)

# An anchor that fails so often by its own fault is none.
_MOST_FAILURES = 3
# Samples in a run, if trials have fewer: one disturbed sample then does not move the median.
_REPEAT = 7
ANCHOR = "anchor"


@dataclasses.dataclass
class _Anchor:
    """A type's anchor as it is sent, and how often it failed by its own fault."""

    point: OperatingPoint
    order: board_calls.JobOrder
    book: AnchorBook
    failures: int = 0


class Anchoring:
    """The anchors of all types. `board_s` is what boards have spent on them so far."""

    def __init__(self, rhythm: Rhythm) -> None:
        self._rhythm = rhythm
        self._anchors: dict[str, _Anchor] = {}
        self._lies: collections.Counter[str] = collections.Counter()
        self.board_s = 0.0

    def has(self, board_type: str) -> bool:
        """Whether boards of a type have an anchor."""
        return board_type in self._anchors

    def set(self, board_type: str, point: OperatingPoint, spec: MeasureSpec, library: bytes) -> None:
        """Have boards of a type measure this from now on; the first one stays."""
        if board_type not in self._anchors:
            spec = dataclasses.replace(spec, repeat=max(spec.repeat, _REPEAT), energy=None)
            order = board_calls.measure(spec, library)
            self._anchors[board_type] = _Anchor(point, order, AnchorBook(self._rhythm))

    def note_trial(self, held: CrewBoard) -> None:
        """A board has measured something else."""
        if anchor := self._anchors.get(held.board_type):
            anchor.book.note_trial(held.name)

    def needs_proof(self, held: CrewBoard) -> bool:
        """Whether a board has lied, and must not be given work before its anchor was good again."""
        anchor = self._anchors.get(held.board_type)
        return anchor is not None and anchor.book.needs_proof(held.name)

    def ask(self, held: CrewBoard) -> None:
        """See `AnchorBook.ask`."""
        if anchor := self._anchors.get(held.board_type):
            anchor.book.ask(held.name)

    def is_settling(self, held: CrewBoard) -> bool:
        """See `AnchorBook.is_settling`."""
        anchor = self._anchors.get(held.board_type)
        return anchor is not None and anchor.book.is_settling(held.name)

    def send_if_due(self, held: CrewBoard) -> None:
        """Have a board measure its anchor once what it has to do is done, if it is time for that."""
        anchor = self._anchors.get(held.board_type)
        if anchor is None or any(call.kind == ANCHOR for call in held.calls):
            return
        if not anchor.book.is_due(held.name, time.monotonic()):
            return
        held.send(Call(ANCHOR, held.board_type, anchor.point, anchor.order))

    def take_in(self, held: CrewBoard, outcome: Outcome, board_s: float, mark: int) -> None:
        """A board's run of the anchor ended; `mark` as in `Run`."""
        self.board_s += board_s
        anchor = self._anchors.get(held.board_type)
        if anchor is None:
            return
        good = outcome.status is Status.OK and outcome.latency_s
        run = AnchorRun(time.monotonic(), statistics.median(outcome.latency_s), mark) if good else None
        anchor.book.note_run(held.name, run, time.monotonic(), board_s)
        verdict = anchor.book.judge(held.name)
        if run is not None and verdict.suspicious:
            text = "%s took %.3g us for the anchor, now %.2f times (at least %.2f) what %s take"
            _log.info(text, held.name, run.median_s * 1e6, verdict.ratio, verdict.low, verdict.against)
        if outcome.status.fault_side is FaultSide.CANDIDATE:
            anchor.failures += 1
            if anchor.failures >= _MOST_FAILURES:
                del self._anchors[held.board_type]

    def find_liar(self, held: CrewBoard) -> AnchorVerdict | None:
        """The verdict on a board that must not be believed. It is then to be left: its runs are forgotten."""
        anchor = self._anchors.get(held.board_type)
        verdict = None if anchor is None else anchor.book.find_liar(held.name)
        if anchor is not None and verdict is not None:
            anchor.book.doubt(held.name)
            self._lies[held.name] += 1
        return verdict

    def plan_pause_s(self, board: str) -> float:
        """For how long a board that lied is left alone: longer each time."""
        rhythm = self._rhythm
        return min(rhythm.last_pause_s, rhythm.first_pause_s * 2.0 ** (self._lies[board] - 1))


def describe(verdict: AnchorVerdict, since: float) -> str:
    """What a liar is told to have done, for people, at some time after `since` (monotonic, s)."""
    clock = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - since)))
    if not verdict.liar:
        return f"it was found to be slow before, and is still {verdict.ratio - 1:.0%} slower than {verdict.against}"
    return (
        f"it is {verdict.ratio - 1:.0%} slower than {verdict.against} "
        f"(at least {verdict.low - 1:.0%}), at some time after {clock}, and nothing else shows it"
    )
