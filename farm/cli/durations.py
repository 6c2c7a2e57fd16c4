"""Spans of time in options. How they are written is `farm.units`' business."""

from __future__ import annotations

from farm.errors import UsageError
from farm.units import DURATION_EXAMPLES, parse_duration_s

# Of an inference, where minutes would only puzzle.
LATENCIES = "20ms, 1.5s"


def read_duration_s(option: str, text: str, examples: str = DURATION_EXAMPLES) -> float:
    """Seconds, above 0. Raises UsageError that names the option and gives `examples`."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}", f"Examples: {examples}.") from error
