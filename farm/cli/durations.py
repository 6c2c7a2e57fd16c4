"""Spans of time in options. How they are written is `farm.durations`' business."""

from __future__ import annotations

from farm.durations import EXAMPLES, parse_duration_s
from farm.errors import UsageError


def read_duration_s(option: str, text: str) -> float:
    """Seconds, above 0. Raises UsageError that names the option."""
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}", f"Examples: {EXAMPLES}.") from error
