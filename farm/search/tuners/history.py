"""The history of one task: results in order, and candidates being measured.

The proposals of a search depend only on this and its seed, so a restarted search continues identically.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable

import numpy as np

from farm.search.tuners.cost_model import Features, Lesson
from farm.search.tuners.decisions import Genome, Traits
from farm.search.tuners.schedule_space import Evaluated, ScheduleSpace

# Candidates of a task that train the model, the fastest and the latest: more add little and slow every batch.
_TEACHING_BEST, _TEACHING_LATEST = 192, 64


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """A measured candidate; `latency_s` is None where it failed by its own fault."""

    hash: str
    genome: Genome
    latency_s: float | None


class TaskHistory:
    """A task's space and the results in it. Not thread-safe."""

    def __init__(self, space: ScheduleSpace, traits: Traits, seed: int, name: str) -> None:
        """`name` seeds the task's random numbers and identifies it."""
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
        """The number of candidates that are known or being measured."""
        return len(self.results) + len(self.open)

    def chance(self, *purpose: object) -> random.Random:
        """Return random numbers that depend only on the seed, the task and the purpose."""
        return random.Random("/".join([self._seed, *map(str, purpose)]))

    def draw(self, index: int) -> tuple[Genome, int]:
        """Return the `index`-th schedule for `ScheduleSpace.evaluate`: by prediction, else random, sketches in turn."""
        if index < len(self.space.ranked):
            return self.space.ranked[index], 0
        sketch = self.space.drawn[index % len(self.space.drawn)]
        return self.space.undecided(sketch), self.chance("draw", index).randrange(2**30)

    def is_new(self, found: Evaluated) -> bool:
        """Say whether the code was never proposed or measured."""
        return found.hash not in self._seen

    def begin(self, found: Iterable[Evaluated]) -> None:
        """Mark candidates as being measured."""
        for each in found:
            self._seen.add(each.hash)
            self.open[each.hash] = each

    def end(self, candidate: str, latency_s: float | None) -> None:
        """Record the result of an open candidate; ignore any other."""
        if found := self.open.pop(candidate, None):
            self.results[candidate] = TrialResult(candidate, found.genome, latency_s)

    def forget(self, candidate: str) -> None:
        """Drop an open candidate; it is not proposed again."""
        self.open.pop(candidate, None)

    def recall(self, candidate: str, genome: Genome | None, latency_s: float | None) -> None:
        """Add an earlier result; without a genome (its trace no longer fits) it is only not proposed again."""
        self._seen.add(candidate)
        if genome is not None and candidate not in self.results:
            self.results[candidate] = TrialResult(candidate, genome, latency_s)

    def fastest(self, count: int) -> list[TrialResult]:
        """List the fastest results, ties in order of time."""
        good = [result for result in self.results.values() if result.latency_s is not None]
        return sorted(good, key=lambda result: result.latency_s or 0.0)[:count]

    def list_genomes(self) -> list[Genome]:
        """List all schedules that were or are being measured."""
        return [*(each.genome for each in self.results.values()), *(each.genome for each in self.open.values())]

    def lesson(self) -> Lesson | None:
        """Return the results as a lesson on the prediction; None without a prediction or results."""
        plans, rows = self.space.plans, self.space.rows
        if plans is not None and self._lesson[0] != len(self.results):
            timed = [(rows.get(each.genome), each.latency_s) for each in self.results.values()]
            known = [(row, math.log2(latency_s)) for row, latency_s in timed if row is not None and latency_s]
            lesson = Lesson(self.name, plans, *zip(*known, strict=True)) if known else None
            self._lesson = len(self.results), lesson
        return self._lesson[1]

    def lessons(self) -> tuple[list[Features], list[float]]:
        """Return features and latencies (infinite: its own fault) that train the cost model."""
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
    """Append a board's traits to the features of each store."""
    beside = np.tile(np.array(traits.to_vector(), "float32"), (len(features), 1))
    return np.hstack([features, beside])
