"""Small steps of schedule families: lengths of vectors, shares of threads."""

from __future__ import annotations

from farm.search.cores import core_of
from farm.search.families import loops


def test_vectors_are_whole_or_have_few_parts() -> None:
    """A vector fills its lanes where it can; else the divisor that wastes the fewest of them is taken. 120 are 15
    vectors of 8 rather than 8 of 15, which are loaded in four parts; 38 have no such divisor. Its vectors are one
    choice in any case.
    """
    assert loops.vector_lengths(64, 16) == (16,)
    assert loops.vector_lengths(30, 4) == (15, 10)
    assert loops.vector_lengths(131, 16) == (1,)
    assert [loops.count_parts(length, 16) for length in (8, 15, 16, 24)] == [1, 4, 1, 2]
    assert loops.vector_lengths(120, 16) == (8, 12)
    assert loops.vector_lengths(38, 16)[0] == 38
    assert loops.row_lengths(96, 16, 4) == (12, 16, 32, 48, 1)
    assert loops.row_lengths(65, 16, 4) == (13, 1)
    assert loops.row_lengths(197, 16, 4) == (1,)


def test_runs_are_cut_between_steps_or_not_at_all() -> None:
    """56 x 56 x 64 is shared out by rows, never within one: 16 shares would end amid a row of the outermost loop. A
    thread's share is worth its start.
    """
    assert loops.pieces(1, (56, 56, 64), 2) == (14, 0)
    assert loops.pieces(1, (1 << 16,), 2) == (16, 0)
    assert loops.pieces(1, (100,), 4) == (0,)
    assert loops.pieces(50, (100,), 4) == (50, 0)
    assert loops.pieces(50, (100,), 1) == (0,)


def test_tiles_with_just_enough_sums_wait_for_more_of_a_stream() -> None:
    """Eight vector accumulators hide four cycles of two FMAs each, ten have one to spare; Arm is left."""
    zen = core_of({"mtriple": "x86_64-linux-gnu", "mcpu": "znver3"})
    nano = core_of({"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57"})
    exact = {"lanes": 8, "vectors": 4, "pixels": 2, "rows": 1}
    spare = exact | {"vectors": 2, "pixels": 5}
    assert loops.wait_share(zen, exact, 4) > loops.wait_share(zen, spare, 4) == zen.l2_wait
    assert loops.wait_share(nano, {"lanes": 4, "vectors": 1, "pixels": 4, "rows": 1}, 4) == nano.l2_wait
