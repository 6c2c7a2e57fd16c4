"""Spans of time on the command line."""

from __future__ import annotations

import pytest

from farm.cli.options import read_duration_s
from farm.errors import UsageError
from farm.units import format_percent


def test_a_ratio_says_as_long_and_not_longer() -> None:
    """Six times as long is five times longer."""
    said = [format_percent(ratio, "longer", "shorter", "no longer") for ratio in (0.62, 1.0, 1.38, 6.03)]
    assert said == ["38 % shorter", "no longer", "38 % longer", "6.03 times as long"]
    assert format_percent(2.5, "more energy", "less energy", "the same energy") == "2.50 times as much energy"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("10 m", 600), ("500ms", 0.5), ("100us", 1e-4), ("2 µs", 2e-6)]
)
def test_spans_of_time_are_read_as_people_type_them(text: str, seconds: float) -> None:
    """With their unit."""
    assert read_duration_s("--timeout", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "0s", "60", "-1", "1y", "s", "1e3", "inf", "nan", "9" * 400])
def test_what_is_no_span_of_time_is_refused(text: str) -> None:
    """Naming the option."""
    with pytest.raises(UsageError, match="--timeout"):
        read_duration_s("--timeout", text)
