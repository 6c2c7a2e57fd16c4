"""What an agent tells the tracker, with its port on the board replaced by the one of its forward here.

TVM's tracker tells clients the port that the agent named. Through a tunnel that is another port, and two boards may
name the same one. Only what an agent has to say is let through: a board may offer itself and nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from device_agent.protocol import load_json

# From tvm/rpc/base.py of 0.27.
_MAGIC = struct.pack("<i", 0x2F271)
_PUT, _UPDATE_INFO, _GET_PENDING_MATCHKEYS = 3, 5, 7
# As the tracker's own limit for agents in `device_agent/tracker.py`.
_MAX_MESSAGE_BYTES = 1 << 20


class PortRewriter:
    """Turns the bytes of one connection from agent to tracker into those for the tracker.

    `key` is the board's key at the tracker. `find_local_port` is told the agent's port and answers with the local one.
    """

    def __init__(self, key: str, find_local_port: Callable[[int], int]) -> None:
        self._key = key
        self._find_local_port = find_local_port
        self._pending = bytearray()
        self._greeted = False

    def __call__(self, data: bytes) -> bytes:
        """What to pass on now; what is incomplete waits. Raises ValueError for anything else than an agent's words."""
        self._pending += data
        out = bytearray()
        if not self._greeted:
            if not _MAGIC.startswith(self._pending[:4]):
                raise ValueError("this is no agent's greeting")
            if len(self._pending) < 4:
                return b""
            self._greeted = True
            out += _MAGIC
            del self._pending[:4]
        while len(self._pending) >= 4:
            (size,) = struct.unpack_from("<i", self._pending)
            if not 0 < size <= _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes")
            if len(self._pending) < 4 + size:
                break
            message = self._rewrite(load_json(bytes(self._pending[4 : 4 + size])))
            del self._pending[: 4 + size]
            text = json.dumps(message).encode()
            out += struct.pack("<i", len(text)) + text
        return bytes(out)

    def _rewrite(self, message: Any) -> Any:
        match message:
            case [int(code), str(key), [int(port), str(match_key)], _] if code == _PUT:
                self._require_own(key)
                _require_port(port)
                # No address of its own: the tracker takes the one that it sees, which is the tunnel's end here.
                return [_PUT, key, [self._find_local_port(port), match_key], None]
            case [int(code), {"key": str(name), "addr": [_, int(port)]}] if code == _UPDATE_INFO:
                self._require_own(name.removeprefix("server:"))
                _require_port(port)
                return [_UPDATE_INFO, {"key": name, "addr": [None, self._find_local_port(port)]}]
            case [int(code)] if code == _GET_PENDING_MATCHKEYS:
                return message
        raise ValueError("this is nothing that an agent says to a tracker")

    def _require_own(self, key: str) -> None:
        if key != self._key:
            raise ValueError(f"the board {self._key!r} speaks for {key!r}")


def _require_port(port: int) -> None:
    if not 0 < port < 1 << 16:
        raise ValueError(f"{port} is no port")
