"""A search's plain data: tasks and candidates that travel between processes, and the decisions of one schedule.

Decisions of a sketch are numbers: mutation, crossover, enumeration, fitting to other sizes. `schedule_space` knows what
one means and whether it is valid. Imports no TVM.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from farm.inventory.core_types import find_core_type
from farm.values import Workload

# Tile sizes from the outermost to the innermost loop; the index of an option; the place of a block (-1: the root, -2:
# inlined, else the index of a loop). None: TVM draws it.
Decision = tuple[int, ...] | int | None
# More loops than any block of MetaSchedule's CPU rules has.
_MOST_PLACES = 16


@dataclasses.dataclass(frozen=True)
class Traits:
    """A CPU at an operating point; zero stands for unknown.

    `cores` run a candidate. Caches are per core (`l1_bytes`, data) or per cluster (`l2_bytes`, `l3_bytes`).
    """

    cores: int = 0
    cpu_freq_hz: float = 0.0
    memory_freq_hz: float = 0.0
    vector_bits: int = 0
    l1_bytes: int = 0
    l2_bytes: int = 0
    l3_bytes: int = 0

    def to_vector(self) -> tuple[float, ...]:
        """Return the traits as features: log2, since ratios matter; unknown is 0."""
        return tuple(math.log2(value) if value > 0 else 0.0 for value in dataclasses.astuple(self))


def derive_traits(
    target: Mapping[str, Any], cores: int | None = None, cpu_freq_hz: float = 0.0, memory_freq_hz: float = 0.0
) -> Traits:
    """Derive traits from TVM's target in dict form and the clocks of the operating point, 0 where unknown.

    `cores` is the number that runs a candidate where it is not all of the target's.
    """
    known = int(target.get("num-cores", 0)) if cores is None else cores
    machine = str(target.get("mtriple", "")).partition("-")[0]
    kind = find_core_type(str(target.get("mcpu", "")), machine)
    if kind is None:
        return Traits(known, cpu_freq_hz, memory_freq_hz)
    return Traits(known, cpu_freq_hz, memory_freq_hz, kind.vector_bits, kind.l1_bytes, kind.l2_bytes, kind.l3_bytes)


@dataclasses.dataclass(frozen=True)
class SearchTask:
    """A workload for boards of one type at one operating point, with the `traits` of both."""

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
class Candidate:
    """One scheduled version of a workload.

    `arguments` are the (shape, dtype) of its function's arguments; a weight that the schedule packs has its packed
    shape. `hash` is over the scheduled function, so two traces that give the same code are one candidate. `trace_json`
    replays it; `module_json` is the scheduled function, ready to build.
    """

    workload: str
    hash: str
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    trace_json: str = dataclasses.field(repr=False)
    module_json: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A loop of `extent` split into `parts`; the innermost one at most `innermost_limit`."""

    extent: int
    parts: int
    innermost_limit: int


@dataclasses.dataclass(frozen=True)
class ScheduleChoice:
    """One of `options` options."""

    options: int


@dataclasses.dataclass(frozen=True)
class SchedulePlace:
    """Where a block is computed; the number of loops depends on other decisions."""


Knob = Tile | ScheduleChoice | SchedulePlace


@dataclasses.dataclass(frozen=True)
class Genome:
    """One schedule: the index of its sketch and a decision per knob."""

    sketch: int
    decisions: tuple[Decision, ...]

    def replaced(self, knob: int, decision: Decision) -> Genome:
        """Return a copy with another decision."""
        return Genome(self.sketch, (*self.decisions[:knob], decision, *self.decisions[knob + 1 :]))


# Mutation odds. MetaSchedule's (0.9, 0.06, 0.04) suit thousands of trials: with them, searches of 64 trials kept their
# initial unrolling and places.
_ODDS = {Tile: 0.7, SchedulePlace: 0.15, ScheduleChoice: 0.15}


def mutate(genome: Genome, knobs: Sequence[Knob], rng: random.Random) -> Genome | None:
    """Change one decision at random; None where nothing can change."""
    by_kind: dict[type, list[int]] = {}
    for index, knob in enumerate(knobs):
        if not isinstance(knob, Tile) or (knob.extent > 1 and knob.parts > 1):
            by_kind.setdefault(type(knob), []).append(index)
    if not by_kind:
        return None
    kind = rng.choices(list(by_kind), [_ODDS[each] for each in by_kind])[0]
    if kind is Tile:  # loops with more tilings are changed more often
        weights = [math.log(count_tilings(knobs[i])) for i in by_kind[kind]]  # type: ignore[arg-type]
        index = rng.choices(by_kind[kind], weights)[0]
    else:
        index = rng.choice(by_kind[kind])
    knob, now = knobs[index], genome.decisions[index]
    if isinstance(knob, ScheduleChoice):
        others = [option for option in range(knob.options) if option != now]
        return genome.replaced(index, rng.choice(others)) if others else None
    if isinstance(knob, SchedulePlace) or not isinstance(now, tuple):
        return genome.replaced(index, None)
    moves = list(_moves(knob, now, every_divisor=True))
    return genome.replaced(index, rng.choice(moves)) if moves else None


def distance(left: Genome, right: Genome) -> int:
    """Count the decisions in which two schedules differ; larger than any count where their sketches differ."""
    if left.sketch != right.sketch:
        return len(left.decisions) + len(right.decisions)
    return sum(mine != other for mine, other in zip(left.decisions, right.decisions, strict=True))


def cross(left: Genome, right: Genome, rng: random.Random) -> Genome:
    """Take each decision from either of two schedules of the same sketch."""
    return Genome(left.sketch, tuple(rng.choice(pair) for pair in zip(left.decisions, right.decisions, strict=True)))


def neighbours(genome: Genome, knobs: Sequence[Knob]) -> list[list[Genome]]:
    """List per knob the schedules one step away: a prime factor moved, the next option, the next loop."""
    found = []
    for index, (knob, now) in enumerate(zip(knobs, genome.decisions, strict=True)):
        steps: Iterator[Decision]
        if isinstance(knob, Tile):
            steps = _moves(knob, now, every_divisor=False) if isinstance(now, tuple) else iter(())
        elif isinstance(now, int):
            last = knob.options - 1 if isinstance(knob, ScheduleChoice) else _MOST_PLACES
            first = 0 if isinstance(knob, ScheduleChoice) else -2
            steps = (step for step in (now - 1, now + 1) if first <= step <= last)
        else:
            steps = iter(())
        found.append([genome.replaced(index, step) for step in steps])
    return found


def _moves(knob: Tile, now: tuple[int, ...], every_divisor: bool) -> Iterator[tuple[int, ...]]:
    """Yield tilings with a factor (prime, or any) moved between loops."""
    for source, size in enumerate(now):
        factors = [f for f in _divisors(size) if f > 1] if every_divisor else tuple(_factorise(size))
        for factor, goal in itertools.product(factors, range(len(now))):
            if goal != source:
                moved = list(now)
                moved[source] //= factor
                moved[goal] *= factor
                if moved[-1] <= knob.innermost_limit:
                    yield tuple(moved)


def fit(decision: Decision, knob: Knob) -> Decision:
    """Fit a decision for another loop, number of options or block to this knob."""
    if isinstance(knob, ScheduleChoice):
        return min(decision, knob.options - 1) if isinstance(decision, int) and decision >= 0 else None
    if isinstance(knob, SchedulePlace):
        return decision if isinstance(decision, int) else None
    if not isinstance(decision, tuple) or len(decision) != knob.parts:
        return None
    left, sizes = knob.extent, []
    for position in range(knob.parts - 1, 0, -1):
        limit = knob.innermost_limit if position == knob.parts - 1 else left
        wanted = max(1, decision[position])
        nearest = min(
            (d for d in _divisors(left) if d <= limit), key=lambda d: (abs(math.log(d / wanted)), d), default=1
        )
        sizes.append(nearest)
        left //= nearest
    return (left, *reversed(sizes))


def count_tilings(knob: Tile) -> int:
    """Count the tilings of a loop, ignoring the limit of the innermost."""
    return math.prod(math.comb(power + knob.parts - 1, knob.parts - 1) for power in _factorise(knob.extent).values())


def count_decisions(knobs: Sequence[Knob]) -> int:
    """Bound the number of schedules of a sketch with these knobs."""
    counts = (
        count_tilings(k) if isinstance(k, Tile) else k.options if isinstance(k, ScheduleChoice) else _MOST_PLACES + 2
        for k in knobs
    )
    return math.prod(counts)


def list_decisions(knobs: Sequence[Knob]) -> Iterator[tuple[Decision, ...]]:
    """Yield every combination of decisions in a stable order; some are duplicates or invalid."""
    options: list[list[Decision]] = []
    for knob in knobs:
        if isinstance(knob, Tile):
            options.append([t for t in _tilings(knob.extent, knob.parts) if t[-1] <= knob.innermost_limit])
        else:
            options.append(list(range(knob.options) if isinstance(knob, ScheduleChoice) else range(-2, _MOST_PLACES)))
    return itertools.product(*options)


def _tilings(extent: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (extent,)
        return
    for size in _divisors(extent):
        for rest in _tilings(extent // size, parts - 1):
            yield (size, *rest)


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


@functools.cache
def _factorise(number: int) -> dict[int, int]:
    powers: dict[int, int] = {}
    factor = 2
    while factor * factor <= number:
        while number % factor == 0:
            powers[factor] = powers.get(factor, 0) + 1
            number //= factor
        factor += 1
    if number > 1:
        powers[number] = powers.get(number, 0) + 1
    return powers
