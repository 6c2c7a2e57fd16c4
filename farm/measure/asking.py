"""Request a board before there is a session: fence its agent, wait for the tracker, explain who holds it."""

from __future__ import annotations

import dataclasses
import logging
import math
import struct
import time
import weakref
from typing import Any

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from device_agent import protocol
from device_agent.protocol import ClaimReport, ClaimStatus, LeaseClaim
from farm.connectivity.tracker import Tracker
from farm.connectivity.wire import ENDED, explain_end
from farm.errors import BoardBusyError, DeadlineError, FarmError, LeaseOverError, TransientError, UnavailableError
from farm.values import Lease

# An agent with a client answers all the same; ending a session takes it 2 s at most, a tunnel some more.
FENCE_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 1 << 16
_MAX_TEXT = 200
# A tracker tells of all its agents at once: a thousand boards that are opened together would ask a thousand times.
_KNOWN_S = 5.0
_agents: weakref.WeakKeyDictionary[Tracker, tuple[float, dict[str, Any]]] = weakref.WeakKeyDictionary()


# Used only for the text of an error.
_HOLDER_TIMEOUT_S = 2.0
_log = logging.getLogger(__name__)


def to_claim(lease: Lease) -> LeaseClaim:
    """Describe a lease for the agent."""
    return LeaseClaim(lease.store, lease.token, lease.owner[:_MAX_TEXT], lease.purpose[:_MAX_TEXT], lease.nonce)


async def find_agent(tracker: Tracker, key: str, timeout_s: float = FENCE_TIMEOUT_S) -> tuple[str, int] | None:
    """Return the address of the agent with this key from the tracker; None where none has registered.

    What the tracker told a moment ago is used again. Raises what `Tracker.fetch_summary` raises.
    """
    at_s, agents = _agents.get(tracker, (-math.inf, {}))
    if key not in agents or time.monotonic() - at_s > _KNOWN_S:
        infos = (await tracker.fetch_summary(timeout_s)).get("server_info", ())
        # The last to register: an older one may be dead without being known to be.
        agents = {str(each.get("key")).removeprefix("server:"): each.get("addr") for each in infos}
        _agents[tracker] = time.monotonic(), agents
    host, port = agents.get(key) or (None, None)
    return (str(host), int(port)) if host and port else None


async def send_fence(address: tuple[str, int], claim: LeaseClaim, timeout_s: float = FENCE_TIMEOUT_S) -> ClaimReport:
    """Have the agent at `address` record this lease as its store's latest and end sessions of earlier ones.

    Returns its answer, also a refusal. Raises TransientError where it is unreachable or late, UnavailableError where it
    does not know fences.
    """
    where = f"the agent at {address[0]}:{address[1]}"
    key = protocol.fence_key(claim).encode()
    try:
        with anyio.fail_after(timeout_s):
            async with await anyio.connect_tcp(*address) as stream:
                answer = BufferedByteReceiveStream(stream)
                await stream.send(struct.pack("<ii", protocol.RPC_MAGIC, len(key)) + key)
                (code,) = struct.unpack("<i", await answer.receive_exactly(4))
                if code != protocol.RPC_SUCCESS:
                    raise UnavailableError(
                        f"{where} knows no fences: it is older than this farm, or a stock TVM server",
                        "Update device-agent on the board.",
                    )
                (size,) = struct.unpack("<i", await answer.receive_exactly(4))
                if not 0 <= size <= _MAX_ANSWER_BYTES:
                    raise ValueError(f"an answer of {size} bytes")
                return ClaimReport.from_json((await answer.receive_exactly(size)).decode())
    except (OSError, *ENDED) as error:
        raise TransientError(f"{where} did not take the fence of lease {claim.token}: {explain_end(error)}") from error
    except ValueError as error:  # ProtocolError and UnicodeDecodeError are such
        raise UnavailableError(f"{where} gave an invalid reply to a fence: {error}") from error


@dataclasses.dataclass(frozen=True)
class AgentAddress:
    """The address of one agent, in place of a tracker: for a board with one client."""

    host: str
    port: int

    async def request(self, key: str, timeout_s: float) -> tuple[str, int, str]:
        """Return host, port and connection key, as a tracker would."""
        del timeout_s  # the agent is there or not; connecting has a deadline of its own
        return self.host, self.port, key


async def ask_for_board(
    tracker: Tracker | AgentAddress, key: str, claim: LeaseClaim | None, timeout_s: float, doubted: bool
) -> tuple[str, int, str]:
    """Fence the board and wait until it is offered: its host, port and connection key.

    Raises LeaseOverError, DeadlineError, TransientError, UnavailableError, BoardBusyError where a client holds it. For
    a `doubted` board: LeaseOverError, DeadlineError where its agent does not answer, else BoardBusyError.
    """
    await _send_fence(tracker, key, claim, FENCE_TIMEOUT_S, doubted)
    try:
        return await tracker.request(key, timeout_s)
    except FarmError as error:
        busy = isinstance(error, DeadlineError)
        report = await _send_fence(tracker, key, claim, _HOLDER_TIMEOUT_S, doubted) if busy else None
        holder = report.holder if report is not None else ""
        if doubted:
            who = f"{holder or 'another client'} holds the board without a lease of the farm's"
            raise BoardBusyError(who if busy else error.message) from error
        if not holder:
            raise
        raise BoardBusyError(f"{error.message}; it is held by {holder}", error.hint) from error


def require_latest(key: str, report: ClaimReport) -> ClaimReport:
    """Check an agent's answer to a claim. Raises LeaseOverError where it knows a later lease."""
    if report.status is ClaimStatus.REFUSED:
        error = LeaseOverError(f"the board {key} refused us: {report.message}", "Take the board anew.")
        error.greatest = report.greatest
        raise error
    return report


async def _send_fence(
    tracker: Tracker | AgentAddress, key: str, claim: LeaseClaim | None, timeout_s: float, doubted: bool
) -> ClaimReport | None:
    """Return the agent's answer; None where there is none: then the request or the claim decides."""
    if claim is None:
        return None
    address: tuple[str, int] | None = None
    try:
        if isinstance(tracker, AgentAddress):
            address = (tracker.host, tracker.port)
        else:
            address = await find_agent(tracker, key, timeout_s)
        if address is None:
            return None
        report = await send_fence(address, claim, timeout_s)
    except (TransientError, UnavailableError) as error:
        if doubted and address is not None and isinstance(error, TransientError):
            if isinstance(error.__cause__, TimeoutError):
                raise DeadlineError(f"its agent did not answer within {timeout_s:g} s: {error.message}") from error
            # The connection was just cut, or the agent has ended: the keeper finds out.
            raise BoardBusyError(error.message) from error
        _log.info("%s", error)
        return None
    return require_latest(key, report)
