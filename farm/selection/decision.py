"""The result of a contest: the record's holder, its comparisons, and the evidence for the record.

Pure. `rounds` decides who is measured, `tie` who leads. Callers check the winner's output and write records.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from farm.points.values import Objective
from farm.selection import tie
from farm.selection.rounds import LEAST_ROUNDS, Contest
from farm.selection.tie import Judgement, Ratio, TieRule
from farm.values import Record


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
            for each in tie.find_contradictions(self.contest.rounds, winner, rivals, self.rule)
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
        beside = tie.complete(rounds, {first, judgement.leader, *judgement.tied})
        return len(beside) >= LEAST_ROUNDS and not tie.overtakes(rounds, judgement.leader, first, self.rule)

    def _is_kept(self, winner: str, judgement: Judgement) -> bool:
        """Whether the baseline gets the record although another is known to be a little faster."""
        return winner == self.first and winner not in (judgement.leader, *judgement.tied)

    def _compare_with(self, winner: str, judgement: Judgement, *, all_of_them: bool) -> dict[str, tuple[Ratio, str]]:
        """Return rivals by candidate, with ratios, and whether they are faster, tied or slower."""
        rounds, beaten = self.contest.rounds, self.contest.beaten
        if not all_of_them:
            found = {name: (ratio, "slower") for name, ratio in beaten.items() if name != winner}
            if others := {judgement.leader, *judgement.tied} - {winner}:
                found |= {each.candidate: (each, "tied") for each in tie.compare(rounds, winner, others, self.rule)}
            return found
        found = {}
        for name in {judgement.leader, *judgement.tied, *beaten} - {winner}:
            if len(tie.complete(rounds, (winner, name))) >= LEAST_ROUNDS:
                (ratio,) = tie.compare(rounds, winner, (name,), self.rule)
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
