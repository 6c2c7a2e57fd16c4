"""Which lease is the latest: the greatest token of each store, kept on disk by the listener and asked by sessions.

The listener alone writes (`Fences`); a session asks it over a socket pair (`Claimant`), so that a session which is
stopped in the middle holds up nobody. What follows for a session is decided in `rpc.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
from pathlib import Path

from device_agent.protocol import ClaimReport, ClaimStatus, LeaseClaim, ProtocolError

# A farm has one store; a few more come from tests and from coordinators that were set up anew.
MAX_STORES = 64
FILE_NAME = "fences.json"
# The listener answers within milliseconds, and within seconds where a slow disk has to take the token first.
_ANSWER_TIMEOUT_S = 5.0
_MAX_MESSAGE_BYTES = 4096

_log = logging.getLogger(__name__)


class Fences:
    """The latest lease of each store. Used by one process; what it says holds from the moment it is said.

    `path` None: nothing outlives the process. A file that cannot be read counts as lost, one that cannot be written is
    done without; both are logged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._latest: dict[str, LeaseClaim] = {}  # the store whose token rose last is last
        if path is not None:
            self._load(path)

    def find_latest(self, store: str) -> LeaseClaim | None:
        """The latest lease known of a store."""
        return self._latest.get(store)

    def raise_to(self, claim: LeaseClaim) -> ClaimReport:
        """Take a lease for the latest of its store, unless a later one is known."""
        latest = self._latest.get(claim.store)
        if latest is not None and claim.token < latest.token:
            return ClaimReport(
                ClaimStatus.REFUSED,
                f"the lease {claim.token} of {claim.owner or 'somebody'} is over: "
                f"{latest.owner or 'somebody'} has had the board since, under lease {latest.token}",
                latest.token,
                latest.owner,
            )
        if latest is not None and claim.token == latest.token and not claim.is_same(latest):
            return ClaimReport(
                ClaimStatus.REFUSED,
                f"the lease {claim.token} of {claim.owner or 'somebody'} is not the one of that number that "
                f"{latest.owner or 'somebody'} has here: its store has been put back to an earlier state",
                latest.token,
                latest.owner,
            )
        if latest is None or claim.token > latest.token:
            self._latest.pop(claim.store, None)
            self._latest[claim.store] = claim
            while len(self._latest) > MAX_STORES:
                self._latest.pop(next(iter(self._latest)))
            self._save()
        return ClaimReport(ClaimStatus.OK, "", claim.token, claim.owner)

    def _load(self, path: Path) -> None:
        try:
            entries = json.loads(path.read_text())
            for entry in entries[-MAX_STORES:]:
                claim = LeaseClaim.from_dict(entry)
                self._latest[claim.store] = claim
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:  # a ProtocolError is a ValueError
            self._latest.clear()
            _log.warning("%s cannot be read and counts as lost: a lease that is over may be taken (%s)", path, error)

    def _save(self) -> None:
        if self._path is None:
            return
        unfinished = self._path.with_name(self._path.name + ".part")
        text = json.dumps([claim.to_dict() for claim in self._latest.values()])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # a token must outlive a power cut, or who was cut off comes back
            unfinished.replace(self._path)
        except OSError as error:
            _log.warning("%s cannot be written; until this agent ends it remembers by itself (%s)", self._path, error)
            with contextlib.suppress(OSError):
                unfinished.unlink()


class Claimant:
    """The session's end: claims a lease, and asks before every use whether it is still the latest."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._claim: LeaseClaim | None = None
        line.settimeout(_ANSWER_TIMEOUT_S)

    def claim(self, claim: LeaseClaim) -> ClaimReport:
        """Claim a lease for this session; refused where a later one is known. Raises OSError, ProtocolError."""
        self._claim = claim
        return self._ask(claim)

    def find_refusal(self) -> str:
        """Why this session may use the board no longer; "" where it may. One that claimed nothing always may."""
        if self._claim is None:
            return ""
        try:
            report = self._ask(self._claim)
        except (OSError, ProtocolError) as error:
            return f"the agent cannot tell whether the lease {self._claim.token} still holds: {error}"
        return report.message if report.status is ClaimStatus.REFUSED else ""

    def _ask(self, claim: LeaseClaim) -> ClaimReport:
        try:
            self._line.sendall(claim.to_json().encode())
            answer = self._line.recv(_MAX_MESSAGE_BYTES)
        except OSError:
            self._line.close()  # a late answer would be taken for that to a later question
            raise
        return ClaimReport.from_json(answer.decode(errors="replace"))


@dataclasses.dataclass
class ClaimLine:
    """The listener's end of one session's line. `claim` is what the session holds, None while it claimed nothing."""

    sock: socket.socket
    claim: LeaseClaim | None = None

    @classmethod
    def open(cls) -> tuple[ClaimLine, socket.socket]:
        """A line, and the end that is the session's."""
        # Messages keep their bounds, and the end of either process is seen by the other.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        return cls(ours), theirs

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can come."""
        return self.sock.fileno() < 0

    def answer(self, fences: Fences) -> None:
        """Answer what the session asked, if it did; closes a line that has ended. Never waits."""
        if self.is_closed:
            return
        try:
            data = self.sock.recv(_MAX_MESSAGE_BYTES)
            if not data:
                self.close()
                return
            claim = LeaseClaim.from_json(data.decode())
            report = fences.raise_to(claim)
            if report.status is not ClaimStatus.REFUSED:
                self.claim = claim
            self.sock.send(report.to_json().encode())
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:  # a stock client's code runs in that process: it may say anything
            _log.warning("a session said what is no claim: %s", error)
            self.close()

    def close(self) -> None:
        """End the line. Safe to call twice."""
        self.sock.close()
