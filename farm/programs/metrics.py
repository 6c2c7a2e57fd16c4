"""Metrics of a program: numbers in the output of a run, their units, and limits on them. Pure.

`order` has the command. A rate is fitted as its reciprocal, so that all objectives are times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jmespath
import numpy as np
import numpy.typing as npt
from jmespath.exceptions import JMESPathError

from farm import units
from farm.errors import PermanentError, UsageError
from farm.units import Scale

MORE, LESS = "more", "less"
_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
# A rate's unit that names no things per second, and what it counts.
_RATES = {"fps": "frame", "hz": "run"}
_TEXT = re.compile(r"\s*([A-Za-z][\w.-]{0,39})\s*=\s*(.*\S)\s*,\s*(more|less)\s*,\s*([^\s,]+)\s*", re.DOTALL)
_EXAMPLE = "Example: --metric 'latency=mean = ([0-9.]+) ms, less, ms'."
# The end of an output that a message shows, in characters.
_QUOTED = 400


@dataclasses.dataclass(frozen=True)
class ProgramMetric:
    """A number of each run. `pattern` is a regular expression with one group, or JMESPath; "": the run's wall time."""

    name: str
    pattern: str
    better: str
    unit: str

    @classmethod
    def parse(cls, text: str) -> ProgramMetric:
        """Parse `NAME=EXPRESSION, more|less, UNIT`. Raises UsageError."""
        found = _TEXT.fullmatch(text)
        if found is None or found[1] == TIME.name:
            raise UsageError(f"--metric {text[:80]!r} is not NAME=EXPRESSION, more|less, UNIT", _EXAMPLE)
        metric = cls(*found.groups())
        if metric._expression is None:
            why = "neither a regular expression with one group nor JMESPath"
            raise UsageError(f"--metric {metric.name}: {metric.pattern[:80]!r} is {why}", _EXAMPLE)
        return metric

    @functools.cached_property
    def _expression(self) -> Any:
        """What is compiled: JMESPath, which avg(a.b) is rather than a group without a number; else a pattern."""
        with contextlib.suppress(JMESPathError):
            return jmespath.compile(self.pattern)
        with contextlib.suppress(re.error):
            found = re.compile(self.pattern, re.MULTILINE)
            return found if found.groups == 1 else None
        return None

    @property
    def counted(self) -> str:
        """What a rate counts: `tok` of tok/s; "" where it is no rate."""
        thing, _, second = self.unit.partition("/")
        return thing if second == "s" else _RATES.get(self.unit.lower(), "")

    def require_objective(self) -> None:
        """Refuse as objective what is neither a time nor a rate. Raises UsageError."""
        right = MORE if self.counted else LESS
        if not self.counted and self.unit not in _UNITS_S:
            raise UsageError(
                f"the objective {self.name} is in {self.unit}, which is neither a time nor a rate",
                f"The first --metric needs one of {', '.join(_UNITS_S)}, X/s, fps, Hz; others may be limited.",
            )
        if self.better != right:
            raise UsageError(f"the objective {self.name} is in {self.unit}, of which {right} is better")

    def to_seconds(self, value: float) -> float:
        """Convert a value: to s, or for a rate to s for each thing counted; its own inverse for a rate."""
        return 1 / value if self.counted else value * _UNITS_S[self.unit]

    def stretch(self, value: float, times: float) -> float:
        """Convert a time or rate to that of a machine which takes so many times as long; other values stay."""
        if self.counted:
            return value / times
        return value * times if self.unit in _UNITS_S else value

    @property
    def title(self) -> str:
        return self.name if self.pattern else self.name.capitalize()

    @property
    def per(self) -> str:
        """What an energy is for: what it counts, or what takes the time."""
        return self.counted or {TIME: "run", LATENCY: "inference"}.get(self, self.name)

    @property
    def at_most(self) -> str:
        return "at least" if self.counted else "at most"

    def scale(self, seconds: Iterable[float]) -> Scale:
        """Return the unit in which times are shown."""
        return Scale(1.0, self.unit, inverse=True) if self.counted else units.seconds_scale(seconds)

    def format(self, seconds: float) -> str:
        """Format a time: `12.3 tok/s`, `4.56 ms`."""
        return self.scale((seconds,)).text(seconds)

    def read(self, stdout: bytes, stderr: bytes) -> float:
        """Return the number in a run's output. Raises PermanentError with the output's end where there is none."""
        out, err = (text.decode(errors="replace") for text in (stdout, stderr))
        found = self._find(out, err)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(found, bool) and 0 < (value := float(found)) < math.inf:
                return value
        what = "is missing in the output" if found is None else f"is {str(found)[:80]!r}, not a number above 0"
        end = (out.strip() or err.strip())[-_QUOTED:]
        raise PermanentError(f"the metric {self.name} {what}", f"The output ends: {end}" if end else "It is empty.")

    def _find(self, out: str, err: str) -> Any:
        if isinstance(self._expression, re.Pattern):
            matches = [*self._expression.finditer(out)] or [*self._expression.finditer(err)]
            return matches[-1][1] if matches else None
        try:
            return self._expression.search(_read_json(out))
        except JMESPathError as error:
            return str(error)


# What a run without --metric is measured by.
TIME = ProgramMetric("time", "", LESS, "s")
# A model's.
LATENCY = ProgramMetric("latency", "", LESS, "s")


def read_metric(goal: Mapping[str, Any]) -> ProgramMetric:
    """Return the objective's metric from a goal in a document; older ones are of models."""
    return ProgramMetric(**goal["metric"]) if goal.get("metric") else LATENCY


def read_runs(
    metrics: Sequence[ProgramMetric],
    latency_s: Sequence[float],
    outputs: Mapping[str, npt.NDArray[np.uint8]],
    stretch: float = 1.0,
) -> dict[str, list[float]]:
    """Return each metric of the runs, and their wall times. `outputs` are stdout and stderr in turn, of the first runs.

    A simulated board takes `stretch` times as long as the machine that ran the program and printed its times. Raises
    PermanentError for a metric that one run lacks.
    """
    texts = [array.tobytes() for array in outputs.values()] or [b"", b""]
    runs = list(zip(texts[::2], texts[1::2], strict=False))
    named = (metric for metric in metrics if metric != TIME)
    found = {metric.name: [metric.stretch(metric.read(out, err), stretch) for out, err in runs] for metric in named}
    return {TIME.name: list(latency_s)} | found


def _read_json(text: str) -> Any:
    """Read JSON, or the lines of a text that are JSON objects or lists; None for neither."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    found = []
    # Other lines are of a log, or cut where an output was too long.
    for line in filter(re.compile(r"\s*[{[]").match, text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return found or None


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit on a metric, in its own unit."""

    metric: str
    value: float
    unit: str
    at_least: bool = False

    @classmethod
    def parse(cls, text: str, metrics: Sequence[ProgramMetric], *, at_least: bool) -> Limit:
        """Parse `NAME=NUMBER UNIT`; without a unit it is the metric's. Raises UsageError."""
        option = "--at-least" if at_least else "--at-most"
        found = re.fullmatch(r"\s*([\w.-]+)\s*=\s*(\d*\.?\d+(?:e[+-]?\d+)?)\s*(\S*)\s*", text)
        if found is None or not 0 < float(found[2]) < math.inf:
            raise UsageError(f"{option} {text[:80]!r} is not NAME=NUMBER UNIT", f"Example: {option} 'decode=10 tok/s'.")
        metric = next((each for each in metrics if each.name == found[1]), None)
        if metric is None:
            known = ", ".join(each.name for each in metrics)
            raise UsageError(f"{option}: there is no metric {found[1]!r}", f"This program has: {known}.")
        value, unit = float(found[2]), found[3] or metric.unit
        if unit != metric.unit:
            if not {unit, metric.unit} <= _UNITS_S.keys():
                raise UsageError(f"{option} {metric.name}: {unit!r} is not its unit", f"It is in {metric.unit}.")
            value *= _UNITS_S[unit] / _UNITS_S[metric.unit]
        return cls(metric.name, value, metric.unit, at_least)

    def keeps(self, value: float | None) -> bool:
        """Whether a value keeps it; one that is not known does not."""
        return value is not None and (value >= self.value if self.at_least else value <= self.value)

    def __str__(self) -> str:
        word = "at least" if self.at_least else "at most"
        return f"{self.metric} of {word} {self.value:.4g} {self.unit}"
