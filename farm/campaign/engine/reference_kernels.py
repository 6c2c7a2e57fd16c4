"""Find drifting boards: boards silently slower than others of their type, by timing one reference kernel on each.

A type's reference kernel is a candidate that ran well once. Its latencies are compared here, without I/O. `boards`
sends the kernel and leaves a board that drifts.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence

from device_agent.protocol import FaultSide, MeasureSpec, OperatingPoint, Outcome, Status
from farm.campaign.engine.engine_board import Call, EngineBoard
from farm.crew.held_board import Job, measuring

# Boards of one type differ by binning, cooling and supply; the same margin as for golden kernels
# (`farm.crew.calibration.TYPE_TOLERANCE`).
TOLERANCE = 0.10
# One slow run may be a daemon that woke up, two may be as well. This share of the latest runs must be slow.
MIN_RUNS, _SLOW_SHARE = 3, 0.75
# Recent runs that give a board's present level, and runs kept to know its earlier level.
_RECENT, _KEPT = 5, 60
# Runs by which a slow board is confirmed, and other boards of its type that run along: a slow-down of all of them is
# the machine's or the room's.
_SETTLING_RUNS, _WITNESSES = 10, 4
# A board is compared with so many others at most, those that ran the kernel first: more would say no more. After a run
# of a board, all are judged where they are few, since it is one of those that each is compared with.
_MOST_OTHERS, _FEW = 30, 8
# Medians repeat no better than this on a quiet board. The first value is for few runs, which may agree by chance (our
# choice, conservative).
_NOISE_FLOOR_FEW, _NOISE_FLOOR, _MANY = 0.03, 0.01, 20
# Standard errors by which a board must exceed the tolerance.
_ERRORS = 3.0
# Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2).
_MEDIAN_EFFICIENCY = 1.2533
# Standard deviation over median absolute deviation, for normal noise.
_MAD_TO_SD = 1.4826
# A kernel that fails this often by its own fault is replaced.
_MOST_FAILURES = 3
# Samples per run where trials have fewer: one disturbed sample then does not move the median.
_REPEAT = 7
ANCHOR = "reference"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rhythm:
    """How often a board times its reference kernel: each `every_s` or `every_trials`, whichever is first, within
    `share` of its time.

    After a slow run: each `settling_s`. A board that drifted is left for `first_pause_s`, then longer each time.
    """

    every_s: float = 60.0
    every_trials: int = 30
    share: float = 0.03
    settling_s: float = 5.0
    first_pause_s: float = 60.0
    last_pause_s: float = 1800.0

    def plan_pause_s(self, drifts: int) -> float:
        """Plan how long a board that drifted so often is left alone."""
        return min(self.last_pause_s, self.first_pause_s * 2.0 ** (drifts - 1))


@dataclasses.dataclass(frozen=True)
class ReferenceRun:
    """One run of the reference kernel: its time (monotonic) and median latency, both in s.

    `mark` is the store's at that time (`store.trials.fetch_mark`).
    """

    at: float
    median_s: float
    mark: int = 0


@dataclasses.dataclass(frozen=True)
class DriftVerdict:
    """The verdict on a board. `ratio` is against others of its type, `low` its lower confidence bound.

    `suspicious`: its latest run was slow, so more are wanted. `drifting`: slow beyond chance. `since` is the time of
    its last good run (None: there is none), `mark` that run's. `against` names what it was compared with.
    """

    suspicious: bool = False
    drifting: bool = False
    ratio: float = 1.0
    low: float = 1.0
    since: float | None = None
    against: str = ""
    mark: int | None = None


def judge_board(board: str, runs: Mapping[str, Sequence[ReferenceRun]], tolerance: float = TOLERANCE) -> DriftVerdict:
    """Judge whether a board is slower than others of its type, given every board's runs of one kernel, oldest first.

    A board drifts if at least `MIN_RUNS` and three in four of its latest runs exceed the other boards' median by more
    than `tolerance`, and its own median does so by `_ERRORS` standard errors. The noise is pooled over all boards as
    the median absolute deviation from each board's own level, so one changed board does not raise it.

    Two other boards are needed. With one, the board must also be slower than its own earlier runs. A single board is
    not judged: the room may have changed.
    """
    mine = list(runs.get(board, ()))
    found = (list(each)[-_RECENT:] for name, each in runs.items() if name != board and each)
    others = list(itertools.islice(found, _MOST_OTHERS))
    if not mine or not others:
        return DriftVerdict()
    reference_s = statistics.median(statistics.median(run.median_s for run in each) for each in others)
    against = f"{len(others)} other board{'s' if len(others) > 1 else ''} of its type"
    slow = _count_slow(mine, reference_s, tolerance)
    if not slow:
        return DriftVerdict(ratio=mine[-1].median_s / reference_s, against=against)
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
    return DriftVerdict(True, sure, ratio, low, since, against, mark)


def estimate_noise(groups: Sequence[Sequence[ReferenceRun]]) -> float:
    """Estimate the scatter of one board's runs as a relative standard deviation, with a floor."""
    deviations = []
    for group in groups:
        if len(group) > 1:
            level_s = statistics.median(run.median_s for run in group)
            deviations += [abs(run.median_s / level_s - 1) for run in group]
    floor = _NOISE_FLOOR if len(deviations) >= _MANY else _NOISE_FLOOR_FEW
    return max(floor, _MAD_TO_SD * statistics.median(deviations)) if deviations else floor


def _count_slow(mine: Sequence[ReferenceRun], reference_s: float, tolerance: float) -> int:
    """Count the runs since a board became slow: the first and most of them are slow; 0 where it is not."""
    found = slow = 0
    for count, run in enumerate(reversed(mine), 1):
        if run.median_s > (1 + tolerance) * reference_s:
            slow += 1
            if slow >= _SLOW_SHARE * count:
                found = count
    return found


def _has_changed(level_s: float, slow: int, earlier: Sequence[ReferenceRun], noise: float, tolerance: float) -> bool:
    if not earlier:
        return False
    before_s = statistics.median(run.median_s for run in earlier)
    return level_s / before_s * (1 - _ERRORS * _standard_error(noise, slow, len(earlier))) > 1 + tolerance


def _standard_error(noise: float, *counts: int) -> float:
    """Return the standard error of a ratio of medians of these run counts."""
    return _MEDIAN_EFFICIENCY * noise * math.sqrt(sum(1 / count for count in counts))


class ReferenceBook:
    """The runs of one type's reference kernel on each board, and when each board is due."""

    def __init__(self, rhythm: Rhythm) -> None:
        self._rhythm = rhythm
        self._runs: dict[str, collections.deque[ReferenceRun]] = {}
        self._trials: collections.Counter[str] = collections.Counter()
        # When the last run ended and how long it held the board, in monotonic seconds.
        self._ended: dict[str, tuple[float, float]] = {}
        self._doubted: set[str] = set()
        # Boards whose latest runs were slow: the wall-clock times of these.
        self._slow: dict[str, list[float]] = {}
        # Boards that run once more, regardless of the rhythm.
        self._asked: set[str] = set()

    def note_trial(self, board: str) -> None:
        self._trials[board] += 1

    def note_run(self, board: str, run: ReferenceRun | None, now_s: float, took_s: float) -> None:
        """Add a board's run of the kernel; None: it failed."""
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
        """Whether a board should run the kernel now. `now_s` is monotonic."""
        if board not in self._ended or board in self._asked:
            return True
        ended_s, took_s = self._ended[board]
        passed_s = now_s - ended_s
        if self.needs_proof(board) or (passed_s >= self._rhythm.settling_s and self._is_to_be_settled(board)):
            return True
        if self._trials[board] == 0:
            return False  # no trials since its last run: nothing to validate
        if board not in self._runs:
            return passed_s >= self._rhythm.settling_s  # its first run failed
        often = passed_s >= self._rhythm.every_s or self._trials[board] >= self._rhythm.every_trials
        return often and passed_s * self._rhythm.share >= took_s

    def ask(self, board: str) -> None:
        """Have a board run once more if it has measured since its last run: its results are about to be used."""
        if self._trials[board]:
            self._asked.add(board)

    def is_settling(self, board: str) -> bool:
        """Whether more runs of a board are needed before it is trusted."""
        return board in self._asked or 0 < len(self._slow.get(board, ())) < _SETTLING_RUNS

    def list_suspects(self, ran: str) -> list[str]:
        """List the boards to judge after a run of `ran`: it, and those whose latest runs were slow; or all of a few."""
        return list(dict.fromkeys([ran, *(self._runs if len(self._runs) <= _FEW else self._slow)]))

    def judge(self, board: str) -> DriftVerdict:
        return judge_board(board, self._runs)

    def doubt(self, board: str) -> None:
        """Forget the runs of a board that drifted: it must prove itself anew."""
        self._runs.pop(board, None)
        self._slow.pop(board, None)
        self._asked.discard(board)
        self._ended.pop(board, None)
        self._doubted.add(board)

    def needs_proof(self, board: str) -> bool:
        """Whether a board drifted before and has not yet proved itself."""
        return board in self._doubted

    def find_drifting(self, board: str) -> DriftVerdict | None:
        """Return the verdict on a board that drifts, else None.

        A board that drifted before proves itself by `MIN_RUNS` runs, the last of them not slow.
        """
        verdict = self.judge(board)
        if board in self._doubted and len(self._runs.get(board, ())) >= MIN_RUNS:
            if verdict.suspicious:
                return verdict
            self._doubted.discard(board)
        return verdict if verdict.drifting else None

    def _is_to_be_settled(self, board: str) -> bool:
        """Whether more runs would decide if a slow run, of this board or of one that it runs along with, was chance."""
        if board in self._slow:
            return len(self._slow[board]) < _SETTLING_RUNS
        for slow, times in self._slow.items():
            if board in itertools.islice((name for name in self._runs if name != slow), _WITNESSES):
                mine = sum(run.at >= times[0] for run in self._runs[board])
                if mine < min(len(times), _SETTLING_RUNS):
                    return True
        return False


@dataclasses.dataclass
class ReferenceKernel:
    """A type's reference kernel as boards get it, its runs, and how often it failed by its own fault.

    The boards' time for it is charged to no campaign.
    """

    point: OperatingPoint
    job: Job
    book: ReferenceBook
    failures: int = 0

    @classmethod
    def of(cls, point: OperatingPoint, spec: MeasureSpec, library: bytes, rhythm: Rhythm) -> ReferenceKernel:
        spec = dataclasses.replace(spec, repeat=max(spec.repeat, _REPEAT), energy=None)
        return cls(point, measuring(spec, library), ReferenceBook(rhythm))

    @property
    def is_worn(self) -> bool:
        """Whether another kernel must replace it."""
        return self.failures >= _MOST_FAILURES

    def send_if_due(self, held: EngineBoard) -> None:
        """Send it to an idle board that is due."""
        if all(call.kind != ANCHOR for call in held.calls) and self.book.is_due(held.name, time.monotonic()):
            held.send(Call(ANCHOR, self.point, self.job))

    def take_in(self, board: str, outcome: Outcome, board_s: float, mark: int) -> None:
        """Take in a run; `mark` as in `ReferenceRun`."""
        good = outcome.status is Status.OK and outcome.latency_s
        run = ReferenceRun(time.monotonic(), statistics.median(outcome.latency_s), mark) if good else None
        self.book.note_run(board, run, time.monotonic(), board_s)
        verdict = self.book.judge(board)
        if run is not None and verdict.suspicious:
            text = "%s took %.3g us for the reference kernel, now %.2f times (at least %.2f) what %s take"
            _log.info(text, board, run.median_s * 1e6, verdict.ratio, verdict.low, verdict.against)
        self.failures += outcome.status.fault_side is FaultSide.CANDIDATE


def describe(verdict: DriftVerdict, since: float) -> str:
    """Describe for people how a board drifted, at some time after `since` (monotonic, s)."""
    clock = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - since)))
    if not verdict.drifting:
        return f"it was found to be slow before, and is still {verdict.ratio - 1:.0%} slower than {verdict.against}"
    return (
        f"it is {verdict.ratio - 1:.0%} slower than {verdict.against} "
        f"(at least {verdict.low - 1:.0%}), at some time after {clock}, and nothing else shows it"
    )
