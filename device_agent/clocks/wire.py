"""What the clock helper and its clients say to each other: one JSON document per packet of a Unix socket.

Requests are `{"id", "op", ...}`, answers `{"id", "value"}` or `{"id", "error", "message", ...}`. A heartbeat has no id
and gets no answer. `{"ended": reason}` tells a holder that its transaction is over. Packets keep their bounds
(SOCK_SEQPACKET), so nobody can make the other side wait for the rest of a message.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from device_agent.errors import (
    AgentError,
    BusyError,
    ClockError,
    HelperUnavailableError,
    RefusedError,
    UnsafeError,
)

HEARTBEAT_S = 0.5
# A holder that is silent for this long has lost its clocks; in between, a loaded machine may lose three beats.
HOLDER_TIMEOUT_S = 2.0
# The longest request is a path and a value; the longest answer a firmware's table.
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 128 << 10

_KINDS: dict[str, type[AgentError]] = {
    "busy": BusyError,
    "clock": ClockError,
    "ended": HelperUnavailableError,
    "refused": RefusedError,
    "unsafe": UnsafeError,
}


def pack(message: dict[str, Any]) -> bytes:
    """One packet."""
    return json.dumps(message, separators=(",", ":")).encode()


def unpack(packet: bytes) -> dict[str, Any]:
    """The message in a packet. Raises ValueError."""
    try:
        message = json.loads(packet)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not an object")  # noqa: TRY004  what came over the wire is a value
    return message


def receive(sock: socket.socket, limit: int) -> bytes | None:
    """The next packet, b"" when the other side has gone. None: it was longer than `limit`. Raises OSError."""
    try:
        packet, _, flags, _ = sock.recvmsg(limit)
    except ConnectionResetError:
        # It hung up before it had read everything; what it said last lies behind this error.
        packet, _, flags, _ = sock.recvmsg(limit)
    return None if flags & socket.MSG_TRUNC else packet


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as an answer."""
    if isinstance(error, OSError):
        return {"error": "os", "errno": error.errno, "message": error.strerror or str(error), "path": error.filename}
    kind = next((name for name, known in _KINDS.items() if type(error) is known), "clock")
    return {"error": kind, "message": str(error)}


def make_error(answer: dict[str, Any]) -> Exception:
    """The error in an answer."""
    message = str(answer.get("message", ""))
    if answer["error"] == "os":
        number, path = answer.get("errno"), answer.get("path")
        return OSError(number if isinstance(number, int) else 5, message, path if isinstance(path, str) else None)
    return _KINDS.get(str(answer["error"]), ClockError)(message)
