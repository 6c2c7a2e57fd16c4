"""Asking for a board before there is a session: the fence at its agent, the tracker's offer, and who is in the way."""

from __future__ import annotations

import dataclasses
import logging

from device_agent.protocol import ClaimReport, ClaimStatus, LeaseClaim
from farm.connectivity import fences
from farm.connectivity.tracker import Tracker
from farm.errors import (
    BoardBusyError,
    DeadlineError,
    FarmError,
    LeaseOverError,
    TransientError,
    UnavailableError,
)

# Asked only for the words of an error.
_HOLDER_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AgentAddress:
    """Where one agent listens, in place of a tracker: for a board that nobody else asks for."""

    host: str
    port: int

    def request(self, key: str, timeout_s: float) -> tuple[str, int, str]:
        """What a tracker would answer: host, port and the key to connect with."""
        del timeout_s  # the agent is there or not; connecting has a deadline of its own
        return self.host, self.port, key


def ask_for_board(
    tracker: Tracker | AgentAddress, key: str, claim: LeaseClaim | None, timeout_s: float, doubted: bool
) -> tuple[str, int, str]:
    """Fence the board, and wait until it is offered: its host, port and the key to connect with.

    Raises LeaseOverError, DeadlineError, TransientError, UnavailableError, BoardBusyError where a client holds it; of
    a board that is `doubted` LeaseOverError, DeadlineError where its agent says nothing, BoardBusyError for all else.
    """
    _send_fence(tracker, key, claim, fences.FENCE_TIMEOUT_S, doubted)
    try:
        return tracker.request(key, timeout_s)
    except FarmError as error:
        busy = isinstance(error, DeadlineError)
        report = _send_fence(tracker, key, claim, _HOLDER_TIMEOUT_S, doubted) if busy else None
        holder = report.holder if report is not None else ""
        if doubted:
            who = f"{holder or 'somebody'} holds the board without a lease of the farm's"
            raise BoardBusyError(who if busy else error.message) from error
        if not holder:
            raise
        raise BoardBusyError(f"{error.message}; it is held by {holder}", error.hint) from error


def require_latest(key: str, report: ClaimReport) -> ClaimReport:
    """An agent's answer to a claim. Raises LeaseOverError where it knows a later lease."""
    if report.status is ClaimStatus.REFUSED:
        error = LeaseOverError(f"the board {key} refused us: {report.message}", "Take the board anew.")
        error.greatest = report.greatest
        raise error
    return report


def _send_fence(
    tracker: Tracker | AgentAddress, key: str, claim: LeaseClaim | None, timeout_s: float, doubted: bool
) -> ClaimReport | None:
    """The agent's answer, None where it cannot be had: then the request or the claim will tell."""
    if claim is None:
        return None
    address: tuple[str, int] | None = None
    try:
        if isinstance(tracker, AgentAddress):
            address = (tracker.host, tracker.port)
        else:
            address = fences.find_agent(tracker, key, timeout_s)
        if address is None:
            return None
        report = fences.send_fence(address, claim, timeout_s)
    except (TransientError, UnavailableError) as error:
        if doubted and address is not None and isinstance(error, TransientError):
            if isinstance(error.__cause__, TimeoutError):
                raise DeadlineError(f"its agent did not answer within {timeout_s:g} s: {error.message}") from error
            # The way to it has just been cut, or its agent has ended: that is the keeper's to find out.
            raise BoardBusyError(error.message) from error
        _log.info("%s", error)
        return None
    return require_latest(key, report)
