"""Count the tasks of an order, and estimate how long verification and the timing of whole models take."""

from __future__ import annotations

from collections.abc import Iterator

from farm.campaign.plan_estimate import CHECK_S, estimate_final_s, leave_time
from farm.selection.rounds import LEAST_ROUNDS
from farm.types.campaigns import Order, TypeOrder

# Board time of a trial besides its samples, until trials say better.
_HELD_S = 0.5


def list_final_s(order: Order) -> Iterator[float]:
    """List how long the final of each model takes on each board type at each operating point."""
    for of_type in order.types:
        for model in order.models:
            if count := count_functions(of_type, model.name):
                yield from [estimate_final_s(count)] * len(of_type.points)


def find_final_s(order: Order, model: str, board_type: str) -> float:
    """Estimate the final of a model on a board type at one operating point."""
    of_type = next(each for each in order.types if each.board_type == board_type)
    return estimate_final_s(count_functions(of_type, model))


def count_functions(of_type: TypeOrder, model: str) -> int:
    """Count the tuned functions of a model on a board type."""
    return sum(model in each.models for each in of_type.workloads)


def count_tasks(order: Order) -> int:
    """Count an order's workloads on each board type at each operating point."""
    return sum(len(of_type.workloads) * len(of_type.points) for of_type in order.types)


def leave_search_s(order: Order, wall_clock_s: float | None) -> float | None:
    """Return the search's part of an order's wall clock."""
    tasks, measure = count_tasks(order), order.measure
    held_s = measure.repeat * measure.min_repeat_s + _HELD_S
    # A finalist and the baseline.
    least_s = tasks * 2 * LEAST_ROUNDS * held_s
    return leave_time(wall_clock_s, tasks * CHECK_S + sum(list_final_s(order)), least_s)
