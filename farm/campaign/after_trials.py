"""How long a campaign takes after its trials: winners are checked and measured again, models compiled and timed. Pure.

Plans, limits of time and the time that is left all go by it.
"""

from __future__ import annotations

from farm.campaign.winner_share import SHARE

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
