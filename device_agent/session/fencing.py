"""Lease fencing: keep the greatest token of each store on disk, and tell sessions whether theirs is still the latest.

Only the listener writes (`Fences`). A session asks over a socket pair (`Claimant`), so that a stopped session blocks no
other process. `rpc.py` decides what follows for a session.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
from pathlib import Path

from device_agent.clocks.guard import save_json
from device_agent.protocol import ClaimReport, ClaimStatus, LeaseClaim, ProtocolError

# A farm has one store; tests and newly set up coordinators add a few.
MAX_STORES = 64
FILE_NAME = "fences.json"
# The listener answers within milliseconds, or seconds if a slow disk must store the token first.
_ANSWER_TIMEOUT_S = 5.0
_MAX_MESSAGE_BYTES = 4096

_log = logging.getLogger(__name__)


class Fences:
    """The latest lease of each store, for one process; an answer is durable when given.

    `path` None: nothing outlives the process. An unreadable file counts as lost, an unwritable one is skipped; both are
    logged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._latest: dict[str, LeaseClaim] = {}  # ordered by when a store's token last rose
        if path is not None:
            self._load(path)

    def find_latest(self, store: str) -> LeaseClaim | None:
        """The latest known lease of a store."""
        return self._latest.get(store)

    def raise_to(self, claim: LeaseClaim) -> ClaimReport:
        """Record a lease as the latest of its store, unless a later one is known."""
        latest = self._latest.get(claim.store)
        if latest is not None and claim.token < latest.token:
            return ClaimReport(
                ClaimStatus.REFUSED,
                f"the lease {claim.token} of {claim.owner or 'an unnamed client'} is over: "
                f"{latest.owner or 'an unnamed client'} has had the board since, under lease {latest.token}",
                latest.token,
                latest.owner,
            )
        if latest is not None and claim.token == latest.token and not claim.is_same(latest):
            return ClaimReport(
                ClaimStatus.REFUSED,
                f"the lease {claim.token} of {claim.owner or 'an unnamed client'} is not the one of that number that "
                f"{latest.owner or 'an unnamed client'} has here: its store has been put back to an earlier state",
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
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A token must survive a power cut, or a fenced client returns.
            save_json(self._path, [claim.to_dict() for claim in self._latest.values()])
        except OSError as error:
            _log.warning("%s cannot be written; until this agent ends it remembers by itself (%s)", self._path, error)


class Claimant:
    """The session's end: claims a lease, and verifies before every use that it is still the latest."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._claim: LeaseClaim | None = None
        line.settimeout(_ANSWER_TIMEOUT_S)

    def claim(self, claim: LeaseClaim) -> ClaimReport:
        """Claim a lease for this session; refused if a later one is known. Raises OSError, ProtocolError."""
        self._claim = claim
        return self._ask(claim)

    def find_refusal(self) -> str:
        """Why this session may no longer use the board; "" if it may. A session without a claim always may."""
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
            self._line.close()  # a late answer would pass for the answer to a later question
            raise
        return ClaimReport.from_json(answer.decode(errors="replace"))


@dataclasses.dataclass
class ClaimLine:
    """The listener's end of one session's line. `claim` is the session's lease, None before a claim."""

    sock: socket.socket
    claim: LeaseClaim | None = None

    @classmethod
    def open(cls) -> tuple[ClaimLine, socket.socket]:
        """Create a line; return it with the session's end."""
        # Keeps message boundaries, and each side notices the other's end.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        return cls(ours), theirs

    @property
    def is_closed(self) -> bool:
        return self.sock.fileno() < 0

    def answer(self, fences: Fences) -> None:
        """Answer the session's pending question; close an ended line. Never blocks."""
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
        except (OSError, ValueError) as error:  # that process runs a stock client's code: it may send anything
            _log.warning("invalid claim from a session: %s", error)
            self.close()

    def close(self) -> None:
        """Close the line. Idempotent."""
        self.sock.close()
