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
from concurrent.futures import Future
from typing import Any

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, Status
from farm.crew.crew import Crew
from farm.crew.driven_board import DrivenBoard
from farm.errors import BoardUnsafeError, FarmError, InternalError, PermanentError, TransientError, UnavailableError
from farm.models.batches import set_batch
from farm.search import traces
from farm.search.build import builder
from farm.search.graph import pipeline as graph_pipeline
from farm.selection.rounds import BOARDS, Contest, RoundRun
from farm.selection.tie import TieRule
from farm.sweep.run.programs import SweepRecipe

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

    workload: str
    name: str
    flop: float
    weight: int
    pipeline: str
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    module_json: str = dataclasses.field(repr=False)
    rivals: tuple[Rival, ...] = dataclasses.field(repr=False)


def build_rivals(
    recipe: SweepRecipe, batch: int, chosen: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[TriedWorkload]:
    """Build every workload of the model at `batch` for which `chosen` has rows, the record's candidate first.

    A schedule that does not build any more is left out, and with it a workload that has only one left.
    """
    model, inputs = set_batch(recipe.source, recipe.shapes, batch)
    shapes = {spec.name: spec.static_shape for spec in inputs}
    prepared = graph_pipeline.prepare_model(model, shapes, recipe.target_config, recipe.board_type.pipeline)
    tried = []
    for workload in prepared.workloads:
        rivals = []
        for row in chosen.get(workload.hash, ()):
            try:
                scheduled = traces.replay(workload.module_json, row["trace_json"], prepared.target)
                library = builder.build_candidate(scheduled, recipe.target_config)
            except (InternalError, PermanentError, RuntimeError, ValueError) as error:
                _log.warning("%s: candidate %s cannot be built: %s", workload.name, row["candidate"], error)
                continue
            rivals.append(Rival(row["candidate"], row["median_s"], row["trace_json"], scheduled, library))
        if len(rivals) > 1:
            tried.append(
                TriedWorkload(
                    workload.hash, workload.name, workload.flop, workload.weight, workload.pipeline,
                    workload.arguments, workload.module_json, tuple(rivals),
                )
            )  # fmt: skip
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


@dataclasses.dataclass
class _Lane:
    """A board, its round, and its running measurement."""

    board: DrivenBoard
    contest: Contest | None = None
    run: RoundRun | None = None
    candidate: str = ""
    future: Future[Outcome] | None = None


class Retrials:
    """The contests of some workloads at one point. Used from the main thread, with up to two of the crew's boards."""

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
        self._lanes = [_Lane(board) for board in crew.boards[:BOARDS]]
        self._point, self._plan_spec, self._say = point, plan_spec, say
        for each in tried:
            contest = self.contests[each.workload] = Contest(seed, RULE)
            self._rivals[each.workload] = {rival.candidate: rival for rival in each.rivals}
            contest.enter([rival.candidate for rival in each.rivals])

    def play(self) -> None:
        """Measure until every contest is over.

        A lost board spoils its round, and the others go on. Raises what the last board's calls raise.
        """
        while not all(contest.is_over or not contest.alive for contest in self.contests.values()):
            for lane in self._lanes:
                if lane.future is None:
                    self._give_work(lane)
            under_way = [lane.future for lane in self._lanes if lane.future is not None]
            if under_way:
                concurrent.futures.wait(under_way, _LOOK_S, concurrent.futures.FIRST_COMPLETED)
            else:
                time.sleep(_LOOK_S)  # a board that spoils rounds waits for the other one to do them
            for lane in list(self._lanes):
                if lane.future is not None and lane.future.done():
                    self._take_in(lane, lane.future)

    def _give_work(self, lane: _Lane) -> None:
        """Return the next measurement of the lane's round, or of a new one."""
        if lane.run is not None and not lane.run.left:
            self._end(lane)
        if lane.run is None:
            names = [each.board.name for each in self._lanes]
            for contest in self.contests.values():
                run = contest.begin(lane.board.name, time.monotonic(), names, len(names))
                if run is not None:
                    lane.contest, lane.run = contest, run
                    break
            else:
                return
        if lane.run is None or not lane.run.left:
            return
        workload = next(name for name, contest in self.contests.items() if contest is lane.contest)
        lane.candidate = lane.run.left.pop(0)
        rival = self._rivals[workload][lane.candidate]
        lane.future = self._crew.start(self._measure(lane.board, self._plan_spec(rival), rival.library))

    async def _measure(self, board: DrivenBoard, spec: MeasureSpec, library: bytes) -> Outcome:
        await board.pin(self._point)  # the replacement of a lost board is not connected yet
        return await board.measure(spec, library)

    def _take_in(self, lane: _Lane, future: Future[Outcome]) -> None:
        lane.future = None
        if lane.contest is None or lane.run is None:
            return
        try:
            outcome = future.result()
        except (TransientError, UnavailableError) as error:
            if isinstance(error, BoardUnsafeError):
                raise
            self._lose(lane, error)
            return
        latency_s = statistics.median(outcome.latency_s) if outcome.status is Status.OK and outcome.latency_s else None
        lane.contest.on_measured(lane.run, lane.candidate, outcome.status, outcome.message, latency_s)

    def _lose(self, lane: _Lane, error: FarmError) -> None:
        """Drop the lane's board and its round."""
        if lane.contest is not None and lane.run is not None:
            lane.contest.on_measured(lane.run, lane.candidate, Status.BOARD_LOST, error.message, None)
            self._end(lane)
        self._lanes.remove(lane)
        if not self._lanes:
            raise error
        self._say(f"going on without {lane.board.name}: {error.message}")

    @staticmethod
    def _end(lane: _Lane) -> None:
        if lane.contest is not None and lane.run is not None:
            lane.contest.end(lane.run)
        lane.contest, lane.run = None, None
