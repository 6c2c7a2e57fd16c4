"""Ask for a board before there is a session (fence, tracker, holder), and check all answers, which are not trusted.

The protocol checks types, bounds and text (`device_agent.protocol.load_json`). Here values must be possible and of
this board.
`farm.connectivity.frames` decides which frames reach the farm.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import struct
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from device_agent import protocol
from device_agent.protocol import (
    PROTOCOL_VERSION,
    ClaimReport,
    ClaimStatus,
    Description,
    Energy,
    LeaseClaim,
    Outcome,
    PowerWindow,
    ProtocolError,
    Status,
    load_json,
)
from farm.connectivity.tracker import Tracker
from farm.connectivity.wire import ENDED, explain_end
from farm.errors import BoardBusyError, DeadlineError, FarmError, LeaseOverError, TransientError, UnavailableError
from farm.values import Lease

A = TypeVar("A", bound=protocol.Message)

# A year: no time that a board reports is longer.
_LONGEST_S = 3.2e7
# Since 1970, or since a board's start by all its cores together: the year 2286, and 40 years of eight cores.
_LATEST_S = 1e10
_SINCE_THEN = frozenset(["started_at", "started_s", "busy_s"])
# No watt, joule or hertz of a board is near; sums of a few are still finite.
_HIGHEST = 1e15
_MAX_SAMPLES = 100_000
# Absolute zero, and above any board's melting point.
_TEMPERATURES_C = (-273.15, 1000.0)
# A sensor's noise is on both sides of zero; so is what is left above the idle baseline.
_MAY_BE_NEGATIVE = frozenset(
    ["power_w", "power_ci_w", "energy_j", "energy_ci_j", "per_call_ci_j", "above_idle_j", "above_idle_ci_j", "samples"]
)
# Statuses that only the coordinator sets.
_NEVER_A_BOARDS = frozenset({Status.BUILD_FAILED, Status.BUILD_TIMEOUT, Status.WRONG_RESULT, Status.BOARD_LOST})
# An agent with a client answers all the same; ending a session takes it 2 s at most, a tunnel some more.
FENCE_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 1 << 16
_MAX_TEXT = 200
# A tracker tells of all its agents at once: a thousand boards that are opened together would ask a thousand times.
_KNOWN_S = 5.0
# Used only for the text of an error.
_HOLDER_TIMEOUT_S = 2.0
_log = logging.getLogger(__name__)


def require_own_protocol(key: str, description: str) -> None:
    """Raise UnavailableError where an agent speaks another version, ProtocolError where it names none."""
    try:
        version = load_json(description)["protocol_version"]
    except (ValueError, TypeError, LookupError) as error:
        raise ProtocolError("its description names no protocol version") from error
    if version != PROTOCOL_VERSION:
        newer = isinstance(version, int) and version > PROTOCOL_VERSION
        raise UnavailableError(
            f"the agent on {key} speaks protocol {version}, this farm speaks {PROTOCOL_VERSION}",
            "The agent is newer: update tvm-farm here."
            if newer
            else "The agent is older: update device-agent on the board.",
        )


def read_text(value: object) -> str:
    """Return a text answer. Raises ProtocolError."""
    if not isinstance(value, str):
        raise ProtocolError(f"an answer of type {type(value).__name__} instead of text")
    return value


def read_bytes(value: object) -> bytes:
    """Return an answer of bytes. Raises ProtocolError; `bytes` would take a number for a size."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ProtocolError(f"an answer of type {type(value).__name__} instead of bytes")
    return bytes(value)


def read_answer(kind: type[A], value: object, board: str, simulated: bool | None = None) -> A:
    """Parse a board's answer. Raises ProtocolError where it is malformed, impossible, or another board's.

    `simulated`: the board's earlier statement; None for its first answer.
    """
    answer = kind.from_json(read_text(value))
    name = answer.name if isinstance(answer, Description) else getattr(answer, "board", board)
    if name != board:
        raise ProtocolError(f"it says that it is {name!r}, not {board!r}")
    if simulated is not None and getattr(answer, "simulated", simulated) is not simulated:
        raise ProtocolError(f"it says simulated: {not simulated}, after it said {simulated}")
    for said, problem in _find_problems(answer):
        raise ProtocolError(f"{kind.__name__}.{said} {problem}")
    if isinstance(answer, Outcome):
        _check_outcome(answer)
    return answer


def _check_outcome(outcome: Outcome) -> None:
    if outcome.status in _NEVER_A_BOARDS:
        raise ProtocolError(f"Outcome.status {outcome.status} is not for a board to say")
    if len(outcome.latency_s) > _MAX_SAMPLES:
        raise ProtocolError(f"Outcome.latency_s has {len(outcome.latency_s)} samples")
    if not all(0 < sample < _LONGEST_S for sample in outcome.latency_s):
        raise ProtocolError("Outcome.latency_s has an impossible sample")
    if outcome.status is Status.OK and not outcome.latency_s:
        raise ProtocolError("Outcome.latency_s is empty with the status ok")


def require_possible(outcome: Outcome) -> None:
    """Raise ProtocolError where an outcome of another farm has an impossible number."""
    for said, problem in _find_problems(outcome):
        raise ProtocolError(f"Outcome.{said} {problem}")
    if len(outcome.latency_s) > _MAX_SAMPLES:
        raise ProtocolError(f"Outcome.latency_s has {len(outcome.latency_s)} samples")


def _find_problems(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """List the fields with impossible numbers in an answer and its parts."""
    if isinstance(value, protocol.Message):
        if isinstance(value, Energy) and value.busy.enough and value.per_call_j == 0:
            yield "per_call_j", "is zero"
        if isinstance(value, PowerWindow) and not 0 < value.window_s < _LONGEST_S:
            yield "window_s", "is no window"
        for field in dataclasses.fields(value):  # type: ignore[arg-type]  # mypy: every message is a dataclass
            yield from _find_problems(getattr(value, field.name), field.name)
    elif isinstance(value, tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _find_problems(item, name)
    elif isinstance(value, int | float):
        lowest, highest = _find_bounds(name)
        if not lowest <= value <= highest:
            yield name, f"is {value:g}"


def _find_bounds(name: str) -> tuple[float, float]:
    """Return the bounds of a field's value."""
    if name == "temperature_c":
        return _TEMPERATURES_C
    if name in _SINCE_THEN:
        return 0, _LATEST_S
    if name.endswith("_s"):
        return 0, _LONGEST_S
    return -_HIGHEST if name in _MAY_BE_NEGATIVE else 0, _HIGHEST


_agents: weakref.WeakKeyDictionary[Tracker, tuple[float, dict[str, Any]]] = weakref.WeakKeyDictionary()


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
