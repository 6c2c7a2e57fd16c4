"""Time several schedules of a model's workloads at one point, in the rounds of `farm.selection`, on one or two boards.

`refit` uses the winners.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, Status
from farm.crew.coroutines import until
from farm.crew.crew import Crew
from farm.crew.driven_board import DrivenBoard
from farm.errors import BoardUnsafeError, InternalError, PermanentError, TransientError, UnavailableError
from farm.models.batches import set_batch
from farm.search import traces
from farm.search import workloads as search_workloads
from farm.search.build import builder
from farm.selection.rounds import BOARDS, Contest, RoundRun
from farm.selection.tie import TieRule
from farm.store.trials import KnownCandidate
from farm.sweep.run.programs import SweepRecipe
from farm.values import Workload

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rival:
    """One schedule of a workload, built to be timed. `default_s` is its time at the default point."""

    candidate: str
    default_s: float
    trace_json: str = dataclasses.field(repr=False)
    scheduled_json: str = dataclasses.field(repr=False)
    library: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class TriedWorkload:
    """A workload of the model, and two or more rivals; the first is its record's."""

    workload: Workload
    rivals: tuple[Rival, ...] = dataclasses.field(repr=False)


def build_rivals(
    recipe: SweepRecipe, batch: int, chosen: Mapping[str, Sequence[KnownCandidate]]
) -> list[TriedWorkload]:
    """Build every workload of the model at `batch` for which `chosen` has candidates, the record's candidate first.

    A schedule that does not build any more is left out, and with it a workload that has only one left.
    """
    model, inputs = set_batch(recipe.source, recipe.shapes, batch)
    shapes = {spec.name: spec.static_shape for spec in inputs}
    prepared = search_workloads.prepare_model(model, shapes, recipe.target_config, recipe.board_type.pipeline)
    tried = []
    for workload in prepared.workloads:
        rivals = []
        for known in chosen.get(workload.hash, ()):
            try:
                scheduled = traces.replay(workload.module_json, known.trace_json, prepared.target)
                library = builder.build_candidate(scheduled, recipe.target_config)
            except (InternalError, PermanentError, RuntimeError, ValueError) as error:
                _log.warning("%s: candidate %s cannot be built: %s", workload.name, known.candidate, error)
                continue
            rivals.append(Rival(known.candidate, known.median_s or 0.0, known.trace_json, scheduled, library))
        if len(rivals) > 1:
            tried.append(TriedWorkload(workload, tuple(rivals)))
    return tried


def build_checks(recipe: SweepRecipe, pairs: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Build libraries of unscheduled and scheduled functions with ordinary weights, so that outputs can be compared."""
    config = recipe.target_config

    def build(module_json: str) -> bytes:
        return builder.build_candidate(module_json, config, standalone=True)

    return [(build(plain), build(scheduled)) for plain, scheduled in pairs]


RULE = TieRule()
# How often signals are handled while boards measure.
_LOOK_S = 0.2

_Work = tuple[Contest, Mapping[str, Rival], RoundRun]


class Retrials:
    """The contests of some workloads at one point, with up to two of the crew's boards."""

    def __init__(
        self,
        crew: Crew,
        tried: Sequence[TriedWorkload],
        point: OperatingPoint,
        plan_spec: Callable[[Rival], MeasureSpec],
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.contests: dict[str, Contest] = {}
        self._crew = crew
        self._rivals: dict[str, Mapping[str, Rival]] = {}
        self._boards = crew.boards[:BOARDS]
        self._point, self._plan_spec, self._say = point, plan_spec, say
        self._is_stopped = False
        for each in tried:
            contest = self.contests[each.workload.hash] = Contest(seed, RULE)
            self._rivals[each.workload.hash] = {rival.candidate: rival for rival in each.rivals}
            contest.enter([rival.candidate for rival in each.rivals])

    def play(self) -> None:
        """Measure until every contest is over.

        A lost board spoils its round, and the others go on. Raises what the last board's calls raise.
        """
        serving = {self._crew.start(self._serve(board)) for board in list(self._boards)}
        try:
            while serving:
                done, serving = concurrent.futures.wait(serving, _LOOK_S, concurrent.futures.FIRST_EXCEPTION)
                for each in done:
                    each.result()
        finally:
            self._is_stopped = True

    async def _serve(self, board: DrivenBoard) -> None:
        """Measure round after round, until every contest is over or the board is lost."""
        while True:
            found: _Work | bool = await until(lambda: self._is_over or self._begin(board.name))
            if isinstance(found, bool):
                return
            contest, rivals, run = found
            candidate = ""
            try:
                while run.left:
                    candidate = run.left.pop(0)
                    await board.pin(self._point)  # the replacement of a lost board is not connected yet
                    outcome = await board.measure(self._plan_spec(rivals[candidate]), rivals[candidate].library)
                    contest.on_measured(run, candidate, outcome.status, outcome.message, _find_median_s(outcome))
            except BoardUnsafeError:
                raise
            except (TransientError, UnavailableError) as error:
                contest.on_measured(run, candidate, Status.BOARD_LOST, error.message, None)
                self._boards.remove(board)
                if not self._boards:
                    raise
                self._say(f"going on without {board.name}: {error.message}")
                return
            finally:
                contest.end(run)

    @property
    def _is_over(self) -> bool:
        return self._is_stopped or all(each.is_over or not each.alive for each in self.contests.values())

    def _begin(self, board: str) -> _Work | None:
        """Begin a round of the first contest that has one for this board."""
        names = [each.name for each in self._boards]
        for workload, contest in self.contests.items():
            if (run := contest.begin(board, time.monotonic(), names, len(names))) is not None:
                return contest, self._rivals[workload], run
        return None


def _find_median_s(outcome: Outcome) -> float | None:
    return statistics.median(outcome.latency_s) if outcome.status is Status.OK and outcome.latency_s else None
