"""The tuners `random`, `ga`, `xgb`, `droplet` and `grid`, and the warm-up phase that all but `grid` share.

Each is a function of a task's history, the cost model and the count; the scheduler chooses among tasks.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from farm.errors import UsageError
from farm.search.tuners.cost_model import Features, Floats, measure_vectors
from farm.search.tuners.decisions import Genome, count_decisions, cross, distance, list_decisions, mutate, neighbours
from farm.search.tuners.history import TaskHistory
from farm.search.tuners.schedule_space import Evaluated

# One row of scores per model of a committee.
Score = Callable[[Sequence[Features]], Floats]
_Each = TypeVar("_Each")

# Spaces up to this size are enumerated once random draws find nothing new; evaluating a schedule takes 10-30 ms.
SMALL_SPACE = 256
# Draws without a new schedule before giving up.
_MOST_BARREN = 48
# The best measured and best predicted schedules that have offspring.
_PARENTS, _PARENTS_EACH = 16, 4
_CROSSED = 0.3
# During warm-up: random schedules of which the one with the longest vectors is tried; one in so many is arbitrary.
_DRAWN_EACH, _ANY_EVERY = 4, 4
# Probability of a random choice from the pool; then, of one a decision away from the best; otherwise, sample size for
# the longest vectors. How many of a model's best are searched for one that differs from those chosen by more than
# `_ALIKE` decisions.
_AT_RANDOM, _NEAR, _SAMPLED, _LOOKED_AT, _ALIKE = 0.15, 0.5, 8, 64, 1
# With a prediction, the model chooses among this many times the batch size of its next best.
_RANKED_AHEAD = 4
# Best predicted schedules that are searched for diverse ones during warm-up.
_LOOKED_AT_FIRST = 48
# One candidate in so many is of a sketch tried less often than `_SELDOM`, or within `_AS_GOOD` of the best: a model
# that knows one sketch cannot rank the others.
_NEGLECTED_EVERY, _SELDOM, _AS_GOOD = 3, 12, 1.2
# The best schedules that `droplet` descends from, one after the other.
_ORIGINS = 8
# Enumerating evaluates each schedule, at 10-30 ms; a larger grid is not useful.
LIMIT = 4096


def draw_new(history: TaskHistory, count: int) -> list[Evaluated]:
    """Return new random schedules; fewer where the space is exhausted."""
    return take_new(history, count, (history.draw(index) for index in range(history.step, history.step + 2**20)))


def draw_promising(history: TaskHistory, count: int, promising: Iterator[Genome] | None = None) -> list[Evaluated]:
    """Return candidates for the warm-up: the next `promising` ones, if given.

    Else the best predicted ones, half of them diverse. Without a prediction, random schedules with long vectors,
    sketches in turn, and some arbitrary ones for the model to learn from.
    """
    if promising is not None:
        return take_new(history, count, ((genome, 0) for genome in promising), patience=math.inf)
    if history.space.ranked:
        return _draw_predicted(history, count)
    drawn = draw_new(history, _DRAWN_EACH * count)
    rows: dict[int, list[Evaluated]] = {}
    for each in sorted(drawn, key=lambda each: -measure_vectors(each.features)):
        rows.setdefault(each.genome.sketch, []).append(each)
    turns = _in_turns(rows[sketch] for sketch in sorted(rows))
    found = list(itertools.islice(turns, count - count // _ANY_EVERY))
    names = {each.hash for each in found}
    return [*found, *(each for each in drawn if each.hash not in names)][:count]


def _draw_predicted(history: TaskHistory, count: int) -> list[Evaluated]:
    """Return the best predicted new ones; every second differs from all before it in several decisions."""
    known, left = history.list_genomes(), history.space.ranked[:_LOOKED_AT_FIRST]
    order: list[Genome] = []
    for turn in range(len(left)):
        before = [*known, *order]
        apart = (g for g in left if all(distance(g, other) > _ALIKE for other in before))
        chosen = left[0] if turn % 2 == 0 else next(apart, left[0])
        left.remove(chosen)
        order.append(chosen)
    rest = history.space.ranked[_LOOKED_AT_FIRST:]
    return take_new(history, count, ((genome, 0) for genome in [*order, *rest]))


def list_new(history: TaskHistory, count: int) -> list[Evaluated]:
    """`grid`: return the first new schedules of the space in a fixed order; none when all were proposed."""
    return take_new(history, count, list_space(history), patience=math.inf)


def list_space(history: TaskHistory) -> Iterator[tuple[Genome, int]]:
    """Yield all schedules: by prediction, else sketches in turn."""
    if history.space.ranked:
        return ((genome, 0) for genome in history.space.ranked)
    lists = [
        (Genome(sketch, decisions) for decisions in list_decisions(history.space.knobs[sketch]))
        for sketch in history.space.drawn
    ]
    return ((genome, 0) for genome in _in_turns(lists))


def _in_turns(rows: Iterable[Iterable[_Each]]) -> Iterator[_Each]:
    """Yield the first of each row, then the second of each, and so on."""
    return (each for several in itertools.zip_longest(*rows) for each in several if each is not None)


def space_size(history: TaskHistory) -> int:
    """Bound the number of schedules."""
    return len(history.space.ranked) or sum(count_decisions(history.space.knobs[each]) for each in history.space.drawn)


def take_new(
    history: TaskHistory, count: int, source: Iterable[tuple[Genome, int]], patience: float = _MOST_BARREN
) -> list[Evaluated]:
    """Return up to `count` new schedules of a source; give up after `patience` known ones."""
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
    """`ga`: mutate and cross the fastest measured schedules; uses no model."""
    parents = [result.genome for result in history.fastest(max(2, population // 4))]
    if len(parents) < 2:
        return draw_new(history, count)
    rng = history.chance("ga", history.step)

    def offspring() -> Iterator[tuple[Genome, int]]:
        # Linear ranking: the fastest is about twice as likely as the median.
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
    history: TaskHistory,
    count: int,
    score: Score,
    population: int,
    generations: int,
    hints: Sequence[Genome] = (),
    promising: Iterator[Genome] | None = None,
    taken: Collection[str] = (),
) -> list[Evaluated]:
    """`xgb`: the cost models' best of random schedules, neighbours of the best measured, and their offspring.

    `hints` are good schedules of other tasks and join the parents. The next `promising` ones replace random ones.
    Hashes in `taken` are already in the batch.
    """
    pool: dict[str, Evaluated] = {}
    scores: dict[str, Floats] = {}
    if history.space.ranked:  # the prediction already has the best near its top, so no generations are needed
        population, generations = _RANKED_AHEAD * count, 0

    def add(genomes: Iterable[tuple[Genome, int]]) -> None:
        fresh = {e.hash: e for e in history.space.evaluate(list(genomes)) if e and e.hash not in pool}
        if fresh:
            values = score([each.features for each in fresh.values()])
            pool.update(fresh)
            scores.update(zip(fresh, values.T, strict=True))

    measured = [result.genome for result in history.fastest(_PARENTS)]
    add((genome, 0) for genome in [*measured, *hints])
    ahead = list(itertools.islice(promising or (), population // 2))
    add((genome, 0) for genome in ahead)
    # A sliding window over one sequence of random schedules, most of which is cached.
    add(history.draw(index) for index in range(history.step, history.step + population // 2 - len(ahead)))
    for genome in measured[:2]:
        add((each, 0) for row in neighbours(genome, history.space.knobs[genome.sketch]) for each in row)
    for generation in range(generations):
        ranked = sorted(pool.values(), key=lambda each: -float(scores[each.hash].mean()))
        best = [each.genome for each in ranked[:_PARENTS]]
        for sketch in range(len(history.space.knobs)):
            best += [each.genome for each in ranked if each.genome.sketch == sketch][:_PARENTS_EACH]
        add(_offspring(history, [*dict.fromkeys([*best, *measured])], population // 2, generation))
    fresh = [each for each in pool.values() if history.is_new(each) and each.hash not in taken]
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
    history: TaskHistory, fresh: Sequence[Evaluated], scores: Mapping[str, Floats], count: int
) -> list[Evaluated]:
    """Choose the best by each model in turns, with distances of several decisions within a batch.

    Now and then choose the best of a neglected sketch, or an arbitrary one.
    """
    rng = history.chance("pick", history.step)
    left = {each.hash: each for each in sorted(fresh, key=lambda each: each.hash)}
    tried = collections.Counter(genome.sketch for genome in history.list_genomes())
    chosen: list[Evaluated] = []
    while left and len(chosen) < count:
        turn = history.step + len(chosen)
        sketch = _find_neglected(history, tried) if turn % _NEGLECTED_EVERY == 0 else None
        group = [each for each in left.values() if each.genome.sketch == sketch] or list(left.values())
        if rng.random() < _AT_RANDOM:
            best = history.fastest(1)
            near = [e for e in group if best and distance(e.genome, best[0].genome) == 1]
            if near and rng.random() < _NEAR:
                found = rng.choice(near)
            else:  # the models may know only the neighbourhood of the best
                some = rng.sample(group, min(_SAMPLED, len(group)))
                found = max(some, key=lambda each: measure_vectors(each.features))
        else:
            member = turn % len(scores[group[0].hash])
            ranked = sorted(group, key=lambda each: -float(scores[each.hash][member]))
            apart = (e for e in ranked[:_LOOKED_AT] if all(distance(e.genome, c.genome) > _ALIKE for c in chosen))
            found = next(apart, ranked[0])
        tried[found.genome.sketch] += 1
        chosen.append(left.pop(found.hash))
    return chosen


def _find_neglected(history: TaskHistory, tried: Mapping[int, int]) -> int | None:
    """Return the least tried sketch among those seldom tried or nearly as good as the best."""
    best: dict[int, float] = {}
    for result in history.fastest(len(history.results)):
        best.setdefault(result.genome.sketch, result.latency_s or 0.0)
    if not best:
        return None
    limit_s = _AS_GOOD * min(best.values())
    sketches = history.space.drawn
    alive = [each for each in sketches if tried.get(each, 0) < _SELDOM or best.get(each, math.inf) <= limit_s]
    return min(alive, key=lambda each: tried.get(each, 0)) if alive else None


def descend(history: TaskHistory, count: int, first: int) -> list[Evaluated]:
    """`droplet`: new neighbours of the best measured schedule, then of the next best, finally random ones.

    The first `first` candidates are promising ones.
    """
    if history.step < first or not history.fastest(1):
        return draw_promising(history, count)
    found = take_new(history, count, _steps(history), patience=float("inf"))
    if len(found) < count:
        names = {each.hash for each in found}
        found += [each for each in draw_new(history, count) if each.hash not in names][: count - len(found)]
    return found


def _steps(history: TaskHistory) -> Iterator[tuple[Genome, int]]:
    best = [result.genome for result in history.fastest(_ORIGINS)]
    for origin, before in itertools.zip_longest(best, best[1:2]):
        if origin is None:
            return
        rows = neighbours(origin, history.space.knobs[origin.sketch])
        # The last change is likely to lead further.
        start = _changed(origin, before) if before is not None else 0
        for row in [*rows[start:], *rows[:start]]:
            yield from ((genome, 0) for genome in row)


def _changed(genome: Genome, before: Genome) -> int:
    if genome.sketch != before.sketch:
        return 0
    pairs = enumerate(zip(genome.decisions, before.decisions, strict=True))
    return next((index for index, (now, then) in pairs if now != then), 0)


def check_size(history: TaskHistory) -> None:
    """Raise UsageError where the space is too large for `grid`."""
    size = space_size(history)
    if size > LIMIT:
        raise UsageError(
            f"{history.space.workload.name} has up to {size:,} schedules; tuner grid lists at most {LIMIT:,}",
            "Choose another tuner, or other operators with `ops`.",
        )
