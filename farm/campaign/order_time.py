"""What of an order's time is its search's, its winners' and its models'. Pure; the figures are in `after_trials`."""

from __future__ import annotations

from collections.abc import Iterator

from farm.campaign.after_trials import CHECK_S, estimate_final_s, leave_time
from farm.campaign.order import Order, TypeOrder
from farm.selection.looks import LEAST_ROUNDS

# What a trial holds a board for besides its samples, until trials say better.
_HELD_S = 0.5


def list_final_s(order: Order) -> Iterator[float]:
    """How long the final of each model takes on each board type at each operating point."""
    for of_type in order.types:
        for model in order.models:
            if count := count_functions(of_type, model.name):
                yield from [estimate_final_s(count)] * len(of_type.points)


def find_final_s(order: Order, model: str, board_type: str) -> float:
    """How long the final of a model takes on a board type at one operating point."""
    of_type = next(each for each in order.types if each.board_type == board_type)
    return estimate_final_s(count_functions(of_type, model))


def count_functions(of_type: TypeOrder, model: str) -> int:
    """The tuned functions of a model on a board type."""
    return sum(model in each.models for each in of_type.workloads)


def count_tasks(order: Order) -> int:
    """The workloads of an order, counted on each board type at each operating point."""
    return sum(len(of_type.workloads) * len(of_type.points) for of_type in order.types)


def leave_search_s(order: Order, wall_clock_s: float | None) -> float | None:
    """The part of an order's wall clock that is the search's."""
    tasks, measure = count_tasks(order), order.measure
    held_s = measure.repeat * measure.min_repeat_s + _HELD_S
    # The winner and what was tried first.
    least_s = tasks * 2 * LEAST_ROUNDS * held_s
    return leave_time(wall_clock_s, tasks * CHECK_S + sum(list_final_s(order)), least_s)
