"""How long a campaign takes after its trials: winners are checked and measured again, models compiled and timed. Pure.

Plans, limits of time and the time that is left all go by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from farm.selection.rounds import LEAST_ROUNDS

# For every two trials of the search one measurement of winners: where a task had 64, three candidates and the record's
# holder can be measured eight times.
SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Allowance:
    """Of one task: so many candidates of the search take part, beside what was tried first, and `looks` are the rounds
    after which they are compared (see `tie.TieRule`).
    """

    top: int
    looks: tuple[int, ...]

    @property
    def most(self) -> int:
        """The measurements that it can come to."""
        return self.looks[-1] * (self.top + 1)

    @property
    def usual(self) -> int:
        """The measurements that it comes to where the first look decides."""
        return self.looks[0] * (self.top + 1)


def plan_allowance(trials: float, top: int, looks: Sequence[int]) -> Allowance:
    """What a task may take for which the search had so many trials; `top` and `looks` are what was ordered."""
    allowed = SHARE * trials
    fewer = max(1, min(top, int(allowed // looks[0]) - 1))
    kept = tuple(look for look in looks if look * (fewer + 1) <= allowed)
    return Allowance(fewer, kept or (LEAST_ROUNDS,))


def leave_room(board_s: float | None) -> float | None:
    """The part of a budget of board seconds that is the search's; the rest is its winners'."""
    return None if board_s is None else board_s / (1 + SHARE)


# Of one task: its reference and candidates are replayed, compiled and run once. 7 tasks of mnist_cnn took 18 s, 22 of
# squeezenet1.1 27 s, on two cores of an Intel server that were the board too.
CHECK_S = 1.5
# Of one model: loading it, compiling a function as recorded and as predicted, and timing the programs in turns.
# mnist_cnn with 7 functions took 23 s there, squeezenet1.1 with 22 functions 60 s.
_FINAL_START_S = 3.0
_FINAL_FUNCTION_S = 2.0
_FINAL_TIMING_S = 6.0
# The search has this part of a wall clock in any case: without trials there is nothing to measure again.
_LEAST_SEARCH = 1 / 3


def estimate_final_s(functions: int) -> float:
    """How long compiling and timing a model of so many tuned functions takes."""
    return _FINAL_START_S + _FINAL_FUNCTION_S * functions + _FINAL_TIMING_S


def leave_time(wall_clock_s: float | None, fixed_s: float, least_winners_s: float) -> float | None:
    """The part of a wall clock that is the search's.

    `fixed_s` are checks and finals, `least_winners_s` the fewest measurements of winners; beside those, winners have
    a share of what the search has.
    """
    if wall_clock_s is None:
        return None
    left_s = wall_clock_s - fixed_s
    return max(_LEAST_SEARCH * wall_clock_s, min(left_s / (1 + SHARE), left_s - least_winners_s))
