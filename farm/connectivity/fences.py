"""Telling an agent that a lease is the latest, before and beside any session: the fence greeting, with its deadline.

What the agent makes of it is in `device_agent/fencing.py`; a session claims its lease itself (`farm.measure.session`).
"""

from __future__ import annotations

import socket
import struct
import time

from device_agent import protocol
from device_agent.protocol import ClaimReport, LeaseClaim
from farm.connectivity.tracker import Tracker
from farm.errors import TransientError, UnavailableError
from farm.values import Lease

# An agent that serves somebody answers all the same; ending a session takes it 2 s at most, a tunnel some more.
FENCE_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 1 << 16
_MAX_TEXT = 200


def to_claim(lease: Lease) -> LeaseClaim:
    """What is said of a lease to the agent."""
    return LeaseClaim(lease.store, lease.token, lease.owner[:_MAX_TEXT], lease.purpose[:_MAX_TEXT], lease.nonce)


def find_agent(tracker: Tracker, key: str, timeout_s: float = FENCE_TIMEOUT_S) -> tuple[str, int] | None:
    """Where the agent with this key listens, as the tracker knows it; None where none has registered.

    Raises what `Tracker.fetch_summary` raises.
    """
    found = None
    for info in tracker.fetch_summary(timeout_s).get("server_info", ()):
        host, port = info.get("addr") or (None, None)
        if info.get("key") == f"server:{key}" and host and port:
            found = (str(host), int(port))  # the last to come: an older one may not be known to be dead
    return found


def send_fence(address: tuple[str, int], claim: LeaseClaim, timeout_s: float = FENCE_TIMEOUT_S) -> ClaimReport:
    """Have the agent at `address` take this lease for the latest of its store and end sessions of earlier ones.

    Returns its answer, also where that is a refusal. Raises TransientError where it cannot be reached or does not
    answer in time, UnavailableError where what answers knows no fences.
    """
    where = f"the agent at {address[0]}:{address[1]}"
    deadline = time.monotonic() + timeout_s
    key = protocol.fence_key(claim).encode()
    try:
        with socket.create_connection(address, timeout=timeout_s) as sock:
            sock.sendall(struct.pack("<ii", protocol.RPC_MAGIC, len(key)) + key)
            (code,) = struct.unpack("<i", _read(sock, 4, deadline))
            if code != protocol.RPC_SUCCESS:
                raise UnavailableError(
                    f"{where} knows no fences: it is older than this farm, or a stock TVM server",
                    "Update device-agent on the board.",
                )
            (size,) = struct.unpack("<i", _read(sock, 4, deadline))
            if not 0 <= size <= _MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {size} bytes")
            return ClaimReport.from_json(_read(sock, size, deadline).decode())
    except (OSError, EOFError) as error:
        raise TransientError(f"{where} did not take the fence of lease {claim.token}: {error}") from error
    except ValueError as error:  # ProtocolError and UnicodeDecodeError are such
        raise UnavailableError(f"{where} answers nonsense to a fence: {error}") from error


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise EOFError("it closed the connection")
        data += chunk
    return data
