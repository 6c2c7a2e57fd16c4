"""The course of campaigns, kept in memory: who measured when, and each time a task got faster.

A campaign's trials are read once; whoever looks again costs those that were written since.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from farm.report.campaign_document import Gain, TaskId
from farm.store import Store

# Campaigns that are remembered, and stretches of work of one board: beyond these, short breaks are no longer told.
_MOST_CAMPAIGNS, _MOST_STRETCHES = 8, 1500
_FIRST_BREAK_S = 0.5
MINUTE_S = 60.0


@dataclasses.dataclass
class Stretches:
    """When a board worked: stretches of time (s since the epoch), in order; breaks below `break_s` are not told."""

    break_s: float = _FIRST_BREAK_S
    spans: list[list[float]] = dataclasses.field(default_factory=list)
    trials: int = 0
    held_s: float = 0.0

    def add(self, began: float, ended: float) -> None:
        """A piece of work. Its end is at or after that of all before."""
        self.trials += 1
        self.held_s += ended - began
        if self.spans and began - self.spans[-1][1] <= self.break_s:
            self.spans[-1][1] = max(self.spans[-1][1], ended)
            self.spans[-1][0] = min(self.spans[-1][0], began)
            return
        self.spans.append([began, ended])
        if len(self.spans) > _MOST_STRETCHES:
            self._join()

    def _join(self) -> None:
        """Forget the shortest breaks."""
        self.break_s *= 2
        joined: list[list[float]] = []
        for span in self.spans:
            if joined and span[0] - joined[-1][1] <= self.break_s:
                joined[-1][1] = max(joined[-1][1], span[1])
            else:
                joined.append(span)
        self.spans = joined

    def list_gaps(self, least_s: float, until: float) -> list[tuple[float, float]]:
        """Breaks of some length, from the first piece of work on."""
        ends = [span[1] for span in self.spans]
        begins = [*(span[0] for span in self.spans[1:]), until]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if begin - end >= least_s]


@dataclasses.dataclass
class Course:
    """What a campaign's trials come to, in order. `minutes` counts all by the minute in which they were written."""

    last: int = 0
    counted: int = 0
    gains: list[Gain] = dataclasses.field(default_factory=list)
    best_s: dict[TaskId, float] = dataclasses.field(default_factory=dict)
    boards: dict[str, Stretches] = dataclasses.field(default_factory=dict)
    minutes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    began: float = 0.0
    ended: float = 0.0

    def update(self, store: Store, campaign: int) -> None:
        """Take in the trials that were written since."""
        best, boards, minutes = self.best_s, self.boards, self.minutes
        for row in store.fetch_trials_since(campaign, self.last):
            self.last, board_type, workload, point, counted, median_s, board, at, held_s = row
            self.began = self.began or at - (held_s or 0.0)
            self.ended = at
            minutes[int(at // MINUTE_S)] += 1
            if board and held_s:
                if (own := boards.get(board)) is None:
                    own = boards[board] = Stretches()
                own.add(at - held_s, at)
            if counted:
                self.counted += 1
                if median_s is not None and 1e-12 <= median_s <= 1e9:
                    key = (board_type, point, workload)
                    if median_s < best.get(key, float("inf")):
                        best[key] = median_s
                        self.gains.append((self.counted, key, median_s))

    def list_steps(self, task: TaskId) -> list[tuple[int, float]]:
        """How a task got faster: after how many counted trials of the campaign, and seconds."""
        return [(counted, median_s) for counted, key, median_s in self.gains if key == task]

    def pace(self, bins: int) -> tuple[list[float], float]:
        """Trials per minute in equal parts of its time, and how many minutes each of them is."""
        if not self.minutes:
            return [], 1.0
        minutes = sorted(self.minutes)
        first, last = minutes[0], minutes[-1]
        width = max(1, -(-(last - first + 1) // bins))
        counts = [0.0] * ((last - first) // width + 1)
        for minute in minutes[bisect.bisect_left(minutes, first) :]:
            counts[(minute - first) // width] += self.minutes[minute] / width
        return counts, float(width)


class Courses:
    """Those that were looked at last. Thread-safe; one campaign is read by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[int, tuple[threading.Lock, Course]] = collections.OrderedDict()

    @contextlib.contextmanager
    def read(self, store: Store, campaign: int) -> Iterator[Course]:
        """A campaign's course up to now, which stays as it is for the block."""
        with self._lock:
            lock, course = self._kept.setdefault(campaign, (threading.Lock(), Course()))
            self._kept.move_to_end(campaign)
            while len(self._kept) > _MOST_CAMPAIGNS:
                self._kept.popitem(last=False)
        with lock:
            course.update(store, campaign)
            yield course
