"""The lying board: one that is silently slower than others of its type, found by measuring one candidate repeatedly.

A type's anchor is a candidate that once ended well. What its boards take for it is compared here, purely, and kept;
having boards measure it, and leaving those that lie, is the crew's business (`boards`).
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence

from device_agent.protocol import FaultSide, MeasureSpec, OperatingPoint, Outcome, Status
from farm.campaign.engine.board_held import Call, CrewBoard
from farm.crew import board_calls

# Boards of one type differ by binning, cooling and supply; the same margin as for golden kernels
# (`farm.crew.calibration.TYPE_TOLERANCE`).
TOLERANCE = 0.10
# Slow so often: once is a daemon that woke up, twice may be. This share of the latest runs has to be.
MIN_RUNS, _SLOW_SHARE = 3, 0.75
# As many recent runs tell what a board takes now; a few more tell what it took before.
_RECENT, _KEPT = 5, 60
# A board that was slow runs so often until that is settled, and as many others of its type do so with it: what this
# machine or the room does to all of them at once is then nobody's lie.
_SETTLING_RUNS, _WITNESSES = 10, 4
# Medians repeat no better than this on a quiet board; the first is for as few runs as may agree by chance (our choice,
# on the safe side).
_NOISE_FLOOR_FEW, _NOISE_FLOOR, _MANY = 0.03, 0.01, 20
# Standard errors that a board must be beyond the tolerance.
_ERRORS = 3.0
# A median's standard error over a mean's, for normal noise: sqrt(pi / 2).
_MEDIAN_EFFICIENCY = 1.2533
# A median absolute deviation times this is a standard deviation, for normal noise.
_MAD_TO_SD = 1.4826


@dataclasses.dataclass(frozen=True)
class Rhythm:
    """How often a board measures its anchor: each `every_s` or `every_trials`, whichever comes first, as long as that
    takes no more than `share` of its time; each `settling_s` where a slow run is looked into. One that lied is left
    alone for `first_pause_s`, then for longer each time.
    """

    every_s: float = 60.0
    every_trials: int = 30
    share: float = 0.03
    settling_s: float = 5.0
    first_pause_s: float = 60.0
    last_pause_s: float = 1800.0


@dataclasses.dataclass(frozen=True)
class AnchorRun:
    """One measurement of the anchor: when it was taken (monotonic) and its median latency, both in s.

    `mark` is the store's at that time (`Store.fetch_mark`).
    """

    at: float
    median_s: float
    mark: int = 0


@dataclasses.dataclass(frozen=True)
class AnchorVerdict:
    """What the runs say of a board. `ratio` is against others of its type, with the lower bound that chance leaves.

    `suspicious`: its latest run was slow, so that more of them are wanted now. `liar`: slow beyond chance; `since` is
    the time of its last good run, None where it never had one, and `mark` that run's. `against` says for people what it
    was compared with.
    """

    suspicious: bool = False
    liar: bool = False
    ratio: float = 1.0
    low: float = 1.0
    since: float | None = None
    against: str = ""
    mark: int | None = None


def judge_board(board: str, runs: Mapping[str, Sequence[AnchorRun]], tolerance: float = TOLERANCE) -> AnchorVerdict:
    """Whether a board is slower than others of its type, given every board's runs of the same anchor, oldest first.

    A board is a liar once `MIN_RUNS` or more of its latest runs, three in four of them, lie more than `tolerance` above
    the median over the other boards of what those take now, and their median does so by `_ERRORS` standard errors too.
    The noise is robust and pooled over all boards: the median absolute deviation of runs from their own board's level,
    so that one board which changed does not count as noise.

    Two others are needed, since of two boards that differ nobody can say which one lies; with one other, the board must
    besides have become slower than its own earlier runs by as much. Alone it is not judged: what changed may be the
    room.
    """
    mine = list(runs.get(board, ()))
    others = [list(each)[-_RECENT:] for name, each in runs.items() if name != board and each]
    if not mine or not others:
        return AnchorVerdict()
    reference_s = statistics.median(statistics.median(run.median_s for run in each) for each in others)
    against = f"{len(others)} other board{'s' if len(others) > 1 else ''} of its type"
    slow = _count_slow(mine, reference_s, tolerance)
    if not slow:
        return AnchorVerdict(ratio=mine[-1].median_s / reference_s, against=against)
    recent, earlier = mine[-slow:], mine[:-slow]
    level_s = statistics.median(run.median_s for run in recent)
    noise = estimate_noise([recent, earlier, *others])
    spread = _standard_error(noise, len(recent), sum(map(len, others)))
    ratio, low = level_s / reference_s, level_s / reference_s * (1 - _ERRORS * spread)
    sure = slow >= MIN_RUNS and low > 1 + tolerance
    if len(others) < 2:
        sure = sure and _has_changed(level_s, slow, earlier, noise, tolerance)
        against += " and its own earlier runs"
    good = earlier[-1] if earlier else None
    since, mark = (good.at, good.mark) if good else (None, None)
    return AnchorVerdict(True, sure, ratio, low, since, against, mark)


def estimate_noise(groups: Sequence[Sequence[AnchorRun]]) -> float:
    """How far runs of one board scatter, as a relative standard deviation; never below what is believable."""
    deviations = []
    for group in groups:
        if len(group) > 1:
            level_s = statistics.median(run.median_s for run in group)
            deviations += [abs(run.median_s / level_s - 1) for run in group]
    floor = _NOISE_FLOOR if len(deviations) >= _MANY else _NOISE_FLOOR_FEW
    return max(floor, _MAD_TO_SD * statistics.median(deviations)) if deviations else floor


def _count_slow(mine: Sequence[AnchorRun], reference_s: float, tolerance: float) -> int:
    """How many runs it is since a board became slow: the first of them was, and so were most; 0 where it is not."""
    found = slow = 0
    for count, run in enumerate(reversed(mine), 1):
        if run.median_s > (1 + tolerance) * reference_s:
            slow += 1
            if slow >= _SLOW_SHARE * count:
                found = count
    return found


def _has_changed(level_s: float, slow: int, earlier: Sequence[AnchorRun], noise: float, tolerance: float) -> bool:
    if not earlier:
        return False
    before_s = statistics.median(run.median_s for run in earlier)
    return level_s / before_s * (1 - _ERRORS * _standard_error(noise, slow, len(earlier))) > 1 + tolerance


def _standard_error(noise: float, *counts: int) -> float:
    """Of a ratio of medians over so many runs each."""
    return _MEDIAN_EFFICIENCY * noise * math.sqrt(sum(1 / count for count in counts))


class AnchorBook:
    """The runs of one type's anchor on each of its boards, and when each is due for the next."""

    def __init__(self, rhythm: Rhythm) -> None:
        self._rhythm = rhythm
        self._runs: dict[str, collections.deque[AnchorRun]] = {}
        self._trials: collections.Counter[str] = collections.Counter()
        # When the last run ended, and for how long it held the board, in monotonic seconds.
        self._ended: dict[str, tuple[float, float]] = {}
        self._doubted: set[str] = set()
        # Boards whose latest runs were slow: the times (wall clock) of these.
        self._slow: dict[str, list[float]] = {}
        # Boards that are to run once more whatever the rhythm.
        self._asked: set[str] = set()

    def note_trial(self, board: str) -> None:
        """A board has measured something else."""
        self._trials[board] += 1

    def note_run(self, board: str, run: AnchorRun | None, now_s: float, took_s: float) -> None:
        """A board has measured the anchor; `run` is None where that came to nothing."""
        if run is not None:
            self._runs.setdefault(board, collections.deque(maxlen=_KEPT)).append(run)
            verdict = self.judge(board)
            self._slow.pop(board, None)
            if verdict.suspicious:
                since = verdict.since
                self._slow[board] = [each.at for each in self._runs[board] if since is None or each.at > since]
        self._ended[board] = (now_s, took_s)
        self._trials[board] = 0
        self._asked.discard(board)

    def is_due(self, board: str, now_s: float) -> bool:
        """Whether a board should measure the anchor now. `now_s` is monotonic."""
        if board not in self._ended or board in self._asked:
            return True
        ended_s, took_s = self._ended[board]
        passed_s = now_s - ended_s
        if self.needs_proof(board) or (passed_s >= self._rhythm.settling_s and self._is_to_be_settled(board)):
            return True
        if self._trials[board] == 0:
            return False  # it did nothing since that would have to be believed
        if board not in self._runs:
            return passed_s >= self._rhythm.settling_s  # its first run came to nothing
        often = passed_s >= self._rhythm.every_s or self._trials[board] >= self._rhythm.every_trials
        return often and passed_s * self._rhythm.share >= took_s

    def ask(self, board: str) -> None:
        """Have a board run once more if it has measured since its last run: what it did is about to be relied on."""
        if self._trials[board]:
            self._asked.add(board)

    def is_settling(self, board: str) -> bool:
        """Whether runs of a board are still to come that may show it to be a liar."""
        return board in self._asked or 0 < len(self._slow.get(board, ())) < _SETTLING_RUNS

    def judge(self, board: str) -> AnchorVerdict:
        """See `judge_board`."""
        return judge_board(board, self._runs)

    def doubt(self, board: str) -> None:
        """A board was found to lie: its runs no longer say what its type takes, and it has to prove itself anew."""
        self._runs.pop(board, None)
        self._slow.pop(board, None)
        self._asked.discard(board)
        self._ended.pop(board, None)
        self._doubted.add(board)

    def needs_proof(self, board: str) -> bool:
        """Whether a board has lied before and not yet shown that it no longer does."""
        return board in self._doubted

    def find_liar(self, board: str) -> AnchorVerdict | None:
        """The verdict on a board that must not be believed; None for the others.

        Who has lied before has to prove itself: `MIN_RUNS` runs, and the last of them not slow.
        """
        verdict = self.judge(board)
        if board in self._doubted and len(self._runs.get(board, ())) >= MIN_RUNS:
            if verdict.suspicious:
                return verdict
            self._doubted.discard(board)
        return verdict if verdict.liar else None

    def _is_to_be_settled(self, board: str) -> bool:
        """Whether a slow run has just been seen, of this board or one it is a witness for, and more runs would tell
        whether that was chance.
        """
        if board in self._slow:
            return len(self._slow[board]) < _SETTLING_RUNS
        for slow, times in self._slow.items():
            if board in sorted(self._runs.keys() - {slow})[:_WITNESSES]:
                mine = sum(run.at >= times[0] for run in self._runs[board])
                if mine < min(len(times), _SETTLING_RUNS):
                    return True
        return False


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
