"""Decisions of schedules as plain numbers: changes stay within the loops, lists are complete, sizes are fitted."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.search.tuners.decisions import (
    Decision,
    Genome,
    Knob,
    ScheduleChoice,
    SchedulePlace,
    Tile,
    count_decisions,
    count_tilings,
    cross,
    fit,
    list_decisions,
    mutate,
    neighbours,
)

KNOBS: tuple[Knob, ...] = (Tile(48, 4, 16), Tile(7, 2, 64), ScheduleChoice(4), SchedulePlace())
GENOME = Genome(1, ((2, 3, 4, 2), (7, 1), 0, -1))


def is_whole(decision: Decision, knob: Knob) -> bool:
    if isinstance(knob, Tile):
        return (
            isinstance(decision, tuple)
            and math.prod(decision) == knob.extent
            and len(decision) == knob.parts
            and decision[-1] <= knob.innermost_limit
        )
    return decision is None or isinstance(decision, int)


@given(st.integers())
def test_a_mutant_differs_in_one_decision_and_is_whole(seed: int) -> None:
    """Tiles still multiply to the loop, the innermost stays within its limit, the sketch stays."""
    mutant = mutate(GENOME, KNOBS, random.Random(seed))
    changed = [i for i, pair in enumerate(zip(GENOME.decisions, mutant.decisions, strict=True)) if pair[0] != pair[1]]
    assert len(changed) == 1
    assert mutant.sketch == GENOME.sketch
    assert all(is_whole(d, k) for d, k in zip(mutant.decisions, KNOBS, strict=True))


def test_where_nothing_can_change_there_is_no_mutant() -> None:
    """A loop of one has a single tiling, and a function may have no decisions at all."""
    assert mutate(Genome(0, ()), (), random.Random(0)) is None
    assert mutate(Genome(0, ((1, 1),)), (Tile(1, 2, 64),), random.Random(0)) is None


def test_a_crossing_takes_each_decision_from_a_parent() -> None:
    """Nothing that neither parent has."""
    other = Genome(1, ((1, 1, 3, 16), (1, 7), 3, 2))
    child = cross(GENOME, other, random.Random(1))
    assert all(d in pair for d, *pair in zip(child.decisions, GENOME.decisions, other.decisions, strict=True))


def test_neighbours_are_one_step_away() -> None:
    """A prime factor moved, the next option, the next loop; by knob, all different, all whole."""
    rows = neighbours(GENOME, KNOBS)
    assert [len(row) for row in rows] == [12, 1, 1, 2]
    every = [genome for row in rows for genome in row]
    assert len(set(every)) == len(every)
    assert GENOME not in every
    for index, row in enumerate(rows):
        for genome in row:
            assert genome.replaced(index, GENOME.decisions[index]) == GENOME
            assert is_whole(genome.decisions[index], KNOBS[index])


@pytest.mark.parametrize(("extent", "parts", "count"), [(1, 4, 1), (7, 2, 2), (12, 2, 6), (16, 4, 35), (36, 3, 36)])
def test_tilings_are_counted_and_listed_alike(extent: int, parts: int, count: int) -> None:
    """Without a limit on the innermost loop, as many are listed as are counted, each once and whole."""
    knob = Tile(extent, parts, extent)
    listed = [tiling for (tiling,) in list_decisions((knob,))]
    assert len(listed) == len(set(listed)) == count == count_tilings(knob) == count_decisions((knob,))
    assert all(is_whole(tiling, knob) for tiling in listed)


def test_a_list_has_every_combination_in_the_same_order() -> None:
    """Products of the knobs; asked twice, the same."""
    knobs = (Tile(6, 2, 6), ScheduleChoice(3))
    first = list(list_decisions(knobs))
    assert len(set(first)) == len(first) == 12
    assert first == list(list_decisions(knobs))


@given(st.tuples(*[st.integers(1, 99)] * 4), st.sampled_from([1, 13, 48, 56, 224]), st.sampled_from([4, 64]))
def test_tiles_of_another_loop_are_fitted(decision: tuple[int, ...], extent: int, limit: int) -> None:
    """Any tiles of a schedule of another shape become tiles of this loop."""
    assert is_whole(fit(decision, knob := Tile(extent, 4, limit)), knob)


def test_a_fit_keeps_what_fits() -> None:
    """Equal loops keep their tiles; for another size the inner ones stay as near as they can, the outermost pays."""
    assert fit((2, 3, 4, 2), Tile(48, 4, 16)) == (2, 3, 4, 2)
    assert fit((2, 3, 4, 2), Tile(96, 4, 16)) == (4, 3, 4, 2)
    assert fit((1, 1, 1, 8), Tile(56, 4, 64)) == (7, 1, 1, 8)
    assert fit(5, ScheduleChoice(4)) == 3
    assert fit(-2, SchedulePlace()) == -2


@pytest.mark.parametrize("knob", [Tile(8, 2, 8), ScheduleChoice(2), SchedulePlace()])
def test_what_cannot_be_fitted_is_left_open(knob: Knob) -> None:
    """No decision, or one of another kind, is TVM's to draw."""
    assert fit(None, knob) is None
    assert fit((1, 2, 4), knob) is None
