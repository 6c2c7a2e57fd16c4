"""Plan a sweep before a board is taken: boards, target, grid, goal, visits.

The board itself decides on its grid (`farm.sweep.run.session`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from farm.crew.choice import TargetPlan, plan_place, plan_target
from farm.crew.visits import IDLE_SHARE
from farm.inventory.board_types import BoardType
from farm.points.grid import Coupling
from farm.points.requests import find_clocks
from farm.points.values import Goal, Grid
from farm.search import gpus
from farm.sweep.plan.adaptive import ANCHOR_EVERY
from farm.sweep.plan.order import SweepOrder, SweepPlace, plan_order, require_goal
from farm.types.documents import BoardInfo


@dataclasses.dataclass(frozen=True)
class SweepPreview:
    """`boards` are those of which any may be used, none: this machine. `grid` is None where no clocks are known yet."""

    board_type: BoardType
    boards: tuple[str, ...]
    simulated: bool
    target: TargetPlan
    grid: Grid | None
    notes: tuple[str, ...]
    points: int | None
    visits: int | None

    def to_dict(self, order: SweepOrder) -> dict[str, Any]:
        """Return what `farm sweep plan --json` prints; `points` and `visits` are upper bounds, None where unknown."""
        return {
            "model": order.model,
            "board_type": self.board_type.name,
            "boards": list(self.boards),
            "simulated": self.simulated,
            "series": [{"variant": variant, "batch": batch} for variant, batch in order.series],
            "grid": [point.key for point in self.grid.points] if self.grid else None,
            "points": self.points,
            "visits": self.visits,
            "window_s": order.window_s,
            "exhaustive": order.exhaustive,
            "notes": list(self.notes),
        }


def preview(
    order: SweepOrder, where: SweepPlace, board_type: BoardType, goal: Goal, named: bool, rows: Sequence[BoardInfo]
) -> SweepPreview:
    """Plan a sweep from the store's data on its boards. `rows` are those of `store.boards.fetch`.

    `named`: the user named the objective. Raises UsageError for what no board here can do, UnavailableError and
    BoardUnsafeError where an operator has to act first.
    """
    kind = gpus.require_device(board_type, order.device)
    host_cores = len(os.sched_getaffinity(0))
    boards: tuple[str, ...] = ()
    if where.name is not None or not kind.host_is_board:
        boards, simulated, target = plan_place(rows, kind, where.name, host_cores)
    else:
        simulated, target = False, plan_target(kind, {}, host_cores)
    about: Mapping[str, Any] = next((row.description for row in rows if row.name in boards and row.description), {})
    clocks = find_clocks(kind, about)
    if clocks is None:
        return SweepPreview(
            kind, boards, simulated, target, None, ("the clocks are known once a board is there",), None, None
        )
    grid, notes = plan_order(order, clocks, Coupling.of(kind))
    if about:
        _, more = require_goal(goal, bool(about.get("total_rails")), named)
        notes += more
    visits = count_visits(order, grid)
    return SweepPreview(kind, boards, simulated, target, grid, tuple(notes), count_points(order, grid), visits)


def count_points(order: SweepOrder, grid: Grid) -> int:
    """Return the most points of a grid that are measured."""
    return min(len(grid), order.budget_points or len(grid))


def count_visits(order: SweepOrder, grid: Grid) -> int:
    """Return the most visits to a grid; the anchor is visited again after every `ANCHOR_EVERY` others, and last."""
    points = count_points(order, grid)
    return (points + points // ANCHOR_EVERY + (points > 1)) * len(order.series) * order.repeat


def describe(found: SweepPreview, order: SweepOrder) -> list[str]:
    """Describe the plan in lines for a terminal."""
    where = ", ".join(found.boards) or "this machine"
    series = ", ".join(f"{variant} x{batch}" if batch > 1 else variant for variant, batch in order.series)
    lines = [
        f"{order.model} on {found.board_type.name}{' (simulated)' if found.simulated else ''}: {where}",
        f"code: {series}",
    ]
    if found.grid is not None and found.points is not None and found.visits is not None:
        least = "all are measured" if order.exhaustive else "fewer where a fit is sure of the rest"
        lines.append(
            f"at most {found.points} of {len(found.grid)} operating points, {least}; at most {found.visits} visits"
        )
        if not found.simulated:
            minutes = found.visits * order.window_s * (1 + IDLE_SHARE) / 60
            lines.append(
                f"at most {minutes:.0f} min on one board, with windows of {order.window_s:g} s and their idle baseline"
            )
        else:
            lines.append(
                "simulated boards keep their own time: a visit takes here as long as one inference in the emulator"
            )
    return lines + list(found.notes)
