"""Plans in words."""

from __future__ import annotations

from farm.search.families.family import describe_plan


def test_plans_are_told_in_words() -> None:
    """Tiles, vectors, threads and what is off; an unknown option is named."""
    dense = {"lanes": 4, "vectors": 3, "pixels": 4, "rows": 2, "order": 1, "pad": 1, "steps": 1}
    assert describe_plan("dense", dense) == "2x4 pixels by 3 vectors of 4, channels outside, padded by rows"
    tiles = {"wide": 16, "channels": 4, "far": 8, "columns": 4, "steps": 8}
    assert describe_plan("gpu-tiles", tiles) == "16x8 threads, 4 channels by 4 pixels each, 8 reduction steps at once"
    assert (
        describe_plan("depthwise", {"lanes": 4, "unroll": 1, "pad": 3})
        == "vectors of 4, kernel unrolled, read in place"
    )
    assert describe_plan("elementwise", {"pieces": 0, "write": 1}) == "one thread"
    assert describe_plan("new", {"knob": 7}) == "knob 7"
