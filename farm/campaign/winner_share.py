"""How many measurements a campaign's winners may take: a share of its budget, so that what is ordered bounds all of it.

Pure. Plans, progress and the verification itself go by it; who takes part and who wins is the business of `verify`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from farm.selection.looks import LEAST_ROUNDS

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
