"""Whether what went wrong on a board says something about the board, and telling the farm if it does.

Which status belongs to which side is the protocol's; here a side is only changed where the board was no longer ours.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from device_agent.protocol import Outcome, Status
from farm.boards.health import Kind, find_kind
from farm.errors import BoardBusyError, BoardNonsenseError, BoardUnsafeError, FarmError, TransientError

# One throttled trial may be the room's warm afternoon; so many in a row are the board's cooling.
_THROTTLED_IN_A_ROW = 3


def to_outcome(error: FarmError, board: str) -> Outcome:
    """The outcome of a trial whose board's session ended with an error. Raises the error where it is about more than
    the trial: a board that is unsafe, or answers nonsense.
    """
    if isinstance(error, BoardUnsafeError | BoardNonsenseError):
        raise error
    # What may pass is the board's doing; what cannot work by trying again is ours, as is that others may have it.
    is_boards = isinstance(error, TransientError) and not isinstance(error, BoardBusyError)
    return Outcome(Status.BOARD_LOST if is_boards else Status.FARM_ERROR, str(error), board=board)


class Place(Protocol):
    """What is needed of a board, or of the place where one is; see `Site`."""

    @property
    def can_change(self) -> bool:
        """See `Site`."""

    def confirm(self) -> bool:
        """See `Site`."""

    def observe(self, kind: Kind, detail: str) -> None:
        """See `Site`."""


class Blame:
    """Judges the outcomes of one run. Not thread-safe."""

    def __init__(self, site: Place) -> None:
        self._site = site
        self._throttled_in_a_row = 0

    def judge(self, outcome: Outcome, still_there: bool) -> Outcome:
        """The outcome as it is to be kept. `still_there`: the board it came from is the one that we work on."""
        if outcome.status in (Status.BOARD_LOST, Status.FARM_ERROR) and not (still_there and self._site.confirm()):
            # A later lease, or our own giving up, ended it: neither the board nor the candidate is to blame.
            return dataclasses.replace(
                outcome, status=Status.FARM_ERROR, message=f"the board was given up meanwhile: {outcome.message}"
            )
        if outcome.status is Status.BOARD_LOST:
            self._site.observe(Kind.FAULT, outcome.message)
        self._throttled_in_a_row = self._throttled_in_a_row + 1 if outcome.status is Status.THROTTLED else 0
        if self._throttled_in_a_row >= _THROTTLED_IN_A_ROW:
            self._throttled_in_a_row = 0
            self._site.observe(Kind.THROTTLED, f"{_THROTTLED_IN_A_ROW} trials in a row: {outcome.message}")
        return outcome

    def judge_error(self, error: BoardUnsafeError | BoardNonsenseError) -> Outcome:
        """The outcome of a trial on a board that may not be used, or is not to be believed.

        Raises the error where a board may not be used and there is no other one to take.
        """
        if isinstance(error, BoardUnsafeError) and not self._site.can_change:
            raise error
        self._site.observe(find_kind(error), error.message)
        return Outcome(Status.FARM_ERROR, error.message)
