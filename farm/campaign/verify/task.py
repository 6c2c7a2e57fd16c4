"""One task's way to a record: its candidates, its rounds, and the evidence for the record.

It touches no store, board or compiler; `verification` does.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from device_agent.protocol import Energy, EnergySpec, FaultSide, OperatingPoint, Outcome, Status
from farm.campaign.verify import objectives
from farm.campaign.verify.coroutines import until
from farm.campaign.verify.programs import Failure, Program, RecordKey
from farm.errors import InternalError
from farm.points.values import Objective
from farm.search.families import rule
from farm.selection.decision import Decision
from farm.selection.rounds import MAX_TIMEOUTS, Contest
from farm.selection.tie import Judgement, Round, TieRule
from farm.store.campaign_rows import KnownCandidate
from farm.types.campaigns import Order
from farm.values import UNTUNED, Record, Workload

# This many candidates beyond the ordered number replace failed ones.
_SPARES = 3
# A candidate measured on a drifting board may be this much faster than it seemed; of those that could then be the best,
# this many take part too.
_LIE = 1.5
_MOST_DOUBTED = 3
# If one cold run of untuned code took this many times a candidate's time, the candidate is faster.
FAR_SLOWER = 3.0


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The result of a task: a record to write, or why there is none.

    `held`: the incumbent keeps the record; `untuned`: code without a record is as fast. `compared` are the candidates
    that took part to the end.
    """

    record: Record | None = None
    held: bool = False
    tied: bool = False
    reason: str = ""
    contradictions: tuple[str, ...] = ()
    untuned: bool = False
    compared: frozenset[str] = frozenset()


class VerificationTask:
    """A task being verified. `programs` holds the participants by candidate, in the order of joining."""

    def __init__(
        self,
        key: RecordKey,
        campaign: int,
        order: Order,
        workload: Workload,
        verify_top: int,
        rule: TieRule,
        note: Callable[[Program, str], None],
    ) -> None:
        """`note` gets each failed participant with the reason."""
        self.key, self.workload = key, workload
        self.of_type = next(each for each in order.types if each.board_type == key.board_type)
        self.programs: dict[str, Program] = {}
        self.contest = Contest(order.search.seed, rule)
        # How many times the fastest candidate's latency the deadline allows.
        self.slack = self._limit_s = math.inf
        self.incumbent: Record | None = None
        self._energies: dict[str, list[Energy]] = defaultdict(list)
        self._is_by_latency, self._deadline_s = rule.objective is Objective.LATENCY, order.deadline_s
        self._campaign, self._rule, self._top, self._note = campaign, rule, verify_top, note
        # A trial says nothing of energy.
        self._seed, self._repeat_alone = order.search.seed, order.measure.repeat_alone or not self._is_by_latency
        # The baseline, where a family planned it: the workload's schedule without a record. Where no family serves,
        # that is untuned code.
        self._first = ""
        self._queue: list[tuple[str, str]] = []
        self._spares = _SPARES
        # Candidates that were compared with the incumbent, or with earlier ones, under equal conditions.
        self._settled: frozenset[str] = frozenset()
        # The latencies by which candidates were selected, in seconds.
        self._known_s: dict[str, float] = {}
        self._boards: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The workload's, for people."""
        return self.workload.name

    @property
    def point(self) -> OperatingPoint:
        """The operating point for boards."""
        return self.of_type.points[self.key.point]

    def choose(
        self, known: Sequence[KnownCandidate], incumbent: Record | None, trials: Sequence[Mapping[str, Any]]
    ) -> TaskResult | None:
        """Choose the participants; return a result where there is nothing to measure.

        `trials` are earlier measurements of verification. Candidates that were compared with the incumbent under equal
        conditions are left out.
        """
        failed = self._read_trials(trials)
        self.incumbent = incumbent
        self._known_s = {each.candidate: each.median_s for each in known if each.median_s is not None}
        self._limit_s = max(1.0, self.slack) * min(self._known_s.values(), default=math.inf)

        def note(name: str, why: str) -> None:
            self._note(self.programs[name], why)

        rounds = read_rounds(trials, self._rule.objective)
        self.contest = Contest(self._seed, self._rule, rounds, note, self._limit_s)
        self.contest.failed.update(failed)
        evidence = self._read_evidence(incumbent)
        self._settled = frozenset(map(str, evidence.get("settled", ())))
        good = sorted(
            (each for each in known if each.candidate in self._known_s),
            key=lambda each: (self._known_s[each.candidate], each.candidate),
        )
        traces = {each.candidate: each.trace_json for each in good}
        fresh = [
            name for name in traces if name not in self._settled and not (incumbent and name == incumbent.candidate)
        ]
        before = [name for name in traces if any(name in each.latency_s for each in rounds)]
        if incumbent is not None and evidence and not fresh and not before:
            return TaskResult(held=True, reason="the search found no candidate that it was not compared with")
        fastest_s = min(self._known_s.values(), default=0.0)
        if not self._repeat_alone and incumbent is not None and incumbent.median_s <= fastest_s:
            return TaskResult(held=True, reason="the search found no faster candidate")
        self._boards = {each.candidate: each.board or "" for each in good}
        if incumbent is not None:
            traces[incumbent.candidate] = incumbent.trace_json
        order = self._seat(known, good, fresh, before, traces)
        self._queue = [(name, traces[name]) for name in order if name not in failed]
        if not self._queue:
            if failed:
                return TaskResult(reason=_join(failed))
            return TaskResult(reason="no candidate of it ran well" if known else "no trial of it was made")
        return None

    def _read_trials(self, trials: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Take in the energies of earlier trials; return the status of each candidate that failed for good."""
        for row in trials:
            if row.get("outcome"):
                self.take_energy(row["candidate"], Outcome.from_dict(row["outcome"]))
        blamed = [row for row in trials if row["fault_side"] == FaultSide.CANDIDATE]
        timeouts = Counter(row["candidate"] for row in blamed if row["status"] == Status.RUN_TIMEOUT)
        return {
            str(row["candidate"]): str(row["status"])
            for row in blamed
            if row["status"] != Status.RUN_TIMEOUT or timeouts[row["candidate"]] >= MAX_TIMEOUTS
        }

    def _read_evidence(self, incumbent: Record | None) -> Mapping[str, Any]:
        """Return the incumbent's evidence; empty where it was compared by another objective or deadline."""
        evidence = (incumbent.evidence if incumbent is not None else None) or {}
        goal = evidence.get("objective", "latency"), evidence.get("deadline_s")
        return evidence if goal == (self._rule.objective, self._deadline_s) else {}

    def _seat(
        self,
        known: Sequence[KnownCandidate],
        good: Sequence[KnownCandidate],
        fresh: Sequence[str],
        before: Sequence[str],
        traces: Mapping[str, str],
    ) -> list[str]:
        """Order the candidates by who joins first, and set how many take part."""
        doubted = self._find_promising(good, fresh)
        order = [*before]
        if self.incumbent is not None:
            order.append(self.incumbent.candidate)
            self._top += 1
        elif fresh:
            # It takes the seat of an incumbent: otherwise a moment's load at its trial would let any later candidate
            # win.
            first = known[0].candidate
            self._first = first if rule.is_marked(traces.get(first, "")) else ""
            order += [self._first] if self._first else []
            if self._is_undisputed(fresh[0]) and not doubted and not before:
                self._top = 1
            else:
                order.append(fresh[0])
                self._top = min(self._top + 1, len({*order, *fresh[: self._top]}))
        seats = list(dict.fromkeys([*order, *fresh]))[: self._top]
        self._top += len(set(doubted) - set(seats))
        settled = (name for name in traces if name in self._settled)
        return list(dict.fromkeys([*order, *doubted, *fresh, *settled]))

    def _find_promising(self, good: Sequence[KnownCandidate], fresh: Sequence[str]) -> list[str]:
        """Return candidates measured only on a drifting board that could be the best; `good` is sorted, best first."""
        latency_s = self._known_s
        best_s = min((latency_s[each.candidate] for each in good if not each.doubted), default=math.inf)
        found = (each.candidate for each in good if each.doubted and each.candidate in fresh)
        return [name for name in found if latency_s[name] < _LIE * best_s][:_MOST_DOUBTED]

    async def decide(self, make: Callable[[str, str], Program], reference: Program) -> TaskResult:
        """Check the best candidates, replace failed ones by the next, and return when the rest is decided.

        `make` returns the program of a candidate (hash, trace), and begins to prepare it. Boards run the rounds of
        `contest` on their own.
        """
        while True:
            self._let_in(make)
            if not set(self._live()) - {UNTUNED}:
                return TaskResult(reason=_join(self.contest.failed))
            await until(lambda: reference.failure or self._find_failed() or self.is_checked)
            live = self._live()
            if reference.failure is not None:
                return TaskResult(reason=f"its unscheduled function cannot be run: {reference.failure.message}")
            if failed := self._find_failed():
                for name, failure in failed.items():
                    self.contest.drop(name, failure.message)
            elif UNTUNED not in self.programs and self._may_lose(live, reference):
                self.programs[UNTUNED] = make(UNTUNED, "")
            elif len(live) == 1 and not self._repeat_alone:
                return self._believe(live[0])
            else:
                self.contest.enter(live)
                await until(lambda: self.contest.is_over or not self.contest.alive)
                if self.contest.is_over:
                    return self._conclude()

    def _find_failed(self) -> dict[str, Failure]:
        """List the participants whose program is out."""
        programs = ((name, self.programs[name]) for name in self._live())
        return {name: program.failure for name, program in programs if program.failure is not None}

    @property
    def is_checked(self) -> bool:
        """Whether all participants compute the right output."""
        return bool(self.programs) and all(self.programs[name].settled for name in self._live())

    def _may_lose(self, live: Sequence[str], reference: Program) -> bool:
        """Whether code without a record may be as fast as the candidates, so that it must be timed too.

        Most of it is slower by far, and would take a board minutes: the single run of its check decides. It is not
        timed against an incumbent, which has beaten it before, or a baseline.
        """
        if self.incumbent is not None or self._first:
            return False
        known = [self._known_s[name] for name in live if name in self._known_s]
        return reference.latency_s is None or not known or reference.latency_s < FAR_SLOWER * min(known)

    def _is_undisputed(self, best: str) -> bool:
        """Whether the baseline's trial is so near the best one's that a contest would keep the baseline."""
        if not self._first or self._repeat_alone or self._first not in self._known_s:
            return False
        return self._known_s[self._first] <= self._known_s[best] * (1 + self._rule.advantage)

    def _live(self) -> list[str]:
        gone = {*self.contest.failed, *self.contest.beaten}
        return [name for name in self.programs if name not in gone]

    def _let_in(self, make: Callable[[str, str], Program]) -> None:
        """Replace failed participants by the next best ones, up to a limit."""
        while self._queue and len(self._live()) < self._top:
            if len(self.programs) >= self._top:
                if self._spares == 0:
                    return
                self._spares -= 1
            name, trace_json = self._queue.pop(0)
            self.programs[name] = make(name, trace_json)

    def _conclude(self) -> TaskResult:
        judgement = self.contest.judgement
        if judgement is None:
            return TaskResult(reason=f"{self.contest.spoilt} rounds were spoilt, by faults that are no candidate's")
        winner = judgement.leader
        if winner == UNTUNED:
            return TaskResult(reason="untuned code is at least as fast as its candidates", untuned=True)
        found = self._decision.conclude(judgement)
        program = self.programs[found.winner]
        if program.comparison is None:
            return TaskResult(reason=f"{found.winner} won and was not checked")
        settled = {"settled": sorted({found.winner, *found.rivals, *self._settled})}
        evidence = {"campaign": self._campaign, **found.evidence, **self._describe_goal(found.winner), **settled}
        record = self._make_record(program, found.median_s, evidence)
        compared = frozenset({found.winner, *found.rivals})
        return TaskResult(record, found.held, found.tied, "", found.contradictions, compared=compared)

    def plan_window(self, name: str) -> EnergySpec | None:
        """Plan how a candidate's energy is measured next; None where latency decides."""
        return None if self._is_by_latency else objectives.plan_window(self._energies[name], self._rule.objective)

    def take_energy(self, name: str, outcome: Outcome) -> float | None:
        """Take in a candidate's energy; return J a call, None where there is none."""
        if self._is_by_latency or outcome.energy is None:
            return None
        self._energies[name].append(outcome.energy)
        return objectives.read_energy_j(outcome.energy, self._rule.objective)

    def _describe_goal(self, winner: str) -> dict[str, Any]:
        if self._is_by_latency:
            return {}
        about = objectives.describe_energy(self._energies[winner])
        limit_s = self._limit_s if math.isfinite(self._limit_s) else None
        return about | {"deadline_s": self._deadline_s, "limit_s": limit_s}

    @property
    def _decision(self) -> Decision:
        return Decision(self.contest, self._rule, self._first, self.incumbent)

    def _believe(self, name: str) -> TaskResult:
        """End a task whose only candidate was checked: its trial's latency counts."""
        median_s, board = self._known_s[name], self._boards.get(name, "")
        latencies = {board: [median_s]} if board else {}
        shown = self._decision.describe(name, Judgement(name, (), (), ()), (), latencies)
        evidence = {"campaign": self._campaign, **shown, "rounds": 0, "settled": [name]}
        return TaskResult(self._make_record(self.programs[name], median_s, evidence), compared=frozenset({name}))

    def _make_record(self, program: Program, median_s: float, evidence: Mapping[str, Any]) -> Record:
        """Make the record of a checked program."""
        if program.candidate is None or program.comparison is None:
            raise InternalError("a record is made of a candidate that was checked")
        return Record(
            workload=self.key.workload,
            workload_name=self.name,
            board_type=self.key.board_type,
            operating_point=self.key.point,
            pipeline=self.workload.pipeline,
            candidate=program.candidate,
            median_s=median_s,
            flop=self.workload.flop,
            max_abs_error=program.comparison.max_abs_error,
            max_rel_error=program.comparison.max_rel_error,
            simulated=self.of_type.simulated,
            trace_json=program.trace_json,
            evidence=evidence,
        )


def _join(failed: Mapping[str, str]) -> str:
    return "all its candidates failed: " + "; ".join(f"{name} {reason}" for name, reason in sorted(failed.items()))


def read_rounds(rows: Iterable[Mapping[str, Any]], objective: Objective = Objective.LATENCY) -> list[Round]:
    """Rebuild a task's rounds from the rows of its verification trials: an attempt is a round."""
    rounds: dict[int, Round] = {}
    for row in rows:
        found = Outcome.from_dict(row["outcome"]).energy if row.get("outcome") else None
        joule = objectives.read_energy_j(found, objective)
        energy_j = {} if joule is None else {row["candidate"]: joule}
        if row["median_s"] is not None and (energy_j or objective is Objective.LATENCY):
            latency_s = {row["candidate"]: float(row["median_s"])}
            if (known := rounds.get(row["attempt"])) is not None:
                latency_s, energy_j = {**known.latency_s, **latency_s}, {**known.energy_j, **energy_j}
            rounds[row["attempt"]] = Round(int(row["attempt"]), str(row["board"]), latency_s, energy_j)
    return [rounds[number] for number in sorted(rounds)]


def read_result(record: Record) -> TaskResult:
    """Return a task's result from its record before a restart."""
    evidence = record.evidence or {}
    return TaskResult(
        record,
        held=bool(evidence.get("held")),
        tied=evidence.get("decided") == "tie",
        contradictions=tuple(map(str, evidence.get("contradictions", ()))),
    )
