"""Decide which of a task's candidates is measured next on which board, until `tie` finds a winner or a tie.

Pure: the caller has boards, stores and libraries. A round belongs to one board; two boards share the rounds.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from device_agent.protocol import FaultSide, Status
from farm.points.values import Objective
from farm.selection import tie
from farm.selection.tie import Judgement, Round, TieRule

# Fewer show nothing: two boards, or one and its own repetition.
LEAST_ROUNDS = 2

BOARDS = 2
# How long a task waits for a second or a better board before it goes on without.
SECOND_BOARD_WAIT_S = 600.0
# Rounds spoilt by faults that are no candidate's, after which a task is decided on its data.
MAX_SPOILT = 8
# A board that spoilt this many rounds is left out where another one can replace it.
_MAX_SPOILT_ON_BOARD = 2
# A candidate that was being measured when this many boards went down is out; see `checks.MAX_LOSSES`.
_MAX_LOSSES = 3
# A candidate that misses its deadline this often in rounds is out; once may be a slow host, which virtual boards share.
MAX_TIMEOUTS = 2


@dataclasses.dataclass(eq=False)
class RoundRun:
    """A round that runs on a board. `left` are not requested yet, in order; `is_lost`: its board went down."""

    number: int
    board: str
    left: list[str]
    latency_s: dict[str, float] = dataclasses.field(default_factory=dict)
    energy_j: dict[str, float] = dataclasses.field(default_factory=dict)
    is_spoilt: bool = False
    is_lost: bool = False


class Contest:
    """The rounds of one task. `alive` are candidates that may still win."""

    def __init__(
        self,
        seed: int,
        rule: TieRule,
        rounds: Iterable[Round] = (),
        note: Callable[[str, str], None] = lambda candidate, reason: None,
        limit_s: float = math.inf,
    ) -> None:
        """`rounds` are earlier ones; `seed` decides the order; `note` gets candidates that failed, and why.

        `limit_s`: candidates with a longer median latency lose; the fastest one stays.
        """
        self._limit_s = limit_s
        self.alive: list[str] = []
        self.rounds: list[Round] = list(rounds)
        self.judgement: Judgement | None = None
        # Rivals that are proven slower than the leader, with the deciding ratio.
        self.beaten: dict[str, tie.Ratio] = {}
        # Candidates that failed, with the reason.
        self.failed: dict[str, str] = {}
        self.spoilt = 0
        self.is_over = False
        self._rule, self._seed, self._note = rule, seed, note
        self._look = 0
        self._next = 1 + max((each.number for each in self.rounds), default=0)
        self._running: list[RoundRun] = []
        self._spoilt_on: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._timeouts: Counter[str] = Counter()
        # Since when a board that did its share, or spoilt rounds, waits for another one to do them.
        self._waiting_since_s: float | None = None

    def enter(self, candidates: Sequence[str]) -> None:
        """Add candidates; earlier rounds count at once."""
        self.alive += candidates
        self._look = 0
        self.is_over = False
        self._decide()

    def drop(self, candidate: str, reason: str) -> None:
        """Remove a candidate that failed by its own fault."""
        if candidate not in self.failed:
            self.failed[candidate] = reason
            self._note(candidate, reason)
        if candidate in self.alive:
            self.alive.remove(candidate)
            for run in self._running:
                run.left = [name for name in run.left if name != candidate]
            self._decide()

    @property
    def missing(self) -> int:
        """Count the rounds that must begin before a decision."""
        if self.is_over or not self.alive:
            return 0
        return self._rule.looks[self._look] - len(tie.complete(self.rounds, self.alive)) - len(self._running)

    @property
    def left(self) -> tuple[int, int]:
        """Count the measurements that are left: until the next look, and until the last."""
        if self.is_over or not self.alive:
            return 0, 0
        made = len(tie.complete(self.rounds, self.alive)) * len(self.alive)
        made += sum(len(run.latency_s.keys() & self.alive) for run in self._running if not run.is_spoilt)
        looks = self._rule.looks
        return tuple(max(0, look * len(self.alive) - made) for look in (looks[self._look], looks[-1]))  # type: ignore[return-value]

    def count_wanted(self, held: Collection[str], boards: int) -> int:
        """Count the boards wanted, with those held that are left out or have done their share; `boards` may be had."""
        usable = min(BOARDS, boards, max(0, self.missing) + len(self._running))
        rounds, share = self._count_rounds(), self._share
        idle = {name for name in held if rounds[name] >= share} | self._shunned().intersection(held)
        idle -= {run.board for run in self._running}
        return usable + min(len(idle), boards - usable) if usable else 0

    def begin(self, board: str, now_s: float, held: Collection[str], boards: int) -> RoundRun | None:
        """Return a round for a free board; None where there is none for this one.

        `held` are the boards that are there now, this one included; `boards` are how many can be had in time.
        """
        if self.missing <= 0 or not self._may_measure(board, now_s, held, boards):
            return None
        order = sorted(self.alive)
        random.Random(f"{self._seed} {' '.join(order)}").shuffle(order)
        # Each candidate is equally often at each place of the order, so that effects of the place cancel.
        turn = self._next % len(order)
        run = RoundRun(self._next, board, order[turn:] + order[:turn])
        self._next += 1
        self._running.append(run)
        return run

    def on_measured(
        self,
        run: RoundRun,
        candidate: str,
        status: Status,
        message: str,
        latency_s: float | None,
        energy_j: float | None = None,
    ) -> None:
        """Take in a measurement of a running round. Without an energy that the rule needs, the round is spoilt."""
        if latency_s is not None and (energy_j is not None or self._rule.objective is Objective.LATENCY):
            run.latency_s[candidate] = latency_s
            if energy_j is not None:
                run.energy_j[candidate] = energy_j
        elif status.fault_side is FaultSide.CANDIDATE and not self._excuse(candidate, status):
            self.drop(candidate, f"{status}: {message}")
        else:
            if not run.is_spoilt:
                run.is_spoilt = True
                run.left.clear()
                self.spoilt += 1
                self._spoilt_on[run.board] += 1
            # A candidate that waited behind another one did not take the board down.
            if status is Status.BOARD_LOST and not run.is_lost:
                run.is_lost = True
                self._losses[candidate] += 1
                if self._losses[candidate] >= _MAX_LOSSES:
                    self.drop(candidate, f"was being measured when {_MAX_LOSSES} boards went down: {message}")

    def _excuse(self, candidate: str, status: Status) -> bool:
        """Whether a fault only spoils the round: a candidate's first missed deadline, which it kept in the search."""
        if status is not Status.RUN_TIMEOUT:
            return False
        self._timeouts[candidate] += 1
        return self._timeouts[candidate] < MAX_TIMEOUTS

    def end(self, run: RoundRun) -> None:
        """End a round; its measurements count if they are complete enough."""
        self._running.remove(run)
        if run.latency_s.keys() >= set(self.alive):
            self._waiting_since_s = None
        if run.latency_s:
            self.rounds.append(Round(run.number, run.board, run.latency_s, run.energy_j))
            self.rounds.sort(key=lambda each: each.number)
        self._decide()

    def _may_measure(self, board: str, now_s: float, held: Collection[str], boards: int) -> bool:
        shunned = self._shunned()
        if board in shunned and boards > len(shunned):
            return self._has_waited(now_s)
        rounds, share = self._count_rounds(), self._share
        if boards - len(shunned - {board}) < BOARDS:
            return True  # there is no second one
        partners = {name for name in rounds if name in held and name != board} - shunned
        if rounds[board] == 0 and len(partners) >= BOARDS:
            # A third board only replaces one that left.
            return sum(max(0, share - rounds[name]) for name in partners) < self.missing
        if rounds[board] < share:
            return True
        return self._has_waited(now_s)

    def _count_rounds(self) -> Counter[str]:
        """Count each board's complete rounds, and those that run."""
        return Counter(
            [each.board for each in tie.complete(self.rounds, self.alive)] + [run.board for run in self._running]
        )

    @property
    def _share(self) -> int:
        """The number of rounds that one board does up to the next look."""
        return math.ceil(self._rule.looks[self._look] / BOARDS)

    def _has_waited(self, now_s: float) -> bool:
        """Whether another board was waited for long enough; the first call begins the wait."""
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        return now_s - self._waiting_since_s >= SECOND_BOARD_WAIT_S

    def _shunned(self) -> set[str]:
        return {name for name, count in self._spoilt_on.items() if count >= _MAX_SPOILT_ON_BOARD}

    def _decide(self) -> None:
        """Judge once there are enough rounds for the next look, or no more can be had."""
        while self.alive and not self.is_over:
            looks = self._rule.looks
            rounds = tie.complete(self.rounds, self.alive)
            given_up = self.spoilt > MAX_SPOILT
            if len(rounds) < looks[self._look] and not given_up:
                return
            if len(rounds) < min(2, len(self.alive)):
                self._stop()
                return
            if self._drop_late(rounds):
                continue
            is_last = given_up or self._look == len(looks) - 1
            used = rounds if given_up else rounds[: looks[self._look]]
            self.judgement = tie.judge(used, self.alive, self._rule, last=is_last)
            for ratio in self.judgement.ratios:
                if ratio.is_slower:
                    self.beaten[ratio.candidate] = ratio
                    self.alive.remove(ratio.candidate)
            if self.judgement.open:
                self._look += 1
            else:
                self._stop()

    def _drop_late(self, rounds: Sequence[Round]) -> bool:
        """Drop candidates beyond the limit of latency, but for the fastest; whether there were any."""
        median_s = {name: statistics.median(each.latency_s[name] for each in rounds) for name in self.alive}
        fastest = min(self.alive, key=lambda name: (median_s[name], name))
        late = [name for name in self.alive if median_s[name] > self._limit_s and name != fastest]
        for name in late:
            self.drop(name, f"takes {median_s[name] * 1e6:.1f} us; the deadline leaves it {self._limit_s * 1e6:.1f} us")
        return bool(late)

    def _stop(self) -> None:
        """End the contest: running rounds measure only what was requested."""
        self.is_over = True
        for run in self._running:
            run.left.clear()
