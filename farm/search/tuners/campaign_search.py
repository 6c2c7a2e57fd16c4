"""The search of a whole campaign: a history per task, and a cost model that learns from all tasks.

A task is a workload on a board type at an operating point. The caller reports results; the scheduler chooses the task
that gets the next trial.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from farm.errors import UsageError
from farm.search.tuners import TUNERS, strategies
from farm.search.tuners.cost_model import LOSSES, Correction, Features, Floats, SampleGroup, Trees
from farm.search.tuners.decisions import Candidate, ForeignTrial, Genome, SearchTask
from farm.search.tuners.history import TaskHistory, with_traits
from farm.search.tuners.schedule_space import Evaluated, ScheduleSpace
from farm.search.tuners.warm_start import Foreign, ForeignSpaces, WarmStart

# Results of a task before its own model ranks, or the best have offspring. Against 16, 8 found better schedules after
# 48 trials in five of six runs on simulated latencies, and as good ones in the sixth.
_WARMUP = 8
# Results of other tasks of the same operator kind that replace them.
_WARMUP_OTHERS = 64
# Models that choose in turns, trained with different weights: with few results they disagree and explore. One in two of
# a warm-started task ignores foreign trials, which may mislead.
_COMMITTEE = 4
# Weight of candidates of other tasks relative to a task's own, and the number of them that suffices.
_WEIGHT_SAME, _WEIGHT_OTHER, _MOST_OTHERS = 0.5, 0.2, 768


class _Task:
    def __init__(self, history: TaskHistory, task: SearchTask) -> None:
        self.history = history
        self.kind = task.workload.kind
        self.core = (task.board_type, task.workload.target.get("mcpu"))
        self.foreign: Foreign | None = None
        self.exhausted = False
        self.remarks: list[str] = []
        self.trained: tuple[tuple[int, ...], list[Trees]] | None = None


class CampaignSearch:
    """Searches by key. Not thread-safe.

    With one thread, proposals depend only on the seed and the results: a search that recalls the results of an earlier
    one in the same order continues like it.
    """

    def __init__(
        self, tuner: str, loss: str | None, seed: int, population: int, generations: int, threads: int
    ) -> None:
        """`tuner` and `loss` are as in a campaign file; `threads` limits every call. Raises UsageError."""
        if tuner not in TUNERS:
            raise UsageError(f"unknown tuner {tuner!r}", f"Known: {', '.join(TUNERS)}.")
        if loss is not None and loss not in LOSSES:
            raise UsageError(f"unknown loss {loss!r}", f"Known: {', '.join(LOSSES)}.")
        self._tuner, self._loss, self._seed = tuner, loss or "reg", seed
        self._population, self._generations, self._threads = population, generations, threads
        self._tasks: dict[str, _Task] = {}
        self._spaces = ForeignSpaces(threads)

    def open(self, key: str, task: SearchTask) -> None:
        """Open a task under a key; do nothing if it is open."""
        if key in self._tasks:
            return
        space = ScheduleSpace(task.workload, self._threads)
        name = f"{space.structure}/{task.board_type}/{task.point}"
        opened = _Task(TaskHistory(space, task.traits, self._seed, name), task)
        self._tasks[key] = opened
        if self._tuner == "grid":
            try:
                strategies.check_size(opened.history)
            except UsageError as error:
                opened.exhausted = True
                opened.remarks.append(str(error))

    def recall(self, key: str, known: list[tuple[str, str, float | None]]) -> None:
        """Add earlier results, as (hash, trace, latency in seconds or None for the candidate's fault), in order."""
        history = self._tasks[key].history
        for candidate, trace_json, latency_s in known:
            history.recall(candidate, history.space.read(trace_json), latency_s)

    def hold(self, key: str, under_way: list[tuple[str, str]]) -> None:
        """Add candidates of another search that are being measured, as (hash, trace)."""
        history = self._tasks[key].history
        for candidate, trace_json in under_way:
            genome = history.space.read(trace_json)
            found = history.space.evaluate([(genome, 0)])[0] if genome is not None else None
            if found is not None and found.hash == candidate:
                history.begin([found])
            else:
                history.recall(candidate, None, None)

    def warm_start(self, key: str, foreign: list[ForeignTrial]) -> WarmStart:
        """Use trials of other tasks where they help this one; takes some 20 ms each, for up to 256."""
        task = self._tasks[key]
        if self._tuner == "grid" or not foreign:
            return WarmStart(0, len(foreign), None, 0, "grid tries everything" if foreign else "there are none")
        task.foreign = Foreign(task.history, foreign, self._spaces, self._loss, self._seed)
        return task.foreign.report

    def remarks(self, key: str) -> list[str]:
        """Return and clear a task's remarks, such as why it has no candidates."""
        task = self._tasks[key]
        remarks, task.remarks = task.remarks, []
        return remarks

    def propose(self, key: str, count: int) -> tuple[list[Candidate], bool]:
        """Propose up to `count` new candidates; also say whether the space is exhausted."""
        task = self._tasks[key]
        if task.exhausted:
            return [], True
        history = task.history
        found = self._try_first(task, count - count // 2)  # the rest explores
        if len(found) < count:
            names = {each.hash for each in found}
            search = getattr(self, TUNERS[self._tuner])
            found += [each for each in search(key, task, count) if each.hash not in names][: count - len(found)]
        if not found and (self._tuner == "grid" or strategies.space_size(history) <= strategies.SMALL_SPACE):
            found = strategies.list_new(history, count)
        candidates = [history.space.describe(each) for each in found]
        history.begin(found)
        history.space.release()
        task.exhausted = not found
        return candidates, task.exhausted

    def observe(self, key: str, results: list[tuple[str, float | None]]) -> None:
        """Learn from (candidate hash, median latency in seconds, or None for the candidate's fault)."""
        for candidate, latency_s in results:
            self._tasks[key].history.end(candidate, latency_s)

    def forget(self, key: str, candidate: str) -> None:
        """Drop a proposed candidate that will not be measured."""
        self._tasks[key].history.forget(candidate)

    def replay(self, key: str, trace_json: str) -> str:
        """Return the scheduled function of a candidate's trace in TVM's JSON. Raises InternalError."""
        return self._tasks[key].history.space.replay(trace_json)

    def _try_first(self, task: _Task, count: int) -> list[Evaluated]:
        """Return the best new schedules of other tasks' trials.

        Where there is a prediction, its best comes first: it knows this core.
        """
        if task.foreign is None or not task.foreign.first:
            return []
        space = task.history.space
        found = space.evaluate([(genome, 0) for genome in [*space.ranked[:1], *task.foreign.first]])
        return list({e.hash: e for e in found if e is not None and task.history.is_new(e)}.values())[:count]

    def enumerate(self, _: str, task: _Task, count: int) -> list[Evaluated]:
        return strategies.list_new(task.history, count)

    def draw(self, _: str, task: _Task, count: int) -> list[Evaluated]:
        return strategies.draw_new(task.history, count)

    def descend(self, _: str, task: _Task, count: int) -> list[Evaluated]:
        return strategies.descend(task.history, count, _WARMUP)

    def evolve(self, key: str, task: _Task, count: int) -> list[Evaluated]:
        if len(task.history.results) < _WARMUP:
            return strategies.draw_promising(task.history, count, self._correct(key, task))
        return strategies.evolve_measured(task.history, count, self._population)

    def learn(self, key: str, task: _Task, count: int) -> list[Evaluated]:
        history, trees, promising = task.history, self._train(key, task), self._correct(key, task)
        if trees is None:
            return strategies.draw_promising(history, count, promising)

        def score(features: Sequence[Features]) -> Floats:
            known = [with_traits(each, history.traits) for each in features]
            return np.array([each.score(known) for each in trees])

        # Foreign results lead only to known schedules, so half of the first proposals are the task's own. The corrected
        # prediction keeps its half: it learns the core from fewer trials than the trees.
        if promising is not None:
            drawn = strategies.draw_promising(history, (count + history.step % 2) // 2, promising)
        elif len(history.results) < _WARMUP:
            drawn = strategies.draw_promising(history, count - count // 2)
        else:
            drawn = []
        hints, names = self._hints(key, task), {each.hash for each in drawn}
        size, rounds, left = self._population, self._generations, count - len(drawn)
        return [*drawn, *strategies.evolve_predicted(history, left, score, size, rounds, hints, promising, names)]

    def _correct(self, key: str, task: _Task) -> Iterator[Genome] | None:
        """Return schedules by the prediction corrected with trials on this core, the best first.

        None where there is no prediction, no trial of its family on this core, or no schedule left.
        """
        history, plans, rows = task.history, task.history.space.plans, task.history.space.rows
        if plans is None:
            return None
        same = [other.history for other in self._others(key, task) if other.core == task.core]
        lessons = [lesson for each in [history, *same] if (lesson := each.lesson()) is not None]
        lessons += task.foreign.list_corrections(*task.core) if task.foreign else []
        correction = Correction(lessons, history.name, plans)
        known = {rows[each.genome] for each in history.results.values() if each.genome in rows}
        under_way = [rows[each.genome] for each in history.open.values() if each.genome in rows]
        if not correction.count or len(known) + len(under_way) >= len(rows):
            return None
        # The default schedule is always measured first.
        first = [0] if 0 not in known and 0 not in under_way else []
        order = itertools.chain(first, correction.order(known, [*under_way, *first]))
        return (history.space.ranked[row] for row in order)

    def _train(self, key: str, task: _Task) -> list[Trees] | None:
        """Return the cost models of a task, retrained after new results; None while there are too few."""
        foreign = task.foreign.lessons() if task.foreign else []
        others = self._others(key, task)
        similar = sum(len(other.history.results) for other in others if other.kind == task.kind)
        if len(task.history.results) < _WARMUP and similar < _WARMUP_OTHERS and not foreign:
            return None
        state = (len(task.history.results), *(len(other.history.results) for other in others), len(foreign))
        if task.trained is None or task.trained[0] != state:
            features, latencies = task.history.lessons()
            groups = [SampleGroup(features, latencies)] if features else []
            left = _MOST_OTHERS
            for other in others:
                if left <= 0:
                    break
                features, latencies = other.history.lessons()
                if features:
                    left -= len(features)
                    groups.append(SampleGroup(features, latencies, self._weight(task, other)))
            taught = [groups if member % 2 and groups else [*groups, *foreign] for member in range(_COMMITTEE)]
            task.trained = (
                state,
                [
                    Trees(each, self._loss, self._seed + member, self._threads, resampled=True)
                    for member, each in enumerate(taught)
                ],
            )
        return task.trained[1]

    def _others(self, key: str, task: _Task) -> list[_Task]:
        """List the other tasks with results, the most similar first, in a stable order."""
        others = [(name, other) for name, other in self._tasks.items() if name != key and other.history.results]
        similar = sorted(others, key=lambda item: (-self._weight(task, item[1]), item[1].kind != task.kind, item[0]))
        return [other for _, other in similar]

    @staticmethod
    def _weight(task: _Task, other: _Task) -> float:
        same = other.history.space.structure == task.history.space.structure
        return _WEIGHT_SAME if same else _WEIGHT_OTHER

    def _hints(self, key: str, task: _Task) -> list[Genome]:
        """List the best schedules of the same function on other board types and at other operating points."""
        knobs = task.history.space.knobs
        genomes = list(task.foreign.first) if task.foreign else []
        for other in self._others(key, task):
            if other.history.space.structure == task.history.space.structure and other.history.space.knobs == knobs:
                genomes += [result.genome for result in other.history.fastest(2)]
        return genomes
