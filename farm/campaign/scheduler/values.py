"""The fleet scheduler's settings, and the names that others share with it.

The scheduler's own state is in `state`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from device_agent.protocol import StrEnum


@dataclasses.dataclass(frozen=True)
class SchedulerSettings:
    """How far ahead to work, and when to give up. Times are in seconds.

    `batch` candidates are requested of a search at a time, up to `max_batch` for many waiting boards; `warmup` of a new
    workload. Each board's queue covers the time of search and build, with at most `max_ahead` candidates. `builders`
    candidates are compiled at once.

    The engine must end a measurement after `measure_limit_s`, changing clocks included: board time is reserved by it.
    `switch_s` is the cost of changing a board's clocks; `credit_s` is the board time that an owner who was absent may
    catch up on. A measurement is a straggler after `straggler_factor` times the usual, and never before
    `straggler_min_s`. A task is given up after `max_search_losses` failures of its search in a row: one or two may be
    accidents.
    """

    batch: int = 16
    max_batch: int = 64
    warmup: int = 4
    max_ahead: float = 8.0
    builders: int = 4
    measure_limit_s: float = 60.0
    switch_s: float = 2.0
    credit_s: float = 60.0
    straggler_factor: float = 4.0
    straggler_min_s: float = 10.0
    max_attempts: int = 3
    max_losses: int = 2
    max_search_losses: int = 3
    max_faults_in_a_row: int = 20


NO_LABELS: frozenset[str] = frozenset()


class Status(StrEnum):
    """What a campaign is doing."""

    RUNNING = "running"
    WAITING = "waiting"  # no usable board is here; resumes by itself when one arrives
    PAUSED = "paused"  # by an operator, or since nothing works; an operator resumes it
    FINISHED = "finished"
    CANCELLED = "cancelled"


OVER = (Status.FINISHED, Status.CANCELLED)
GOING = (Status.RUNNING, Status.WAITING)


class Phase(StrEnum):
    """What a host does that is a board itself."""

    FIRST = "first"  # searches and builds, and has measured nothing yet
    PREPARING = "preparing"
    MEASURING = "measuring"


class TaskKey(NamedTuple):
    """One workload of a campaign on one board type at one operating point: it is searched, and ends as a record."""

    campaign: str
    workload: str
    board_type: str
    point: str
