"""Conditions such as `latency > 5 %`: read from text, and judged by an interval. Pure."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from device_agent.protocol import StrEnum
from farm.errors import UsageError

# What may be compared, and the units of its absolute limits; a change in percent is always to be had.
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_ENERGIES = {"J": 1.0, "mJ": 1e-3, "uJ": 1e-6, "µJ": 1e-6}
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "KiB": 1024.0, "MiB": 1024.0**2, "GB": 1e9, "GiB": 1024.0**3}
UNITS = {
    "latency": _TIMES,
    "p90": _TIMES,
    "p99": _TIMES,
    "energy": _ENERGIES,
    "size": _BYTES,
    "memory": _BYTES,
}
_CONDITION = re.compile(r"\s*([a-z0-9]+)\s*>\s*([0-9]+(?:\.[0-9]+)?)\s*([^\s0-9]{1,3})\s*")
_MOST = 1e6
EXAMPLES = 'Examples: "latency > 5 %", "p99 > 40 ms", "size > 10 %". Known: ' + ", ".join(UNITS) + "."


class GateVerdict(StrEnum):
    """What an interval says of a limit."""

    PASS = "pass"  # noqa: S105 - all of it is within
    FAIL = "fail"  # all of it is beyond
    UNDECIDED = "undecided"


@dataclasses.dataclass(frozen=True)
class MetricEstimate:
    """A figure with its interval; both ends are the figure where it is exact."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Condition:
    """What must not be: `metric` above `limit`, as a change (0.05: 5 % more than the baseline's) or in SI units."""

    text: str
    metric: str
    limit: float
    is_change: bool

    def judge(self, found: MetricEstimate) -> GateVerdict:
        """By the interval of a ratio to the baseline, or of the figure itself."""
        limit = 1 + self.limit if self.is_change else self.limit
        if found.low > limit:
            return GateVerdict.FAIL
        return GateVerdict.PASS if found.high <= limit else GateVerdict.UNDECIDED


def read_conditions(texts: Sequence[str]) -> tuple[Condition, ...]:
    """Each text's condition, in order, each once. Raises UsageError."""
    return tuple(dict.fromkeys(_read(text) for text in texts))


def _read(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise UsageError(f"--fail-if {text[:80]!r} is no condition", EXAMPLES)
    metric, number, unit = found[1], float(found[2]), found[3]
    if metric not in UNITS:
        raise UsageError(f"--fail-if: nothing is known of {metric!r}", EXAMPLES)
    if unit != "%" and unit not in UNITS[metric]:
        raise UsageError(f"--fail-if: {metric} is not given in {unit!r}", f"Known: %, {', '.join(UNITS[metric])}.")
    if not (math.isfinite(number) and number <= _MOST):
        raise UsageError(f"--fail-if: {found[2][:40]} is no limit")
    limit = number / 100 if unit == "%" else number * UNITS[metric][unit]
    return Condition(f"{metric} > {number:g} {unit}", metric, limit, unit == "%")


def find_worst(verdicts: Sequence[GateVerdict]) -> GateVerdict:
    """The verdict on all together: one that fails fails them; of none nothing is wrong."""
    return next((each for each in (GateVerdict.FAIL, GateVerdict.UNDECIDED) if each in verdicts), GateVerdict.PASS)
