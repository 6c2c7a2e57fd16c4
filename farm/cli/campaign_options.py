"""Options that several commands on campaigns share, and the reading of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from farm.cli.durations import read_duration_s
from farm.errors import UsageError

NONE = "none"

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A campaign; `farm campaign list` shows them."),
]
Trials = Annotated[
    str | None, typer.Option("--trials", metavar="N|none", help="Limit of candidates measured, in total.")
]
WallClock = Annotated[
    str | None,
    typer.Option("--wall-clock", metavar="6h|none", help="Limit of the time from start to end, without pauses."),
]
BoardHours = Annotated[
    str | None, typer.Option("--board-hours", metavar="H|none", help="Limit of the hours for which trials hold boards.")
]
PerWorkload = Annotated[
    str | None,
    typer.Option(
        "--per-workload", metavar="N|none", help="Limit of trials of one workload at one point of one board type."
    ),
]


def read_budget(
    trials: str | None, wall_clock: str | None, board_hours: str | None, per_workload: str | None
) -> dict[str, Any]:
    """The limits that were given, as fields of a budget; None for `none`. Raises UsageError."""
    changes: dict[str, Any] = {}
    if trials is not None:
        changes["trials"] = _read_count("--trials", trials)
    if wall_clock is not None:
        changes["wall_clock_s"] = None if wall_clock == NONE else read_duration_s("--wall-clock", wall_clock)
    if board_hours is not None:
        changes["board_s"] = _read_hours(board_hours)
    if per_workload is not None:
        changes["per_workload"] = _read_count("--per-workload", per_workload)
    return changes


def _read_count(option: str, text: str) -> int | None:
    if text == NONE:
        return None
    try:
        count = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        count = 0
    if count < 1:
        raise UsageError(f"{option} must be a whole number of at least 1, or {NONE}, not {text!r}")
    return count


def _read_hours(text: str) -> float | None:
    if text == NONE:
        return None
    try:
        hours = float(text.removesuffix("h"))
    except ValueError:
        hours = 0.0
    if not 0 < hours < float("inf"):
        raise UsageError(f"--board-hours must be hours above 0, or {NONE}, not {text!r}")
    return hours * 3600
