"""Which of quickstart's programs is the one to ship."""

from __future__ import annotations

from farm.artifacts.timing import Timed
from farm.quickstart.run import choose_program


def _timed(**milliseconds: float) -> Timed:
    samples = {
        name: [value * 1e-3 * (1 + 0.001 * (at % 5)) for at in range(60)] for name, value in milliseconds.items()
    }
    return Timed(samples)


def test_tuned_code_is_shipped_unless_untried_code_is_surely_faster() -> None:
    """Only where the intervals part; where nothing else runs, the tuned code it is."""
    assert choose_program(_timed(tuned=3.0, predicted=3.5)) == "tuned"
    assert choose_program(_timed(tuned=3.0, predicted=3.0)) == "tuned"
    assert choose_program(_timed(tuned=3.5, predicted=3.0)) == "predicted"
    assert choose_program(_timed(tuned=3.5)) == "tuned"
