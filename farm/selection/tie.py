"""Find the best of several candidates from interleaved rounds, or call it a tie; conclude with a record's evidence.

Pure. A round measures every candidate once on one board. Only ratios within a round are compared, so that common
effects of a board (slow, or warming up) cancel: rounds are the blocks of a randomised block design (Box, Hunter &
Hunter 2005, Statistics for Experimenters, ch. 4). `rounds` decides who is measured.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.special

from farm.points.values import Objective
from farm.selection.rounds import LEAST_ROUNDS, Contest
from farm.values import Record

# The numbers of rounds after which candidates are compared, where the budget allows it.
LOOKS = (4, 8, 16)

# Rounds of a board for a verdict of its own: with two, one outlier is half of it.
_OWN_OPINION = 3
# The share of rounds in which a challenger must be faster by the advantage: all of two or three, three of four.
_OVERTAKEN = 0.75
# A fifth of the ratios at each end is trimmed: robust against that many outliers, and cheap without any (Wilcox 2017,
# Introduction to Robust Estimation and Hypothesis Testing, 4th ed., sec. 3.3 and 4.3).
_TRIMMED = 0.2


@dataclasses.dataclass(frozen=True)
class TieRule:
    """When candidates are statistically distinguishable.

    They are compared after each of `looks` rounds, counted over all boards; the last look decides. `confidence` is for
    a whole decision, over all looks and rivals. Candidates within `band` of each other (a part of latency) are a tie.
    The baseline is kept unless another is faster by more than `advantage` (see `overtakes`).

    Of three candidates, one that is faster by five times a measurement's noise is found after four or eight rounds, one
    by 2.5 times in 99 % of decisions within 16 (tests/unit/test_tie.py). With these numbers of rounds intervals have
    their nominal error rate; with five or ten, where trimming has just begun, 1.5 times that.
    """

    looks: tuple[int, ...] = LOOKS
    confidence: float = 0.95
    band: float = 0.02
    advantage: float = 0.05
    objective: Objective = Objective.LATENCY

    def cost(self, of: Round, candidate: str) -> float:
        """Return a candidate's cost in a round: latency, or with another `objective` J or J s. Least wins."""
        return float(self.objective.of(of.latency_s[candidate], None, of.energy_j.get(candidate)))


@dataclasses.dataclass(frozen=True)
class Round:
    """Latencies in seconds by candidate, measured one after the other on one board; energies (J a call) if wanted."""

    number: int
    board: str
    latency_s: Mapping[str, float]
    energy_j: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How much longer a rival takes than the leader (1.05: by 5 %), with an interval, over `rounds`."""

    candidate: str
    value: float
    low: float
    high: float
    rounds: int

    @property
    def is_slower(self) -> bool:
        """Whether the interval excludes that the rival is as fast."""
        return self.low > 1.0

    def is_within(self, band: float) -> bool:
        """Whether the interval excludes a relevant difference."""
        return self.low >= 1 / (1 + band) and self.high <= 1 + band


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The fastest so far, and each rival's ratio to it, the fastest rival first.

    `open` are rivals that more rounds may distinguish, `tied` those that count as equally fast.
    """

    leader: str
    ratios: tuple[Ratio, ...]
    open: tuple[str, ...]
    tied: tuple[str, ...]

    @property
    def slower(self) -> tuple[str, ...]:
        """List the rivals that need no more measurements."""
        return tuple(ratio.candidate for ratio in self.ratios if ratio.is_slower)


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """Boards that disagree, each clearly, whether a candidate is faster than another."""

    candidate: str
    other: str
    faster_on: str
    slower_on: str


def complete(rounds: Iterable[Round], candidates: Collection[str]) -> list[Round]:
    """Return the rounds in which all of these were measured."""
    return [each for each in rounds if all(candidate in each.latency_s for candidate in candidates)]


def judge(rounds: Sequence[Round], candidates: Collection[str], rule: TieRule, *, last: bool) -> Judgement:
    """Compare candidates over the rounds that have them all: at least two where there is more than one candidate.

    Intervals are for the trimmed mean of the logarithms of a round's ratios, by Student's t with winsorised variance
    (Tukey & McLaughlin 1963, Sankhya A 25, 331-352). For repeated looks and several rivals, each interval has an equal
    part of the rule's error (Bonferroni; for looks: Pocock 1977, Biometrika 64, 191-199, who shows that equal parts
    lose little). With `last`, open rivals count as tied.

    The leader has the least median of ratios to its rounds' geometric means; of equals, the first by name.
    """
    names = sorted(candidates)
    used = complete(rounds, names)
    if len(names) == 1:
        return Judgement(names[0], (), (), ())
    logs = _as_logs(used, names, rule)
    error = (1 - rule.confidence) / (len(rule.looks) * (len(names) - 1))
    leader = _find_leader(logs)
    ratios = _ratios(logs, names, leader, error)
    if any(ratio.high < 1.0 for ratio in ratios):
        # The median of few skewed ratios may err where their interval does not.
        leader = names.index(min(ratios, key=lambda ratio: (ratio.high, ratio.candidate)).candidate)
        ratios = _ratios(logs, names, leader, error)
    ratios.sort(key=lambda ratio: (ratio.value, ratio.candidate))
    rest = [ratio for ratio in ratios if not ratio.is_slower]
    is_tie = last or all(ratio.is_within(rule.band) for ratio in rest)
    undecided = tuple(ratio.candidate for ratio in rest)
    return Judgement(names[leader], tuple(ratios), () if is_tie else undecided, undecided if is_tie else ())


def compare(rounds: Sequence[Round], base: str, others: Collection[str], rule: TieRule) -> list[Ratio]:
    """Return ratios to any candidate, with intervals as `judge` makes them, the fastest first.

    Over the rounds that have them all: at least two.
    """
    names = [base, *sorted(others)]
    error = (1 - rule.confidence) / (len(rule.looks) * max(1, len(others)))
    ratios = _ratios(_as_logs(complete(rounds, names), names, rule), names, 0, error)
    return sorted(ratios, key=lambda ratio: (ratio.value, ratio.candidate))


def overtakes(rounds: Iterable[Round], challenger: str, favourite: str, rule: TieRule) -> bool:
    """Whether a candidate is faster than the favourite by more than the rule's advantage in three of four rounds.

    Timed alone, a kernel finds its data in the nearest cache; in its model, where the kernel before left them.
    Differences of a few percent do not carry over, so the favourite is kept.
    """
    both = complete(rounds, (challenger, favourite))
    faster = sum(rule.cost(each, challenger) * (1 + rule.advantage) < rule.cost(each, favourite) for each in both)
    return bool(both) and faster >= _OVERTAKEN * len(both)


def find_contradictions(
    rounds: Sequence[Round], leader: str, rivals: Iterable[str], rule: TieRule
) -> list[Contradiction]:
    """Find rivals that are clearly slower than the leader on one board and clearly faster on another.

    Each board is judged alone, if it has three rounds of both.
    """
    found = []
    for rival in sorted(rivals):
        both = complete(rounds, (leader, rival))
        slower, faster = [], []
        for board in sorted({each.board for each in both}):
            logs = _as_logs([each for each in both if each.board == board], [leader, rival], rule)
            if len(logs) < _OWN_OPINION:
                continue
            (ratio,) = _ratios(logs, [leader, rival], 0, 1 - rule.confidence)
            if ratio.is_slower:
                slower.append(board)
            elif ratio.high < 1.0:
                faster.append(board)
        if slower and faster:
            found.append(Contradiction(rival, leader, faster[0], slower[0]))
    return found


def _as_logs(rounds: Sequence[Round], names: Sequence[str], rule: TieRule) -> npt.NDArray[np.float64]:
    return np.log(np.array([[rule.cost(each, name) for name in names] for each in rounds], dtype=np.float64))


def _find_leader(logs: npt.NDArray[np.float64]) -> int:
    # Rounded, so that equals stay equal in any order of summation.
    centres = np.round(np.median(logs - logs.mean(axis=1, keepdims=True), axis=0), 12)
    return int(np.argmin(centres))


def _ratios(logs: npt.NDArray[np.float64], names: Sequence[str], leader: int, error: float) -> list[Ratio]:
    found = []
    for index, name in enumerate(names):
        if index != leader:
            centre, half = _trimmed_interval(logs[:, index] - logs[:, leader], error)
            found.append(Ratio(name, math.exp(centre), _exp(centre - half), _exp(centre + half), len(logs)))
    return found


def _trimmed_interval(values: npt.NDArray[np.float64], error: float) -> tuple[float, float]:
    """Return the trimmed mean, and half the width of its interval, which misses with probability `error`."""
    count = len(values)
    cut = int(_TRIMMED * count)
    kept = np.sort(values)[cut : count - cut]
    if len(kept) < 2:
        return float(kept.mean()), math.inf
    winsorised = np.clip(values, kept[0], kept[-1])
    quantile = float(scipy.special.stdtrit(len(kept) - 1, 1 - error / 2))
    half = quantile * float(winsorised.std(ddof=1)) / ((1 - 2 * cut / count) * math.sqrt(count))
    return float(kept.mean()), half


def _exp(value: float) -> float:
    """Exponentiate without overflow."""
    return math.inf if value > 700 else math.exp(value)


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """The end of a contest. `rivals` were compared with the winner; `held`: it had the record before. `median_s` is the
    record's latency, `evidence` its basis.
    """

    winner: str
    rivals: tuple[str, ...]
    held: bool
    tied: bool
    contradictions: tuple[str, ...]
    median_s: float
    evidence: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Decision:
    """A contest and what decides it: the rule, the baseline (`first`, "": none), the incumbent."""

    contest: Contest
    rule: TieRule
    first: str = ""
    incumbent: Record | None = None

    def conclude(self, judgement: Judgement) -> Conclusion:
        """Return the winner by the contest's last judgement: the leader, unless a tie keeps the incumbent, or the
        baseline is slower by too little.
        """
        winner = judgement.leader
        if self.incumbent is not None and self.incumbent.candidate in judgement.tied:
            winner = self.incumbent.candidate  # a record is replaced only by a faster one
        elif self._keeps_first(judgement):
            winner = self.first
        rivals = sorted({*judgement.tied, *self.contest.beaten, judgement.leader} - {winner})
        said = tuple(
            f"{each.candidate} is faster than {each.other} on {each.faster_on} and slower on {each.slower_on}"
            for each in find_contradictions(self.contest.rounds, winner, rivals, self.rule)
        )
        latencies = self._latencies(winner)
        return Conclusion(
            winner,
            tuple(rivals),
            self.incumbent is not None and winner == self.incumbent.candidate,
            bool(judgement.tied) and not self._is_kept(winner, judgement),
            said,
            statistics.median(statistics.median(each) for each in latencies.values()),
            self.describe(winner, judgement, said, latencies),
        )

    def _keeps_first(self, judgement: Judgement) -> bool:
        """Whether the baseline is kept though another leads by a little.

        Not where it was never measured beside the leaders.
        """
        first, rounds = self.first, self.contest.rounds
        if first in ("", judgement.leader) or first in self.contest.failed:
            return False
        beside = complete(rounds, {first, judgement.leader, *judgement.tied})
        return len(beside) >= LEAST_ROUNDS and not overtakes(rounds, judgement.leader, first, self.rule)

    def _is_kept(self, winner: str, judgement: Judgement) -> bool:
        """Whether the baseline gets the record although another is known to be a little faster."""
        return winner == self.first and winner not in (judgement.leader, *judgement.tied)

    def _compare_with(self, winner: str, judgement: Judgement, *, all_of_them: bool) -> dict[str, tuple[Ratio, str]]:
        """Return rivals by candidate, with ratios, and whether they are faster, tied or slower."""
        rounds, beaten = self.contest.rounds, self.contest.beaten
        if not all_of_them:
            found = {name: (ratio, "slower") for name, ratio in beaten.items() if name != winner}
            if others := {judgement.leader, *judgement.tied} - {winner}:
                found |= {each.candidate: (each, "tied") for each in compare(rounds, winner, others, self.rule)}
            return found
        found = {}
        for name in {judgement.leader, *judgement.tied, *beaten} - {winner}:
            if len(complete(rounds, (winner, name))) >= LEAST_ROUNDS:
                (ratio,) = compare(rounds, winner, (name,), self.rule)
                found[name] = ratio, "slower" if ratio.is_slower else "faster" if ratio.high < 1.0 else "tied"
        return found

    def _latencies(self, candidate: str) -> dict[str, list[float]]:
        """Return each round's median by board, in seconds."""
        found: dict[str, list[float]] = {}
        for each in self.contest.rounds:
            if candidate in each.latency_s:
                found.setdefault(each.board, []).append(each.latency_s[candidate])
        return dict(sorted(found.items()))

    def describe(
        self, winner: str, judgement: Judgement, contradictions: Sequence[str], latencies: Mapping[str, Sequence[float]]
    ) -> dict[str, Any]:
        """Describe the evidence of the record as plain data.

        A record's `median_s` is the median over boards of each board's median over rounds, raw: a slow board stays
        slow. Ratios of tied rivals are to the record's candidate, those of slower ones to the leader at that time;
        where the baseline is kept though another led, all are to it.
        """
        kept = self._is_kept(winner, judgement)
        decided = "kept" if kept else "tie" if judgement.tied else "parted" if self.contest.beaten else "alone"
        rivals = self._compare_with(winner, judgement, all_of_them=kept)
        before = self.incumbent
        return {
            "objective": str(self.rule.objective),
            "decided": decided,
            "leader": judgement.leader,
            "held": before is not None and before.candidate == winner,
            "replaced": None
            if before is None or before.candidate == winner
            else {
                "candidate": before.candidate,
                "median_s": before.median_s,
                "objective": (before.evidence or {}).get("objective", Objective.LATENCY),
            },
            "rounds": len({each.number for each in self.contest.rounds if winner in each.latency_s}),
            "boards": {
                board: {"median_s": statistics.median(each), "latency_s": list(each)}
                for board, each in latencies.items()
            },
            "rivals": [
                {
                    "candidate": name,
                    "ratio": ratio.value,
                    "low": _finite(ratio.low),
                    "high": _finite(ratio.high),
                    "rounds": ratio.rounds,
                    "verdict": verdict,
                }
                for name, (ratio, verdict) in sorted(rivals.items(), key=lambda item: (item[1][0].value, item[0]))
            ],
            "failed": [{"candidate": name, "reason": reason} for name, reason in sorted(self.contest.failed.items())],
            "contradictions": list(contradictions),
            "confidence": self.rule.confidence,
            "band": self.rule.band,
            "advantage": self.rule.advantage,
        }


def _finite(value: float) -> float | None:
    """Return None for infinity, which JSON lacks."""
    return value if value < float("inf") else None
