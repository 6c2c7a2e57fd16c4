"""What is known of one task: what was measured, in order, and what is being measured.

The proposals of a search are a function of this and of its seed alone: a search that is started again and told the
same goes on as the first would have. Nothing here decides.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable

import numpy as np

from farm.search.tuners.correction import Lesson
from farm.search.tuners.cost_model import Features, Traits
from farm.search.tuners.decisions import Genome
from farm.search.tuners.schedule_space import Evaluated, ScheduleSpace

# Of each task so many teach, the fastest and the latest: more add little, and training is paid for every batch.
_TEACHING_BEST, _TEACHING_LATEST = 192, 64


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """A candidate that was measured; `latency_s` is None where it failed by its own fault."""

    hash: str
    genome: Genome
    latency_s: float | None


class TaskHistory:
    """A task's space, and what became of candidates in it. Not thread-safe."""

    def __init__(self, space: ScheduleSpace, traits: Traits, seed: int, name: str) -> None:
        """`name` tells the task from others in what chance gives it."""
        self.space = space
        self.traits = traits
        self.results: dict[str, TrialResult] = {}
        self.open: dict[str, Evaluated] = {}
        self._seen: set[str] = set()
        self.name = name
        self._lesson: tuple[int, Lesson | None] = (0, None)
        self._seed = f"{seed}/{name}"

    @property
    def step(self) -> int:
        """How far the search is: how many candidates are known or being measured."""
        return len(self.results) + len(self.open)

    def chance(self, *purpose: object) -> random.Random:
        """Random numbers that depend on the seed, the task and the purpose alone."""
        return random.Random("/".join([self._seed, *map(str, purpose)]))

    def draw(self, index: int) -> tuple[Genome, int]:
        """The `index`-th schedule that is drawn, for `ScheduleSpace.evaluate`.

        Where there is a prediction, the `index`-th best by it; else a random one, sketches taking turns.
        """
        if index < len(self.space.ranked):
            return self.space.ranked[index], 0
        sketch = self.space.drawn[index % len(self.space.drawn)]
        return self.space.undecided(sketch), self.chance("draw", index).randrange(2**30)

    def is_new(self, found: Evaluated) -> bool:
        """Whether its code was never proposed nor measured."""
        return found.hash not in self._seen

    def begin(self, found: Iterable[Evaluated]) -> None:
        """These go off to be measured."""
        for each in found:
            self._seen.add(each.hash)
            self.open[each.hash] = each

    def end(self, candidate: str, latency_s: float | None) -> None:
        """An open candidate was measured, or failed by its own fault; another one is not ours and ignored."""
        if found := self.open.pop(candidate, None):
            self.results[candidate] = TrialResult(candidate, found.genome, latency_s)

    def forget(self, candidate: str) -> None:
        """An open candidate will not be measured; it is not proposed again."""
        self.open.pop(candidate, None)

    def recall(self, candidate: str, genome: Genome | None, latency_s: float | None) -> None:
        """Know a result of an earlier run; without a genome (its trace fits no more) it is only not proposed again."""
        self._seen.add(candidate)
        if genome is not None and candidate not in self.results:
            self.results[candidate] = TrialResult(candidate, genome, latency_s)

    def fastest(self, count: int) -> list[TrialResult]:
        """The best so far, the fastest first; of equal ones the earlier."""
        good = [result for result in self.results.values() if result.latency_s is not None]
        return sorted(good, key=lambda result: result.latency_s or 0.0)[:count]

    def list_genomes(self) -> list[Genome]:
        """All schedules that were or are being measured."""
        return [*(each.genome for each in self.results.values()), *(each.genome for each in self.open.values())]

    def lesson(self) -> Lesson | None:
        """What the results say of the prediction; None where there is none, or nothing was measured of it."""
        plans, rows = self.space.plans, self.space.rows
        if plans is not None and self._lesson[0] != len(self.results):
            timed = [(rows.get(each.genome), each.latency_s) for each in self.results.values()]
            known = [(row, math.log2(latency_s)) for row, latency_s in timed if row is not None and latency_s]
            lesson = Lesson(self.name, plans, *zip(*known, strict=True)) if known else None
            self._lesson = len(self.results), lesson
        return self._lesson[1]

    def lessons(self) -> tuple[list[Features], list[float]]:
        """Features and latencies (infinite: its own fault) of what teaches the cost model."""
        chosen = list(self.results.values())
        if len(chosen) > _TEACHING_BEST + _TEACHING_LATEST:
            latest = chosen[-_TEACHING_LATEST:]
            names = {result.hash for result in [*self.fastest(_TEACHING_BEST), *latest]}
            chosen = [result for result in chosen if result.hash in names]
        found = self.space.evaluate([(result.genome, 0) for result in chosen])
        features, latencies = [], []
        for result, evaluated in zip(chosen, found, strict=True):
            if evaluated is not None and len(evaluated.features):
                features.append(with_traits(evaluated.features, self.traits))
                latencies.append(np.inf if result.latency_s is None else result.latency_s)
        return features, latencies


def with_traits(features: Features, traits: Traits) -> Features:
    """Features of each store, with those of the board beside them."""
    beside = np.tile(np.array(traits.to_vector(), "float32"), (len(features), 1))
    return np.hstack([features, beside])
