"""What the engine keeps of one campaign while it carries it out: its order, its jobs' code, what it has used.

It holds facts and does nothing; what the scheduler knows of the campaign is in its own state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from device_agent.protocol import FaultSide, Limits, MeasureSpec, Outcome, TensorSpec
from farm.campaign.order import Order, TypeOrder, WorkloadOrder
from farm.campaign.scheduler.values import TaskKey
from farm.inventory.board_types import require_board_type
from farm.points.values import format_clocks
from farm.search import gpus

if TYPE_CHECKING:  # loads NumPy
    from farm.campaign.engine.board_held import TrialMeasured


# A candidate so much slower than the best so far is worth no more than that it is slow. Wide enough for the first
# trials of a search, whose best is far from what it ends with.
SLOWER = 15.0
# A busy board may take so long to read its sensors, and to start a candidate's threads and touch its memory.
RUN_FLOOR_S = 2.0
# Samples that were made long take that long however fast a candidate is; where other programs take the processor from
# it, so many times longer. A candidate must not be blamed for that.
_STARVED = 5.0
# The agent lengthens a short sample by this margin (`device_agent/worker/timing.py`), usually in a second round.
_GROWTH_MARGIN = 1.2
# What it calls before it counts: its warm-up, and one call of the evaluator's own per sample.
_CALLS_BESIDE = 1
# Loading is the board's file system and linker, which know nothing of how fast a candidate is.
LOAD_S = 10.0


def plan_run_timeout_s(
    best_s: float | None, samples: int, min_repeat_s: float, limit_s: float, number: int = 1
) -> float:
    """How long a candidate may run, given the best latency so far of its workload there; `limit_s` where none is known.

    `samples` of `number` calls are taken, each made as long as `min_repeat_s`. A candidate up to `SLOWER` times the
    best is timed in full. Never below `RUN_FLOOR_S`, never above `limit_s`.
    """
    if best_s is None:
        return limit_s
    slow_s = SLOWER * best_s
    wanted_s = RUN_FLOOR_S + samples * (number + _CALLS_BESIDE) * slow_s
    if number * best_s < min_repeat_s:  # samples of good candidates are made longer, in a second round
        wanted_s += samples * (_STARVED * _GROWTH_MARGIN * min_repeat_s + _CALLS_BESIDE * slow_s)
    return min(limit_s, wanted_s)


# Points of the curve of latency over trials that are kept; every second one goes when there are more.
_HISTORY = 200


@dataclasses.dataclass(eq=False)
class Work:
    """A candidate on its way through the engine, from its proposal on, with its code once it is built.

    `failure` is how its build failed by its own fault. `measured` is what boards said of it, by assignment: two may
    answer before one of them counts.
    """

    task: TaskKey
    candidate: Any
    library: bytes | None = None
    sha256: str | None = None
    build_s: float | None = None
    failure: Outcome | None = None
    measured: dict[int, TrialMeasured] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Active:
    """One campaign under way. `id` is its number in the store; times are seconds on the monotonic clock."""

    id: int
    order: Order
    began_s: float
    attempts: dict[tuple[str, str, str, str], int]
    used_s: float = 0.0
    # How long a counted trial held a board on average.
    trial_s: float | None = None
    # The counted trials, and the wall clock (s), at the first report that had any: starting up is no pace.
    pace_from: tuple[int, float] | None = None
    # How long earlier engines' searches looked for candidates.
    searched_s: float = 0.0
    faults: dict[str, int] = dataclasses.field(default_factory=lambda: {f"{side}_faults": 0 for side in FaultSide})
    history: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    history_step: int = 1
    warm: dict[str, str] = dataclasses.field(default_factory=dict)
    # What every task has come to, as progress shows it.
    tasks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # The clocks that candidates ran at, by board type and point.
    clocks: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    # Times of records by board type, point and workload; once winners are `decided`, those are what counts.
    recorded: Mapping[tuple[str, str, str], float] = dataclasses.field(default_factory=dict)
    decided: bool = False

    @property
    def name(self) -> str:
        return self.order.name

    def type_of(self, board_type: str) -> TypeOrder:
        """What is done on boards of a type."""
        return next(each for each in self.order.types if each.board_type == board_type)

    def workload_of(self, task: TaskKey) -> WorkloadOrder:
        """The workload of a task."""
        return next(each for each in self.type_of(task.board_type).workloads if each.hash == task.workload)

    def is_heaviest(self, task: TaskKey) -> bool:
        """Whether a task's workload is the one of its board type that computes most in a call."""
        return task.workload == max(self.type_of(task.board_type).workloads, key=lambda each: each.flop).hash

    def next_attempt(self, task: TaskKey, candidate: str) -> int:
        """The number of a candidate's next attempt, from 1. A candidate's entry goes with `forget`.

        One that was given up keeps its entry: a search that starts anew may propose it again.
        """
        key = (task.board_type, task.workload, task.point, candidate)
        self.attempts[key] = self.attempts.get(key, 0) + 1
        return self.attempts[key]

    def forget(self, task: TaskKey, candidate: str) -> None:
        """A candidate is concluded: its attempts are counted in the store alone."""
        self.attempts.pop((task.board_type, task.workload, task.point, candidate), None)

    def note_counted(self, task: TaskKey, latency_s: float | None) -> None:
        """A trial of a task counts; None: it failed by its candidate's fault."""
        for row in self._find_rows(task):
            row["counted"] += 1
            if latency_s is not None and (row["best_s"] is None or latency_s < row["best_s"]):
                row["best_s"] = latency_s

    def count_fault(self, side: FaultSide) -> None:
        """Count a failure by its side."""
        self.faults[f"{side}_faults"] += 1

    def note_clocks(self, task: TaskKey, outcome: Outcome) -> None:
        """What the board's clocks were in a task's trial."""
        place = (task.board_type, task.point)
        if place not in self.clocks:
            clusters = {
                each.name: each.cpus for each in require_board_type(task.board_type).clusters if not each.isolated
            }
            on_gpu = gpus.is_gpu(self.type_of(task.board_type).target)
            self.clocks[place] = format_clocks(outcome, clusters, on_gpu=on_gpu)

    def note_ended(self, task: TaskKey, reason: str) -> None:
        """A task is searched no further."""
        for row in self._find_rows(task):
            row["ended"] = reason

    def _find_rows(self, task: TaskKey) -> list[dict[str, Any]]:
        place = (task.workload, task.board_type, task.point)
        return [row for row in self.tasks if (row["workload"], row["board_type"], row["point"]) == place]

    def note_history(self, counted: int, latencies: Mapping[str, float]) -> None:
        """Keep how good the campaign is after so many trials, in bounded space."""
        if latencies and (not self.history or counted >= self.history[-1][0] + self.history_step):
            self.history.append((counted, dict(latencies)))
            if len(self.history) > _HISTORY:
                self.history = self.history[::2]
                self.history_step *= 2


def to_measure_spec(active: Active, work: Work, best_s: float | None) -> MeasureSpec:
    """How a candidate is timed; its time-out follows the best of its task so far (s)."""
    order = active.order.measure
    timeout_s = plan_run_timeout_s(best_s, order.repeat, order.min_repeat_s, order.timeout_s)
    return MeasureSpec(
        arguments=tuple(TensorSpec(shape, dtype) for shape, dtype in work.candidate.arguments),
        number=order.number,
        repeat=order.repeat,
        min_repeat_s=order.min_repeat_s,
        cold_weights=True,
        device=gpus.device_of(active.type_of(work.task.board_type).target),
        seed=active.order.search.seed,
        limits=Limits(
            timeout_s=timeout_s,
            memory_bytes=order.memory_bytes,
            threads=active.type_of(work.task.board_type).threads,
            load_timeout_s=LOAD_S,
        ),
    )
