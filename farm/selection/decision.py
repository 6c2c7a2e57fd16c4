"""Decide on records: the result of a contest with its evidence, and which record serves a workload: the best fitting.

Pure. `rounds` decides who is measured, `tie` who leads. Callers check the winner's output and write records.
`farm.artifacts.compile` uses the predicted schedule where no record fits, or the fitting one was slower in its model.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from device_agent.protocol import StrEnum
from farm.points.values import Objective
from farm.selection import tie
from farm.selection.rounds import LEAST_ROUNDS, Contest
from farm.selection.tie import Judgement, Ratio, TieRule
from farm.types.states import ModelDecision
from farm.values import DEFAULT_POINT, Record, name_workloads

# Returns a workload's hash for another target (TVM's dict).
HashFor = Callable[[Mapping[str, Any]], str]


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


class RecordFit(StrEnum):
    """How close a record's measurement is to the compiled board type and point, the best first."""

    EXACT = "exact"  # this board type at this operating point
    OTHER_POINT = "other point"  # this board type at another operating point
    OTHER_TYPE = "other type"  # another board type with cores of the same kind


@dataclasses.dataclass(frozen=True)
class RecordChoice:
    """A record and its fit."""

    record: Record
    fit: RecordFit


def describe_imported(imported: int, used: int) -> str:
    """Describe how many used records are imported and unverified; "" for none."""
    if not imported:
        return ""
    return f"{imported} of {used} records used are imported: no board of this farm has verified them"


@dataclasses.dataclass(frozen=True)
class Relative:
    """A board type with the same kind of cores, and the target in its workloads' hashes."""

    board_type: str
    target: Mapping[str, Any]


class Records:
    """The records that can serve workloads of one board type at one operating point."""

    def __init__(
        self,
        records: Sequence[Record],
        board_type: str | None = None,
        operating_point: str = DEFAULT_POINT,
        relatives: Sequence[Relative] = (),
        decisions: Sequence[ModelDecision] = (),
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Without a `board_type`, every record counts as of the compiled type and point.

        `decisions` are about this model on such boards. `refused` candidates by workload replace the decisions'.
        """
        self._type, self._point, self._relatives = board_type, operating_point, relatives
        self._decisions, self._refused = decisions, refused
        self._by_hash: dict[str, list[Record]] = collections.defaultdict(list)
        for record in records:
            self._by_hash[record.workload].append(record)

    def find_refused(self, workloads: Iterable[str]) -> Mapping[str, str]:
        """Return the record candidates that a decision about these workloads excludes, by workload.

        A decision at the default clocks also holds at other points, as its records do.
        """
        if self._refused is not None:
            return self._refused
        name = name_workloads(workloads)
        about = {each.operating_point: each.refused for each in self._decisions if each.workloads == name}
        return about.get(self._point, about.get(DEFAULT_POINT, {}))

    def find(self, workload: str, hash_for: HashFor, refused: str | None = None) -> Iterator[RecordChoice]:
        """Yield the records that fit a workload, the best first, until the `refused` candidate.

        Times at different clocks are not comparable: within one fit, the default clocks come first.
        """
        for choice in self._list(workload, hash_for):
            if choice.record.candidate == refused:
                return
            yield choice

    def _list(self, workload: str, hash_for: HashFor) -> Iterator[RecordChoice]:
        own = [r for r in self._by_hash.get(workload, ()) if self._type is None or r.board_type == self._type]
        for record in sorted(own, key=self._order):
            exact = self._type is None or record.operating_point == self._point
            yield RecordChoice(record, RecordFit.EXACT if exact else RecordFit.OTHER_POINT)
        for relative in self._relatives:
            theirs = self._by_hash.get(hash_for(relative.target), ())
            for record in sorted((r for r in theirs if r.board_type == relative.board_type), key=self._order):
                yield RecordChoice(record, RecordFit.OTHER_TYPE)

    def _order(self, record: Record) -> tuple[bool, bool, bool, float]:
        # Imported times come after all local measurements, at any clocks.
        point = record.operating_point
        return record.origin is not None, point != self._point, point != DEFAULT_POINT, record.median_s
