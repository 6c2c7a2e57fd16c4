"""Spans of time as people type them: `60`, `60s`, `10m`, `1.5h`."""

from __future__ import annotations

import math
import re

from farm.errors import UsageError

_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def read_duration_s(option: str, text: str) -> float:
    """Seconds, above 0. Raises UsageError that names the option."""
    found = _SPAN.fullmatch(text.strip().lower())
    value = float(found.group(1)) * _UNITS_S.get(found.group(2), math.nan) if found else math.nan
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{option} {text!r} is no span of time", "Examples: 60, 90s, 10m, 1.5h.")
    return value
