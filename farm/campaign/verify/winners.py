"""Turn the best candidates of a campaign into records: check what they compute, measure them again, decide.

Driven from outside and never waits: `step` says what is wanted, `on_…` takes the answers. What happened is written to
the store as it happens, so that after a restart no measurement that is there is made again. Programs and their checks
are in `checks`, who takes part and the evidence in `task`, rounds in `rounds`, who has won in `tie`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from device_agent.protocol import Outcome, Status
from farm.campaign.order import Order
from farm.campaign.verify import checks as winner_check
from farm.campaign.verify.checks import Program, What
from farm.campaign.verify.journal import WinnerJournal, WinnersVerdict
from farm.campaign.verify.ledger import Asked, Held, Ledger
from farm.campaign.verify.programs import Programs
from farm.campaign.verify.requests import (
    BuildWanted,
    MeasureWanted,
    ReplayWanted,
    Request,
    RunWanted,
    Token,
    WinnerKey,
)
from farm.campaign.verify.task import Result, WinnerTask, read_result
from farm.campaign.verify.tie import TieRule
from farm.campaign.winner_share import Allowance, plan_allowance
from farm.errors import InternalError
from farm.measure.arguments import make_inputs
from farm.measure.arrays import Arrays
from farm.search import gpus
from farm.search.build_pool import BuildResult
from farm.settings import Settings
from farm.store import Store

# Tasks of a board type that are prepared besides one for each of its boards, so that boards find work.
_AHEAD = 2


class Verification:
    """The winners of one campaign. Not thread-safe.

    Tasks are verified once they are added. Every request is answered once, in any order; an answer to what is not asked
    any more is late and changes nothing. Boards are its own from `give` to `take`.
    """

    def __init__(
        self,
        campaign: int,
        order: Order,
        store: Store,
        settings: Settings,
        rule: TieRule | None = None,
        trials: float | None = None,
        rests: bool = False,
    ) -> None:
        """Read from the store what was done already. `trials` of the search for each task bound what its winners take;
        None: nothing does. `rests`: nothing is prepared while a board has work, since it is the machine that prepares.
        """
        self.rests = rests
        self._campaign, self._order, self._settings = campaign, order, settings
        rule = rule or TieRule()
        self._allowance = Allowance(order.measure.verify_top, rule.looks)
        if trials is not None:
            self._allowance = plan_allowance(trials, order.measure.verify_top, rule.looks)
        self._rule = dataclasses.replace(rule, looks=self._allowance.looks)
        self.measured, self.measured_s = 0, 0.0
        self._journal = WinnerJournal(campaign, order, store)
        self._types = {each.board_type: each for each in order.types}
        self._workloads = self._journal.fetch_workloads()
        self._trials = self._journal.fetch_trials()
        self._rejected = {
            (key.board_type, key.workload, str(row["candidate"]))
            for key, rows in self._trials.items()
            for row in rows
            if row["status"] == Status.WRONG_RESULT
        }
        self._pending: list[WinnerKey] = []
        self._active: dict[WinnerKey, WinnerTask] = {}
        self._results: dict[WinnerKey, Result] = {}
        self._programs = Programs(self._workloads)
        self._ledger = Ledger(f"{campaign}/")
        self._expected: dict[str, int] = {}

    def add(self, tasks: Iterable[WinnerKey] | None = None) -> None:
        """Verify these tasks, whose search is over (None: all of the order's). Those added before change nothing."""
        known = {*self._pending, *self._active, *self._results}
        for key in dict.fromkeys(_all_tasks(self._order) if tasks is None else tasks):
            if key in known:
                continue
            if (key.board_type, key.workload) not in self._workloads:
                raise InternalError(f"campaign {self._campaign} has no workload {key.workload} for {key.board_type}")
            if (record := self._journal.find_own_record(key)) is not None:
                self._results[key] = read_result(record)
            else:
                self._pending.append(key)
        # Points of one workload after each other: they share programs.
        self._pending.sort()

    # Boards

    def wants(self) -> Mapping[str, int]:
        """How many boards of each type it can use now; types that it needs none of are missing."""
        wanted = self._programs.count_runs(self._places())
        for key, task in self._active.items():
            wanted[key.board_type] += task.contest.count_wanted(
                self._ledger.find_names(key.board_type), self._count_expected(key.board_type)
            )
        return {board_type: count for board_type, count in wanted.items() if count}

    def expect(self, boards: Mapping[str, int]) -> None:
        """How many boards of each type it may count on getting, sooner or later, those it has included.

        Where two are, a task waits for the second one for some minutes; where nothing was said, it counts on what it
        has.
        """
        self._expected = dict(boards)

    def give(self, board: str, board_type: str, simulated: bool) -> None:
        """A board may be used, until `take`. Raises InternalError where its measurements would not fit the order's."""
        if board_type not in self._types or self._types[board_type].simulated != simulated:
            kind = "simulated" if simulated else "real"
            raise InternalError(f"{board} is a {kind} {board_type}, which {self._order.name} was not ordered for")
        self._ledger.give(board, board_type)

    def take(self, board: str) -> None:
        """A board is gone, or wanted back. What it was doing is planned anew; its answers would be late."""
        self._ledger.take(board)

    def spare(self) -> list[str]:
        """Boards that were given and have nothing to do now: they may be taken without loss."""
        return [held.name for held in self._ledger if held.is_free]

    # What is to be done

    def step(self, now_s: float) -> list[Request]:
        """What is to be done now; each is asked for once. `now_s` is monotonic."""
        while self._advance():
            pass
        if self.rests:
            return self._step_in_turns(now_s)
        return [*self._prepare_all(), *self._use_boards(now_s)]

    def _step_in_turns(self, now_s: float) -> list[Request]:
        """The same, where what prepares and what measures is one machine: everything is prepared, then measured."""
        if self._ledger.is_preparing:
            return []
        requests = self._use_boards(now_s)
        return requests if requests or any(not held.is_free for held in self._ledger) else self._prepare_all()

    def _prepare_all(self) -> list[Request]:
        return [self._prepare(program, what) for program, what in self._programs.plan(self._places())]

    def _use_boards(self, now_s: float) -> list[Request]:
        requests: list[Request] = []
        for held in self._ledger:
            if held.run is not None:
                held.release(held.run)  # whoever was still to be measured may be out by now
            if held.is_free and (check := self._check_on(held)) is not None:
                requests.append(check)
            if held.is_free:
                self._begin_round(held, now_s)
            if held.run is not None:
                requests += self._measure_on(held)
        return requests

    def _advance(self) -> bool:
        """Begin and end tasks; whether any ended, which makes room for others."""
        ended = False
        for key in self._choose():
            self._pending.remove(key)
            task = WinnerTask(
                key,
                self._campaign,
                self._workloads[key.board_type, key.workload],
                self._types[key.board_type],
                self._allowance.top,
                self._order.search.seed,
                self._rule,
                self._order.measure.repeat_alone,
            )
            result = task.prepare(
                self._journal.fetch_known(key), self._journal.find_record(key), self._trials.pop(key, [])
            )
            if result is None:
                self._active[key] = task
            else:
                self._finish(task, result)
                ended = True
        for task in list(self._active.values()):
            find = functools.partial(self._programs.find, task.key)
            result = task.advance(find, find(None))
            self._note_failures(task)
            if result is not None:
                self._finish(task, result)
                ended = True
        return ended

    def _choose(self) -> list[WinnerKey]:
        """The tasks to begin now."""
        if self.rests:
            return list(self._pending)
        room = {board_type: _AHEAD + max(1, len(self._ledger.find_names(board_type))) for board_type in self._types}
        for key in self._active:
            room[key.board_type] -= 1
        chosen = []
        for key in self._pending:
            if room[key.board_type] > 0:
                room[key.board_type] -= 1
                chosen.append(key)
        return chosen

    def _prepare(self, program: Program, what: What) -> Request:
        token = self._ledger.ask(Asked(program, what))
        if what == "replay":
            key = next(key for key in self._active if (key.board_type, key.workload) == program.place)
            return ReplayWanted(token, key, program.trace_json)
        if program.module_json is None:
            raise InternalError("a program is built that was not replayed")
        target = self._find_target(program)
        return BuildWanted(token, program.module_json, target, standalone=what == "checking")

    def _find_target(self, program: Program) -> Mapping[str, Any]:
        """What a program is built for: an unscheduled function, by which others are judged, runs on no GPU."""
        target = self._types[program.board_type].target
        return gpus.reference_of(target) if program.candidate is None else target

    def _check_on(self, held: Held) -> Request | None:
        """Check a program on a free board where one waits for that: others wait for what comes of it."""
        for key in self._find_keys(held):
            program = self._programs.find_runnable((key.board_type, key.workload))
            if program is not None and program.checking is not None:
                held.program, held.point = program, key.point
                token = self._ledger.ask(Asked(program, "run", held.name))
                arguments = self._workloads[program.place]["arguments"]
                inputs = make_inputs(arguments, self._order.search.seed)
                point = self._types[key.board_type].points[key.point]
                spec = winner_check.to_run_spec(self._settings, gpus.device_of(self._find_target(program)))
                return RunWanted(token, held.name, point, spec, program.checking, inputs)
        return None

    def _begin_round(self, held: Held, now_s: float) -> None:
        names = self._ledger.find_names(held.board_type)
        for key in self._find_keys(held):
            task = self._active[key]
            run = task.contest.begin(held.name, now_s, names, self._count_expected(key.board_type))
            if run is not None:
                held.task, held.run, held.point = task, run, key.point
                return

    def _find_keys(self, held: Held) -> list[WinnerKey]:
        """The tasks that a board may work for, first those for which its clocks may stay as they are."""
        keys = [key for key in self._active if key.board_type == held.board_type]
        return sorted(keys, key=lambda key: key.point != held.point)

    def _measure_on(self, held: Held) -> list[Request]:
        task, run = held.task, held.run
        if task is None or run is None:
            return []
        requests: list[Request] = []
        for candidate in run.plan():
            program = task.programs[candidate]
            if program.library is None:
                raise InternalError(f"{candidate} is measured before it was built")
            spec = winner_check.to_measure_spec(program, self._order, task.of_type)
            token = self._ledger.ask(Asked(program, None, held.name, task, run))
            requests.append(MeasureWanted(token, held.name, task.point, spec, program.library))
        return requests

    # Answers

    def on_replayed(self, token: Token, module_json: str | None, message: str = "") -> None:
        """The scheduled function, or None where the trace fits its workload no more."""
        if (asked := self._ledger.close(token)) is not None:
            asked.program.on_replayed(module_json, message)

    def on_built(self, token: Token, result: BuildResult) -> None:
        """A build ended, well or not."""
        if (asked := self._ledger.close(token)) is not None and asked.what is not None:
            asked.program.on_built(asked.what, result)

    def on_ran(self, token: Token, outcome: Outcome, outputs: Arrays) -> None:
        """A run ended, well or not."""
        if (asked := self._ledger.close(token)) is not None:
            asked.program.checked_on = asked.board
            asked.program.on_ran(outcome, outputs, self._programs.find_reference(asked.program))

    def on_measured(self, token: Token, outcome: Outcome, board_s: float) -> None:
        """A measurement ended, well or not; for `board_s` seconds the board was busy with it."""
        asked = self._ledger.close(token)
        if asked is None or asked.task is None or asked.run is None:
            return
        task, run, program = asked.task, asked.run, asked.program
        if not outcome.board:
            outcome = dataclasses.replace(outcome, board=asked.board)
        self.measured, self.measured_s = self.measured + 1, self.measured_s + board_s
        median_s = self._journal.write_measurement(task.key, program, run.number, outcome, board_s)
        task.contest.on_measured(run, program.candidate or "", outcome.status, outcome.message, median_s)
        self._ledger.release(asked)

    def on_failed(self, token: Token, message: str) -> None:
        """What was asked could not be done, by nobody's fault (a search that died): asked again, a few times."""
        asked = self._ledger.find(token)
        if asked is None:
            return
        if asked.what is None:
            self.on_measured(token, Outcome(Status.FARM_ERROR, message, board=asked.board), 0.0)
        else:
            self._ledger.close(token)
            asked.program.on_fault(message)

    # Ends

    @property
    def done(self) -> bool:
        """Whether every task that was added has a winner, or none for good."""
        return not self._pending and not self._active

    @property
    def left(self) -> tuple[int, int]:
        """Measurements that are still to be made: where each next look decides, and at most."""
        usual = most = 0
        for task in self._active.values():
            soon, late = task.contest.left
            usual, most = usual + (soon or self._allowance.usual), most + (late or self._allowance.most)
        waiting = len(self._pending)
        return usual + waiting * self._allowance.usual, most + waiting * self._allowance.most

    @property
    def verdict(self) -> WinnersVerdict:
        """What came of it so far."""
        results = self._results
        return WinnersVerdict(
            tasks=len(results) + len(self._active) + len(self._pending),
            over=len(results),
            records=sum(each.record is not None and not each.held for each in results.values()),
            held=sum(each.held for each in results.values()),
            ties=sum(each.tied for each in results.values()),
            rejected=len(self._rejected),
            untuned=sum(each.untuned for each in results.values()),
            undecided={key: each.reason for key, each in results.items() if each.record is None and not each.held},
            contradictions=tuple(
                f"{self._workloads[key.board_type, key.workload]['name']} at {key.point}: {said}"
                for key, each in results.items()
                for said in each.contradictions
            ),
        )

    def _note_failures(self, task: WinnerTask) -> None:
        """Keep why candidates are out, once each."""
        for candidate, reason in task.take_failures():
            program = task.programs[candidate]
            failure = program.failure
            kind = "winner_failed"
            if failure is not None and failure.status is not None:
                self._journal.write_failed_check(task.key, program, failure.status, failure.message)
                if failure.status is Status.WRONG_RESULT:
                    self._rejected.add((*program.place, candidate))
                    kind = str(Status.WRONG_RESULT)
            self._journal.event(kind, task.key, task.name, f"{candidate}: {reason}")

    def _finish(self, task: WinnerTask, result: Result) -> None:
        if result.record is not None and not self._journal.save_record(result.record, result.compared):
            result = Result(held=True, reason="a faster record came from elsewhere meanwhile")
        for said in result.contradictions:
            self._journal.event("boards_disagree", task.key, task.name, said)
        if result.record is None and not result.held:
            self._journal.event("no_winner", task.key, task.name, result.reason)
        self._results[task.key] = result
        self._active.pop(task.key, None)
        self._ledger.wind_up(task)
        place = (task.key.board_type, task.key.workload)
        if not any((key.board_type, key.workload) == place for key in (*self._active, *self._pending)):
            self._programs.drop(place)

    def _places(self) -> set[tuple[str, str]]:
        return {(key.board_type, key.workload) for key in self._active}

    def _count_expected(self, board_type: str) -> int:
        return max(1, len(self._ledger.find_names(board_type)), self._expected.get(board_type, 0))


def _all_tasks(order: Order) -> list[WinnerKey]:
    return [
        WinnerKey(of_type.board_type, workload.hash, point)
        for of_type in order.types
        for workload in of_type.workloads
        for point in of_type.points
    ]
