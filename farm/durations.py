"""Spans of time as people write them, on the command line and in files: `60`, `60s`, `100ms`, `10m`, `1.5h`."""

from __future__ import annotations

import math
import re

EXAMPLES = "60, 90s, 10m, 1.5h"

_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def parse_duration_s(text: str) -> float:
    """Seconds, above 0. Raises ValueError."""
    found = _SPAN.fullmatch(text.strip().lower())
    value = float(found.group(1)) * _UNITS_S.get(found.group(2), math.nan) if found else math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{text!r} is not a duration")
    return value
