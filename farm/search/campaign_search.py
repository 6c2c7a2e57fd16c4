"""The search of a whole campaign: one search per task, and a cost model that all of them share.

A task is a workload on a board type at an operating point. No Ray, no store: whoever calls says what was measured.
Which task is asked next is the scheduler's business.
"""

from __future__ import annotations

import dataclasses

from farm.search import strategy, target
from farm.search.cost_model import CostModel
from farm.search.strategy import Candidate
from farm.search.traits import Traits
from farm.search.workloads import Workload


@dataclasses.dataclass(frozen=True)
class SearchTask:
    """A workload for boards of one type at one operating point, named as in trials; `traits` of the two."""

    workload: Workload
    board_type: str
    point: str
    traits: Traits


@dataclasses.dataclass(frozen=True)
class ForeignTrial:
    """A good trial of another task: another shape, operating point or board type. `median_s` is its latency."""

    workload: Workload
    board_type: str
    point: str
    traits: Traits
    candidate: str
    trace_json: str = dataclasses.field(repr=False)
    median_s: float


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """What came of foreign trials: how many teach the cost model, how many were left out, and why.

    `rank_correlation` is Spearman's, of held-out trials; None where too few were there to tell. `first` of the best
    foreign schedules will be proposed before anything else.
    """

    used: int
    left_out: int
    rank_correlation: float | None
    first: int
    reason: str


class CampaignSearch:
    """Searches by key. Not thread-safe. With one thread, the same calls give the same candidates."""

    def __init__(
        self, tuner: str, loss: str | None, seed: int, population: int, generations: int, threads: int
    ) -> None:
        """`tuner` and `loss` as a campaign file names them; `threads` is the most that any call may use."""
        self._settings = strategy.SearchSettings(
            population=population, generations=generations, seed=seed, threads=threads
        )
        self._model = CostModel(seed, threads)
        self._searches: dict[str, strategy.WorkloadSearch] = {}

    def open(self, key: str, task: SearchTask) -> None:
        """Make a task searchable under a name of the caller's. Opening it again changes nothing."""
        if key not in self._searches:
            compile_target = target.make_target(task.workload.target)
            self._searches[key] = strategy.WorkloadSearch(task.workload, compile_target, self._model, self._settings)

    def recall(self, key: str, known: list[tuple[str, str, float | None]]) -> None:
        """Know what was measured before, as (hash, trace, latency in seconds or None for its own fault), in order."""
        self._searches[key].recall(known)

    def warm_start(self, key: str, foreign: list[ForeignTrial]) -> WarmStart:
        """Learn from other tasks' trials where that helps this one."""
        return WarmStart(0, len(foreign), None, 0, "not done yet")

    def propose(self, key: str, count: int) -> tuple[list[Candidate], bool]:
        """Up to `count` candidates that were not proposed before, and whether there are no more."""
        search = self._searches[key]
        return search.propose(count), search.exhausted

    def observe(self, key: str, results: list[tuple[str, float | None]]) -> None:
        """Learn from (candidate hash, median latency in seconds, or None for a fault of the candidate itself)."""
        self._searches[key].observe(results)

    def forget(self, key: str, candidate: str) -> None:
        """A proposed candidate will not be measured: teach nothing."""
        self._searches[key].forget(candidate)

    def replay(self, key: str, trace_json: str) -> str:
        """The scheduled function that a candidate's trace leads to, in TVM's JSON. Raises InternalError."""
        return self._searches[key].replay(trace_json)
