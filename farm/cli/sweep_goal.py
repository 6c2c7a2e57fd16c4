"""Options that say what a pick is for: the limits that it must keep, and what it is to have least of."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

import typer

from farm.cli.durations import LATENCIES, read_duration_s
from farm.errors import UsageError
from farm.points.values import Goal, Objective

NONE = "none"

Deadline = Annotated[str, typer.Option("--deadline", metavar="33ms|none", help="Upper limit for the median latency.")]
MaxPower = Annotated[str, typer.Option("--max-power", metavar="7.5W|none", help="Upper limit for power.")]
Aim = Annotated[str, typer.Option("--objective", metavar="energy|latency|power|edp", help="Quantity to minimise.")]


def read_goal(goal: Goal, deadline: str, max_power: str, objective: str) -> Goal:
    """`goal` with what was typed; `none` takes a limit away. Raises UsageError."""
    if objective and objective not in list(Objective):
        raise UsageError(f"--objective {objective!r} is unknown", f"Known: {', '.join(Objective)}.")
    return Goal(
        Objective(objective) if objective else goal.objective,
        _read(deadline, goal.deadline_s, lambda: read_duration_s("--deadline", deadline, LATENCIES)),
        _read(max_power, goal.max_power_w, lambda: _read_watts(max_power)),
        goal.deadline_on_p95,
    )


def _read(text: str, before: float | None, parse: Callable[[], float]) -> float | None:
    if not text:
        return before
    return None if text.strip().lower() == NONE else parse()


def _read_watts(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(m?w)?", text.strip().lower())
    if found and not found[2]:
        raise UsageError(f"--max-power {text!r} has no unit", f"Say {text.strip()}W or {text.strip()}mW.")
    watts = float(found[1]) * (1e-3 if found[2] == "mw" else 1.0) if found else 0.0
    if not watts > 0:
        raise UsageError(f"--max-power {text!r} is no power", "Examples: 7.5W, 800mW.")
    return watts
