"""Turn the best candidates of a campaign into records: check their outputs, measure them again, decide.

Poll-based coroutines: `Programs._prepare` runs for a candidate, `Verification._verify` for a task,
`Verification._serve` for a lent board. They await what a `VerificationWorker` does; `step` resumes
those that were answered.
Results go to the store first, so a restart repeats no measurement. `task` holds candidates and evidence,
`farm.selection` rounds and ties.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from device_agent.protocol import Engine, FaultSide, Limits, Outcome, RunSpec, Status
from farm.campaign.plan_estimate import Allowance, plan_allowance
from farm.campaign.verify import objectives, programs
from farm.campaign.verify.coroutines import Loop, Running, done, until
from farm.campaign.verify.finals import Finals
from farm.campaign.verify.journal import VerificationJournal
from farm.campaign.verify.programs import Preparations, Program, ProgramCheck, Programs, RecordKey, VerificationWorker
from farm.campaign.verify.task import TaskResult, VerificationTask, read_result
from farm.crew.held_board import Ended
from farm.errors import InternalError
from farm.measure.arrays import make_inputs
from farm.points.values import Objective
from farm.search import gpus
from farm.selection.rounds import RoundRun
from farm.selection.tie import TieRule
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Order

# Tasks of a board type that are prepared beyond one per board, so that boards find work.
_AHEAD = 2
# Measurements of a round at a board: one runs, one waits there.
_AT_BOARD = 2
# The attempt number of a failed check's trial; rounds are numbered from 1.
_CHECK = 0


@dataclasses.dataclass(eq=False)
class LentBoard:
    """A lent board. `point` is its latest operating point; without work it is free."""

    name: str
    board_type: str
    point: str = ""
    work: Coroutine[Any, Any, None] | None = None


class Verification:
    """The verification of one campaign. Not thread-safe. Boards belong to it from `give` to `take`."""

    def __init__(
        self,
        campaign: int,
        order: Order,
        store: Store,
        settings: Settings,
        worker: VerificationWorker,
        rule: TieRule | None = None,
        trials: float | None = None,
        rests: bool = False,
        count_fault: Callable[[FaultSide], None] = lambda side: None,
    ) -> None:
        """Read earlier results from the store.

        `trials` of the search for each task limit its measurements; None: no limit. `rests`: nothing is prepared while
        a board has work, since it is the machine that prepares. `count_fault` gets the side of every failed attempt
        that is repeated.
        """
        self._count_fault = count_fault
        self.rests = rests
        self._campaign, self._order, self._settings = campaign, order, settings
        rule = dataclasses.replace(rule or TieRule(), objective=Objective(order.objective))
        self._allowance = Allowance(order.measure.verify_top, rule.looks)
        if trials is not None:
            self._allowance = plan_allowance(trials, order.measure.verify_top, rule.looks)
        self._rule = dataclasses.replace(rule, looks=self._allowance.looks)
        self.measured, self.measured_s = 0, 0.0
        self._journal = VerificationJournal(campaign, order, store)
        self._types = {each.board_type: each for each in order.types}
        self._workloads = {(each.board_type, each.hash): each for each in store.workloads.fetch(campaign)}
        self._trials = self._journal.fetch_trials()
        self._rejected = {
            (*key.place, str(row["candidate"]))
            for key, rows in self._trials.items()
            for row in rows
            if row["status"] == Status.WRONG_RESULT
        }
        # By board type and point: candidates of the search, which is over.
        self._slacks: dict[tuple[str, str], float] = {}
        self._pending: list[RecordKey] = []
        self._active: dict[RecordKey, VerificationTask] = {}
        self._results: dict[RecordKey, TaskResult] = {}
        self.boards: dict[str, tuple[LentBoard, Running]] = {}
        self._expected: dict[str, int] = {}
        self._now_s = 0.0
        self._loop, self._worker, self._preparations = Loop(), worker, Preparations(self._may_prepare)
        with_them = self._loop, worker, self._preparations
        self._programs = Programs(*with_them, self._workloads, self._find_target, self._note_retry)
        for key in _list_tasks(order):
            if key.place not in self._workloads:
                raise InternalError(f"campaign {campaign} has no workload {key.workload} for {key.board_type}")
            if (record := self._journal.find_own_record(key)) is not None:
                self._results[key] = read_result(record)
            else:
                self._pending.append(key)
        self.finals = Finals(*with_them, campaign, order, store, settings)
        for board_type in self._types:
            self._loop.start(self._begin_tasks(board_type))
        self._loop.start(self._begin_finals())

    # Boards

    def wants(self) -> Mapping[str, int]:
        """Return how many boards of each type it can use now; types that it needs none of are missing."""
        self._loop.run()
        wanted = self._programs.count_checks({key.place for key in self._active})
        for key, task in self._active.items():
            names = self.find_names(key.board_type)
            wanted[key.board_type] += task.contest.count_wanted(names, self._count_expected(key.board_type))
        for board_type in self._types:
            wanted[board_type] += self.finals.count_wanted(board_type)
        return {board_type: count for board_type, count in wanted.items() if count}

    def expect(self, boards: Mapping[str, int]) -> None:
        """Set how many boards of each type it may expect, lent ones included.

        With two, a task waits some minutes for the second one; without a number, it expects those that it has.
        """
        self._expected = dict(boards)

    def give(self, board: str, board_type: str, simulated: bool) -> None:
        """Lend a board, until `take`. Raises InternalError where its measurements would not fit the order's."""
        if board_type not in self._types or self._types[board_type].simulated != simulated:
            kind = "simulated" if simulated else "real"
            raise InternalError(f"{board} is a {kind} {board_type}, which {self._order.name} was not ordered for")
        if board not in self.boards:
            lent = LentBoard(board, board_type)
            self.boards[board] = lent, self._loop.start(self._serve(lent))

    def take(self, *boards: str) -> None:
        """Take boards back. Their answers count, their open work is planned anew; none of them gets any more."""
        jobs = [self.boards.pop(board)[1] for board in boards if board in self.boards]
        if jobs:
            self._loop.run()
        for job in jobs:
            job.close()

    def spare(self) -> list[LentBoard]:
        """Return lent boards without work."""
        return [board for board, _ in self.boards.values() if board.work is None]

    def step(self, now_s: float) -> None:
        """Go on as far as it can. `now_s` is monotonic."""
        self._now_s = now_s
        self.finals.tick(now_s)
        self._loop.run()

    def _may_prepare(self) -> bool:
        return not self.rests or len(self.spare()) == len(self.boards)

    # Tasks

    async def _begin_tasks(self, board_type: str) -> None:
        """Begin task after task, as many as boards find work; where the host rests, all at once.

        Points of one workload follow each other: they share programs.
        """
        for key in sorted(key for key in self._pending if key.board_type == board_type):
            await until(functools.partial(self._has_room, board_type))
            self._pending.remove(key)
            self._loop.start(self._verify(key))

    def _has_room(self, board_type: str) -> bool:
        begun = sum(key.board_type == board_type for key in self._active)
        return self.rests or begun < _AHEAD + max(1, len(self.find_names(board_type)))

    async def _verify(self, key: RecordKey) -> None:
        """Verify a task, from its search's candidates to its record, or to why it has none."""
        note = functools.partial(self._note_failure, key)
        task = self._active[key] = VerificationTask(
            key, self._campaign, self._order, self._workloads[key.place], self._allowance.top, self._rule, note
        )
        if (place := (key.board_type, key.point)) not in self._slacks:
            self._slacks[place] = objectives.fetch_slack(self._order, task.of_type, key.point, self._journal)
        task.slack = self._slacks[place]
        trials = self._trials.pop(key, [])
        result = task.choose(self._journal.fetch_known(key), self._journal.find_record(key), trials)
        if result is None:
            find = functools.partial(self._programs.find, key)
            result = await task.decide(find, find(None))
        if result.record is not None and not self._journal.save_record(result.record, result.compared):
            result = TaskResult(held=True, reason="a faster record came from elsewhere meanwhile")
        for said in result.contradictions:
            self._journal.event("boards_disagree", key, task.name, said)
        replaced = ((result.record and result.record.evidence) or {}).get("replaced")
        if replaced and replaced["objective"] != self._rule.objective:
            said = f"its record, chosen by {replaced['objective']}, is replaced by one chosen by {self._rule.objective}"
            self._journal.event("record_replaced", key, task.name, said)
        if result.record is None and not result.held:
            self._journal.event("no_winner", key, task.name, result.reason)
        self._results[key] = result
        del self._active[key]
        if not any(other.place == key.place for other in (*self._active, *self._pending)):
            self._programs.drop(key.place)

    def _note_retry(self, program: Program, side: FaultSide, reason: str) -> None:
        """Note that a program is tried again, and why."""
        self._count_fault(side)
        name = self._workloads[program.key.place].name
        what = "its unscheduled function" if program.candidate is None else program.candidate
        self._journal.event("winner_retried", program.key, name, f"{what} is tried again after {reason}")

    def _note_failure(self, key: RecordKey, program: Program, reason: str) -> None:
        """Note why a candidate is out."""
        kind = "winner_failed"
        failure = program.failure
        if failure is not None and failure.status is not None:
            simulated = self._types[key.board_type].simulated
            outcome = Outcome(failure.status, failure.message, board=program.checked_on, simulated=simulated)
            self._journal.write(key, program, _CHECK, outcome, None)
            if failure.status is Status.WRONG_RESULT:
                self._rejected.add((*key.place, program.candidate or ""))
                kind = str(Status.WRONG_RESULT)
        self._journal.event(kind, key, self._workloads[key.place].name, f"{program.candidate}: {reason}")

    async def _begin_finals(self) -> None:
        """Begin the models' finals once all workloads are verified."""
        await until(lambda: not self._pending and not self._active)
        self.finals.begin()

    # What a board does

    async def _serve(self, board: LentBoard) -> None:
        """Serve with a lent board until it is taken: one check or round after the other."""
        while True:
            board.work = await until(functools.partial(self._find_work, board))
            await board.work
            board.work = None

    def _find_work(self, board: LentBoard) -> Coroutine[Any, Any, None] | None:
        """Find a check, since others wait for its result, or else a round, which begins with this.

        Tasks for which the board keeps its clocks come first.
        """
        if board.name not in self.boards or (self.rests and self._preparations.count):
            return None
        keys = [key for key in self._active if key.board_type == board.board_type]
        keys.sort(key=lambda key: key.point != board.point)
        for key in keys:
            if (check := self._programs.find_check(key.place)) is not None:
                return self._check(board, key, check)
        names, expected = self.find_names(board.board_type), self._count_expected(board.board_type)
        for key in keys:
            task = self._active[key]
            if (run := task.contest.begin(board.name, self._now_s, names, expected)) is not None:
                return self._measure(board, task, run)
        stage = self.finals.find(board.board_type)
        return None if stage is None else self.finals.run(stage, board.name)

    async def _check(self, board: LentBoard, key: RecordKey, check: ProgramCheck) -> None:
        """Run a program. If the board is taken away, another one does."""
        program = check.program
        board.point, program.checked_on, check.is_begun = key.point, board.name, True
        inputs = make_inputs(self._workloads[program.key.place].arguments, self._order.search.seed)
        # Unscheduled code is slow: it gets a model's time.
        limits = Limits(timeout_s=self._settings.model_timeout_s, memory_bytes=self._settings.model_memory_bytes)
        spec = RunSpec(Engine.KERNEL, device=gpus.device_of(self._find_target(program)), limits=limits)
        point = self._types[key.board_type].points[key.point]
        try:
            check.answer = await done(self._worker.run(board.name, point, spec, check.binary, inputs))
        finally:
            check.is_begun = check.answer is not None

    async def _measure(self, board: LentBoard, task: VerificationTask, run: RoundRun) -> None:
        """Measure each candidate of a round in turn. If the board is taken away, the round ends as it is."""
        board.point = task.key.point
        asked: collections.deque[tuple[Program, Future[Ended]]] = collections.deque()
        try:
            while run.left or asked:
                while run.left and len(asked) < _AT_BOARD:
                    program = task.programs[run.left.pop(0)]
                    if program.library is None:
                        raise InternalError(f"{program.candidate} is measured before it was built")
                    window = task.plan_window(program.candidate or "")
                    spec = programs.to_measure_spec(self._order, task.of_type, program.arguments, window)
                    asked.append((program, self._worker.measure(board.name, task.point, spec, program.library)))
                program, measured = asked[0]
                ended = await done(measured)
                asked.popleft()
                self._take_in(task, run, program, ended.result, ended.board_s)
        finally:
            task.contest.end(run)

    def _take_in(
        self, task: VerificationTask, run: RoundRun, program: Program, outcome: Outcome, board_s: float
    ) -> None:
        if not outcome.board:
            outcome = dataclasses.replace(outcome, board=run.board)
        if (side := outcome.status.fault_side) not in (None, FaultSide.CANDIDATE):
            self._count_fault(side)
        self.measured, self.measured_s = self.measured + 1, self.measured_s + board_s
        median_s = self._journal.write(task.key, program, run.number, outcome, board_s)
        energy_j = task.take_energy(program.candidate or "", outcome)
        task.contest.on_measured(run, program.candidate or "", outcome.status, outcome.message, median_s, energy_j)

    def _find_target(self, program: Program) -> Mapping[str, Any]:
        """Return a program's target: an unscheduled function, the reference, runs on no GPU."""
        target = self._types[program.key.board_type].target
        return gpus.reference_of(target) if program.candidate is None else target

    def find_names(self, board_type: str) -> set[str]:
        """Return the names of the lent boards of a type."""
        return {board.name for board, _ in self.boards.values() if board.board_type == board_type}

    def _count_expected(self, board_type: str) -> int:
        return max(1, len(self.find_names(board_type)), self._expected.get(board_type, 0))

    # Ends

    @property
    def done(self) -> bool:
        """Whether every task has a record, or none for good, and every final is over."""
        return not self._pending and not self._active and self.finals.done

    @property
    def left(self) -> tuple[int, int]:
        """Count the measurements that are left: where each next look decides, and at most."""
        usual = most = 0
        for task in self._active.values():
            soon, late = task.contest.left
            usual, most = usual + (soon or self._allowance.usual), most + (late or self._allowance.most)
        waiting = len(self._pending)
        return usual + waiting * self._allowance.usual, most + waiting * self._allowance.most

    @property
    def unchecked(self) -> int:
        """Count the tasks with unchecked candidates."""
        return len(self._pending) + sum(not task.is_checked for task in self._active.values())

    @property
    def verdict(self) -> dict[str, Any]:
        """Return the results so far, as a plain document.

        `over` of `tasks` are done. `records` are new ones, `held` those whose candidate stayed, `ties` those of both
        without a proven lead. `rejected` counts candidates with wrong output, `untuned` tasks whose untuned code is as
        fast, `undecided` says why a task has no record, `contradictions` where boards disagree, `finals` are the
        models' (`final_rules.describe`).
        """
        results = self._results
        return {
            "tasks": len(results) + len(self._active) + len(self._pending),
            "over": len(results),
            "records": sum(each.record is not None and not each.held for each in results.values()),
            "held": sum(each.held for each in results.values()),
            "ties": sum(each.tied for each in results.values()),
            "rejected": len(self._rejected),
            "untuned": sum(each.untuned for each in results.values()),
            "undecided": [
                {**key._asdict(), "reason": each.reason}
                for key, each in results.items()
                if each.record is None and not each.held
            ],
            "contradictions": [
                f"{self._workloads[key.place].name} at {key.point}: {said}"
                for key, each in results.items()
                for said in each.contradictions
            ],
            "finals": list(self.finals.documents),
        }


def _list_tasks(order: Order) -> Iterator[RecordKey]:
    for each in order.types:
        for workload, point in itertools.product(each.workloads, each.points):
            yield RecordKey(each.board_type, workload.hash, point)
