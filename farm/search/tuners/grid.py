"""`grid`: all schedules of a small space, in a fixed order."""

from __future__ import annotations

from farm.errors import UsageError
from farm.search.tuners import strategies
from farm.search.tuners.history import TaskHistory
from farm.search.tuners.schedule_space import Evaluated

# Listing means evaluating, at 10-30 ms each; beyond this a grid is no plan.
LIMIT = 4096


def check_size(history: TaskHistory) -> None:
    """Raise UsageError where the space is too large to be listed."""
    size = strategies.space_size(history)
    if size > LIMIT:
        raise UsageError(
            f"{history.space.workload.name} has up to {size:,} schedules; tuner grid lists at most {LIMIT:,}",
            "Choose another tuner, or other operators with `ops`.",
        )


def list_next(history: TaskHistory, count: int) -> list[Evaluated]:
    """The next schedules in order; none once all were proposed."""
    return strategies.list_new(history, count)
