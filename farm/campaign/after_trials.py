"""Estimate the time after a campaign's trials: verification of candidates, compiling and timing of models. Pure.

Plans, time limits and the remaining time all use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from farm.selection.rounds import LEAST_ROUNDS

# Measurements for verification per trial of the search: with 64 trials of a task, three candidates and the incumbent
# can be measured eight times.
SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Allowance:
    """One task's finalists: `candidates` of the search, beside the baseline; `looks` are the rounds after which they
    are compared (see `tie.TieRule`).
    """

    top: int
    looks: tuple[int, ...]

    @property
    def most(self) -> int:
        """The most measurements it can take."""
        return self.looks[-1] * (self.top + 1)

    @property
    def usual(self) -> int:
        """The measurements it takes where the first look decides."""
        return self.looks[0] * (self.top + 1)


def plan_allowance(trials: float, top: int, looks: Sequence[int]) -> Allowance:
    """Plan the verification of a task after this many trials; `top` and `looks` are as ordered."""
    allowed = SHARE * trials
    fewer = max(1, min(top, int(allowed // looks[0]) - 1))
    kept = tuple(look for look in looks if look * (fewer + 1) <= allowed)
    return Allowance(fewer, kept or (LEAST_ROUNDS,))


def leave_room(board_s: float | None) -> float | None:
    """Return the search's part of a budget of board seconds; the rest is for verification."""
    return None if board_s is None else board_s / (1 + SHARE)


# Of one task: its reference and candidates are replayed, compiled and run once. 7 tasks of mnist_cnn took 18 s, 22 of
# squeezenet1.1 27 s (two cores of an Intel server, which was the board too).
CHECK_S = 1.5
# Of one model: load it, compile each function as recorded and as predicted, time the programs in turns. mnist_cnn with
# 7 functions took 23 s there, squeezenet1.1 with 22 functions 60 s.
_FINAL_START_S = 3.0
_FINAL_FUNCTION_S = 2.0
_FINAL_TIMING_S = 6.0
# The search has at least this part of a wall clock: without trials there is nothing to verify.
_LEAST_SEARCH = 1 / 3


def estimate_final_s(functions: int) -> float:
    """Estimate compiling and timing of a model with this many tuned functions."""
    return _FINAL_START_S + _FINAL_FUNCTION_S * functions + _FINAL_TIMING_S


def leave_time(wall_clock_s: float | None, fixed_s: float, least_winners_s: float) -> float | None:
    """Return the search's part of a wall clock.

    `fixed_s` are checks and finals, `least_winners_s` the fewest measurements of finalists, which also get a share of
    the search's part.
    """
    if wall_clock_s is None:
        return None
    left_s = wall_clock_s - fixed_s
    return max(_LEAST_SEARCH * wall_clock_s, min(left_s / (1 + SHARE), left_s - least_winners_s))
