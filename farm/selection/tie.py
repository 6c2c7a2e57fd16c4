"""Find the best of several candidates from interleaved rounds, or call it a tie: the fastest, by default.

Pure. A round measures every candidate once on one board. Only ratios within a round are compared, so that common
effects of a board (slow, or warming up) cancel: rounds are the blocks of a randomised block design (Box, Hunter &
Hunter 2005, Statistics for Experimenters, ch. 4). `rounds` decides who is measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import scipy.special

from farm.points.values import Objective

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
    # Rounded, so that equals stay equal in any order of summation.
    centres = np.round(np.median(logs - logs.mean(axis=1, keepdims=True), axis=0), 12)
    leader = int(np.argmin(centres))
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
