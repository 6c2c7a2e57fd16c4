"""The interface for writing clock files, between `controller` and the privileged side (`client`, `helper`).

A transaction begins with a snapshot of every clock file on disk, and ends with that snapshot restored.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from typing import Any, Protocol

from device_agent.errors import AgentError, BusyError, ClockError, HelperUnavailableError, RefusedError, UnsafeError

HEARTBEAT_S = 0.5
# A holder silent for this long loses its clocks; a loaded machine may miss three beats.
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
    """Encode one packet."""
    return json.dumps(message, separators=(",", ":")).encode()


def unpack(packet: bytes) -> dict[str, Any]:
    """Decode a packet. Raises ValueError."""
    try:
        message = json.loads(packet)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not an object")  # noqa: TRY004  what came over the wire is a value
    return message


def receive(sock: socket.socket, limit: int) -> bytes | None:
    """The next packet; b"" once the peer has gone, None for one longer than `limit`. Raises OSError."""
    try:
        packet, _, flags, _ = sock.recvmsg(limit)
    except ConnectionResetError:
        # The peer hung up with unread data; its last packet is behind this error.
        packet, _, flags, _ = sock.recvmsg(limit)
    return None if flags & socket.MSG_TRUNC else packet


def describe_error(error: Exception) -> dict[str, Any]:
    """Encode an error as an answer."""
    if isinstance(error, OSError):
        return {"error": "os", "errno": error.errno, "message": error.strerror or str(error), "path": error.filename}
    kind = next((name for name, known in _KINDS.items() if type(error) is known), "clock")
    return {"error": kind, "message": str(error)}


def make_error(answer: dict[str, Any]) -> Exception:
    """Decode the error in an answer."""
    message = str(answer.get("message", ""))
    if answer["error"] == "os":
        number, path = answer.get("errno"), answer.get("path")
        return OSError(number if isinstance(number, int) else 5, message, path if isinstance(path, str) else None)
    return _KINDS.get(str(answer["error"]), ClockError)(message)


@dataclasses.dataclass(frozen=True)
class AccessStatus:
    """Who holds the clocks ("": no one) and why they cannot be trusted ("": they can)."""

    holder: str = ""
    unsafe: str = ""


class ClockAccess(Protocol):
    """Reads and writes clock files with root's rights. One transaction at a time.

    Every method has a deadline and raises HelperUnavailableError when no answer comes.
    """

    def status(self) -> AccessStatus:
        """Ask without holding anything."""

    def begin(self, holder: str) -> None:
        """Become the one holder: snapshot every clock file to disk. Heartbeats go on until `restore`.

        Raises BusyError when another client holds the clocks, UnsafeError when they cannot be trusted, ClockError when
        the snapshot cannot be written (disk full). Nothing has changed then.
        """

    def read(self, path: str) -> str:
        """Read a clock file, root-only ones included. Raises OSError as the kernel, RefusedError off the list."""

    def write(self, path: str, text: str) -> None:
        """Write one value within the transaction. Raises OSError as the kernel, RefusedError off the list."""

    def set_power_mode(self, mode_id: int) -> str:
        """Run `nvpmodel -m` within the transaction; never reboots. Raises OSError, RefusedError."""

    def restore(self) -> tuple[str, ...]:
        """End the transaction: restore every file from the snapshot. Returns notes.

        Raises UnsafeError when a file does not go back; the board then stays unsafe.
        """

    def clear_unsafe(self, force: bool = False) -> tuple[str, ...]:
        """For an operator: retry a failed restore, and trust the clocks again. Returns notes.

        `force` takes the clocks from their holder, and clears `unsafe` even if the restore fails again. Raises
        UnsafeError when a file does not go back, BusyError when a client holds the clocks.
        """

    def close(self) -> None:
        """Release the connection; the helper restores an open transaction."""
