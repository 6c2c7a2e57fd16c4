"""Format figures, durations and operating points for people; parse durations such as `100ms`, `10m`, `1.5h`."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence

NOTHING = "–"
# The year 5138: strftime and localtime fail beyond it on some systems.
_LATEST_S = 1e11

DURATION_EXAMPLES = "90s, 10m, 1.5h"

_UNITS_S = {"us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zµμ]*)")
_UNITS_J = {"J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": 3600.0, "kWh": 3.6e6}
_UNITS_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclasses.dataclass(frozen=True)
class Scale:
    """A unit for all figures of one kind: multiply SI values by `factor`. `inverse`: a rate, of times."""

    factor: float
    unit: str
    inverse: bool = False

    def convert(self, value: float) -> float:
        """Convert an SI value."""
        return self.factor / value if self.inverse else self.factor * value

    def number(self, value: float | None) -> str:
        """Format three significant digits, a dash for what is unknown."""
        return NOTHING if value is None else format_number(self.convert(value))

    def text(self, value: float | None) -> str:
        """Format the number and its unit."""
        return NOTHING if value is None else f"{self.number(value)} {self.unit}"

    def interval(self, estimate: Mapping[str, float]) -> tuple[str, str]:
        """Format a value, and `low – high`, with the digits that distinguish the ends."""
        value, *ends = (self.convert(estimate[end]) for end in ("value", "low", "high"))
        digits = _plan_digits(value, max(ends) - min(ends))
        low, high = sorted(ends)
        return f"{value:,.{digits}f}", f"{low:,.{digits}f} – {high:,.{digits}f}"


def seconds_scale(values: Iterable[float]) -> Scale:
    """The unit in which the smallest value has a digit before the point."""
    return _scale(values, ((1.0, "s"), (1e3, "ms"), (1e6, "µs")))


def format_latency(seconds: float) -> str:
    """Three significant digits in a suitable unit."""
    return seconds_scale((seconds,)).text(seconds)


def joule_scale(values: Iterable[float]) -> Scale:
    """Do as `seconds_scale`, for energy."""
    return _scale(values, ((1.0, "J"), (1e3, "mJ"), (1e6, "µJ")))


def parse_energy_j(text: str) -> float:
    """Parse `20kJ` or `5.5Wh`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2] not in _UNITS_J or not float(found[1]):
        raise ValueError("an energy above 0 with its unit is needed here: 500J, 20kJ, 5.5Wh")
    return float(found[1]) * _UNITS_J[found[2]]


WATT = Scale(1.0, "W")


def format_number(value: float) -> str:
    """Format three significant digits without exponent."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def name_some(names: Sequence[str], most: int = 3) -> str:
    """Name the first few of some names, for a line of text."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def format_bytes(size: int) -> str:
    """`512 bytes`, `42.1 kB`, `1.23 MB`; never rounds to zero."""
    if size < 1000:
        return f"{size} bytes"
    return next(f"{format_number(size / unit)} {name}" for unit, name in _UNITS_BYTES if size >= unit)


def format_count(count: float) -> str:
    """Format as `396`, `115 k`, `231 M`: three significant digits."""
    unit, name = next((each for each in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if count >= each[0]), (1.0, ""))
    return f"{format_number(count / unit) if name else f'{count:.0f}'}{name}"


def format_percent(ratio: float, more: str, less: str, same: str) -> str:
    """Format how far a ratio is from 1: `38 % longer`, from 2 on `6.03 times as long`."""
    percent = abs(ratio - 1) * 100
    if percent < 0.5:
        return same
    if ratio < 2:
        return f"{percent:.0f} % {more if ratio > 1 else less}"
    return f"{format_number(ratio)} times {more.replace('longer', 'as long').replace('more', 'as much')}"


def parse_duration_s(text: str) -> float:
    """Parse a duration in seconds, above 0. Raises ValueError."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found and not found.group(2):
        raise ValueError(f"{text!r} has no unit: {text.strip()}s, {text.strip()}ms or {text.strip()}m?")
    value = float(found.group(1)) * _UNITS_S.get(found.group(2), math.nan) if found else math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{text!r} is not a duration")
    return value


def parse_period_s(text: str) -> float:
    """Parse the time between two inputs in seconds: `33ms`, or `30fps`. Raises ValueError."""
    found = re.fullmatch(r"(\d*\.?\d+)\s*(?:fps|hz)", text.strip().lower())
    if found and float(found[1]):
        return 1 / float(found[1])
    return parse_duration_s(text)


def format_share(share: float) -> str:
    """A probability in percent; a measured one is never shown as 100 or 0."""
    return "over 99 %" if share > 0.99 else "under 1 %" if 0 < share < 0.01 else f"{share * 100:.0f} %"


def format_duration(seconds: float) -> str:
    """Format as `3 min 32 s`, `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def to_local_time(at: float) -> time.struct_time:
    """A time since the epoch in local time; an impossible one becomes the epoch."""
    return time.localtime(at if 0 <= at <= _LATEST_S else 0.0)


def format_minute(at: float) -> str:
    """A time since the epoch as a local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", to_local_time(at))


def format_point(key: str, common: Iterable[str] = ()) -> str:
    """An operating point's key for people: `a57 1420.8 MHz, gpu 921.6 MHz`, without the words in `common`."""
    left_out = set(common)
    words = [_format_word(word) for word in key.split() if word not in left_out]
    return ", ".join(words) or ("as the board had it" if key == "default" else "as above")


def find_common_words(keys: Iterable[str]) -> tuple[str, ...]:
    """Words in every key; none for a single key."""
    split = [key.split() for key in keys]
    if len(split) < 2:
        return ()
    return tuple(word for word in split[0] if all(word in other for other in split[1:]))


def format_label(key: str, common: Iterable[str] = ()) -> str:
    """The shortest text for a chart: a bare frequency if the point has nothing else."""
    words = [word for word in key.split() if word not in set(common)]
    if len(words) == 1 and words[0].endswith("MHz"):
        return words[0].partition("=")[2].replace("MHz", " MHz")
    return format_point(key, common).replace(" MHz", "")


def _format_word(word: str) -> str:
    name, equals, value = word.partition("=")
    if not equals:
        return "as the board had it" if word == "default" else word
    return f"{name} {value[:-3]} MHz" if value.endswith("MHz") else f"{name} {value}"


def _scale(values: Iterable[float], units: tuple[tuple[float, str], ...]) -> Scale:
    smallest = min(values, default=1.0)
    factor, unit = next(((f, u) for f, u in units if smallest * f >= 1), units[-1])
    return Scale(factor, unit)


def _plan_digits(value: float, width: float) -> int:
    """Digits after the point: three significant ones, up to two more for a narrower interval."""
    usual = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 2
    needed = max(0, math.ceil(-math.log10(width)) + 1) if width > 0 else 0
    return min(max(usual, needed), usual + 2)
