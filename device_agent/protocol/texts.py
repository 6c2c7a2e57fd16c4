"""Parse and format clocks and CPU sets, the same way on both sides."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from decimal import Decimal

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# The rule in words, for messages.
NAME_RULE = "up to 63 letters, digits, dots, dashes and underscores, a letter or digit first"


_UNITS_HZ = {"hz": 1, "khz": 10**3, "mhz": 10**6, "ghz": 10**9}
# The unit of a number without one.
_DEFAULT_UNIT = "mhz"
_FREQ = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]?hz)?", re.IGNORECASE | re.ASCII)
# A larger number is in Hz, without its unit.
_HIGHEST_HZ = 10**12
_CPUS = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)


def is_name(text: str) -> bool:
    """Whether `text` is a valid name."""
    return _NAME.fullmatch(text) is not None


def parse_hz(text: str) -> int:
    """Parse a clock in Hz: `921.6MHz`, `1.2GHz`, or `600` for 600 MHz. Raises ValueError for anything else."""
    found = _FREQ.fullmatch(text.strip())
    value = Decimal(found[1]) * _UNITS_HZ[(found[2] or _DEFAULT_UNIT).lower()] if found else Decimal(0)
    if not 1 <= value < _HIGHEST_HZ or value != round(value):
        raise ValueError(f"{text.strip()!r} is not a frequency, such as 921.6MHz, 1.2GHz, or 600 for 600 MHz")
    return round(value)


def format_mhz(hz: float | None, none: str = "unknown") -> str:
    """Format a clock in MHz, e.g. `307.2`; `none` for a missing one."""
    return none if hz is None else f"{hz / 1e6:.9g}"


def format_hz(hz: float | None, none: str = "unknown") -> str:
    """Format a clock, e.g. `1479 MHz`; `none` for a missing one."""
    return none if hz is None else f"{format_mhz(hz)} MHz"


def format_table(table_hz: Iterable[int]) -> str:
    """Format clocks in their order, e.g. `102, 204, 307.2 MHz`; `none` for no clocks."""
    listed = ", ".join(map(format_mhz, table_hz))
    return f"{listed} MHz" if listed else "none"


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse the kernel's CPU list, `0,3-5`, in ascending order. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _CPUS.fullmatch(part)
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{text.strip()!r} is not a list of CPUs, such as 0,3-5")
        cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """Format CPU numbers as the kernel does, e.g. `0,3-5`."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(cpus)), key=lambda pair: pair[1] - pair[0]):
        numbers = [cpu for _, cpu in run]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(parts)
