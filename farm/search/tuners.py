"""Which candidates of a task are tried next: `random`, `ga`, `xgb`, and the phase that all but `grid` begin with.

Each tuner is a function of a task's history, the cost model and the count. Decisions of whole campaigns, such as which
task is next, are not made here. `droplet` and `grid` have modules of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from farm.search.cost_model import Features, Floats
from farm.search.decisions import Genome, count_decisions, cross, list_decisions, mutate, neighbours
from farm.search.history import TaskHistory
from farm.search.schedule_space import Evaluated

Score = Callable[[Sequence[Features]], Floats]

# Spaces up to this size are listed to the end once chance finds nothing new; evaluating a schedule takes 10-30 ms.
SMALL_SPACE = 256
# Draws without anything new before chance is given up.
_MOST_BARREN = 48
# How many of the best measured and best predicted schedules have offspring.
_PARENTS = 16
_CROSSED = 0.3


def draw_new(history: TaskHistory, count: int) -> list[Evaluated]:
    """Random schedules that are new. Fewer, or none, where the space is used up."""
    return take_new(history, count, _draws(history))


def _draws(history: TaskHistory) -> Iterator[tuple[Genome, int]]:
    yield from (history.draw(index) for index in range(history.step, history.step + 2**20))


def list_new(history: TaskHistory, count: int) -> list[Evaluated]:
    """The first schedules of the space, in a fixed order, that are new."""
    return take_new(history, count, list_space(history), patience=math.inf)


def list_space(history: TaskHistory) -> Iterator[tuple[Genome, int]]:
    """All schedules, sketches in turns."""
    lists = [
        (Genome(sketch, decisions) for decisions in list_decisions(knobs))
        for sketch, knobs in enumerate(history.space.knobs)
    ]
    for row in itertools.zip_longest(*lists):
        yield from ((genome, 0) for genome in row if genome is not None)


def space_size(history: TaskHistory) -> int:
    """At most how many schedules there are."""
    return sum(map(count_decisions, history.space.knobs))


def take_new(
    history: TaskHistory, count: int, source: Iterable[tuple[Genome, int]], patience: float = _MOST_BARREN
) -> list[Evaluated]:
    """Up to `count` new ones from a row of schedules, given up after so many (`patience`) that are not."""
    found: dict[str, Evaluated] = {}
    barren = 0
    remaining = iter(source)
    while len(found) < count and barren < patience:
        batch = list(itertools.islice(remaining, count))
        if not batch:
            break
        new = {e.hash: e for e in history.space.evaluate(batch) if e and history.is_new(e) and e.hash not in found}
        barren = 0 if new else barren + len(batch)
        found |= new
    return list(found.values())[:count]


def evolve_measured(history: TaskHistory, count: int, population: int) -> list[Evaluated]:
    """`ga`: offspring of the fastest measured schedules, by mutation and crossing; no model."""
    parents = [result.genome for result in history.fastest(max(2, population // 4))]
    if len(parents) < 2:
        return draw_new(history, count)
    rng = history.chance("ga", history.step)

    def offspring() -> Iterator[tuple[Genome, int]]:
        # A linear ranking: the fastest is about twice as likely as the middle one.
        weights = range(len(parents), 0, -1)
        for _ in range(64 * count):
            first, second = rng.choices(parents, weights, k=2)
            child = first
            if first.sketch == second.sketch and rng.random() < _CROSSED:
                child = cross(first, second, rng)
            if mutated := mutate(child, history.space.knobs[child.sketch], rng):
                yield mutated, rng.randrange(2**30)

    found = take_new(history, max(1, count - count // 8), offspring())
    names = {each.hash for each in found}
    drawn = [each for each in draw_new(history, count) if each.hash not in names]
    return (found + drawn)[:count]


def evolve_predicted(
    history: TaskHistory, count: int, score: Score, population: int, generations: int, hints: Sequence[Genome] = ()
) -> list[Evaluated]:
    """`xgb`: the best by the cost model of random schedules, neighbours of the best measured, and their offspring.

    `hints` are schedules that did well elsewhere; they join the parents.
    """
    pool: dict[str, Evaluated] = {}
    scores: dict[str, float] = {}

    def add(genomes: Iterable[tuple[Genome, int]]) -> None:
        fresh = {e.hash: e for e in history.space.evaluate(list(genomes)) if e and e.hash not in pool}
        if fresh:
            values = score([each.features for each in fresh.values()])
            pool.update(fresh)
            scores.update(zip(fresh, map(float, values), strict=True))

    measured = [result.genome for result in history.fastest(_PARENTS)]
    add((genome, 0) for genome in [*measured, *hints])
    # A window that slides over one endless row of random schedules: most of it is remembered from the last time.
    add(history.draw(index) for index in range(history.step, history.step + population // 2))
    for genome in measured[:2]:
        add((each, 0) for row in neighbours(genome, history.space.knobs[genome.sketch]) for each in row)
    for generation in range(generations):
        ranked = sorted(pool.values(), key=lambda each: -scores[each.hash])
        best = [each.genome for each in ranked[:_PARENTS]]
        add(_offspring(history, [*dict.fromkeys([*best, *measured])], population // 2, generation))
    fresh = [each for each in pool.values() if history.is_new(each)]
    return _pick(history, fresh, scores, count)


def _offspring(
    history: TaskHistory, parents: Sequence[Genome], count: int, generation: int
) -> Iterator[tuple[Genome, int]]:
    rng = history.chance("offspring", history.step, generation)
    weights = [1 / (2 + rank) for rank in range(len(parents))]
    for _ in range(count if parents else 0):
        parent = rng.choices(parents, weights)[0]
        child = mutate(parent, history.space.knobs[parent.sketch], rng)
        if child is not None:
            yield child, rng.randrange(2**30)


def _pick(
    history: TaskHistory, fresh: Sequence[Evaluated], scores: dict[str, float], count: int, at_random: float = 0.1
) -> list[Evaluated]:
    """The best by score, and now and then another one."""
    rng = history.chance("pick", history.step)
    ranked = sorted(fresh, key=lambda each: (-scores[each.hash], each.hash))
    chosen: list[Evaluated] = []
    while ranked and len(chosen) < count:
        index = int(rng.randrange(len(ranked))) if rng.random() < at_random else 0
        chosen.append(ranked.pop(index))
    return chosen
