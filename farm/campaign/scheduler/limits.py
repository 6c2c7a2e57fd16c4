"""The numbers by which the fleet's scheduler decides; see `values` for what it is told and what it says."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SchedulerSettings:
    """How far ahead to work, and when to give up. Times are in seconds.

    `batch` candidates are asked of a search at a time, up to `max_batch` where many boards wait; `warmup` of a workload
    that was never tried. Ahead of each board lie candidates for as long as search and build take, at most
    `max_ahead` of them. `builders` candidates are compiled at once.

    The engine must end a measurement after `measure_limit_s`, changing clocks included: board time is reserved by it.
    `switch_s` is what changing a board's clocks costs; `credit_s` is how long an owner who could not use the fleet may
    make up for it afterwards. A measurement is a straggler after `straggler_factor` times the usual, and never before
    `straggler_min_s`. A task whose search failed `max_search_losses` times in a row is given up: once or twice may be
    an accident.
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
