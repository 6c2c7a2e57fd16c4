"""Connections to the page's server: a limit per address, and a deadline for each request's head.

Uvicorn has neither: connections that say nothing would take all places. A request's body has its deadline in `app`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import weakref
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# What may wait or stall at once, watching pages among it.
MOST_CONNECTIONS = 1000
# One address never takes all places. A proxy and all who come by SSH are one address: loopback.
MOST_OF_ADDRESS = MOST_CONNECTIONS // 2
# Those in a TLS handshake among them, which uvicorn does not count: each takes a descriptor.
MOST_ACCEPTED = 2 * MOST_CONNECTIONS
# A browser sends a head at once; a slow link needs a second or two.
HEAD_TIMEOUT_S = 10.0
_REFUSAL = b"too many connections from this address\n"
_REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_REFUSAL), _REFUSAL)
)


class Listener(socket.socket):
    """A listening socket that refuses connections beyond an address's share, before a byte of them is read."""

    speaks_tls = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._networks: weakref.WeakKeyDictionary[socket.socket, str] = weakref.WeakKeyDictionary()

    def accept(self) -> tuple[socket.socket, Any]:
        """See `socket.accept`. Raises ConnectionAbortedError for one that was refused, which asyncio passes over."""
        connection, address = super().accept()
        network = find_network(address[0])
        accepted = [each for sock, each in self._networks.items() if sock.fileno() >= 0]
        if len(accepted) < MOST_ACCEPTED and accepted.count(network) < MOST_OF_ADDRESS:
            self._networks[connection] = network
            return connection, address
        with contextlib.suppress(OSError), connection:
            connection.setblocking(False)
            if not self.speaks_tls:
                connection.send(_REFUSED)
        raise ConnectionAbortedError(f"too many connections from {network}")


class Connection(H11Protocol):
    """One connection. It is closed where the head of a request is not whole after `HEAD_TIMEOUT_S`."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_deadline()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        # Between requests uvicorn's own keep-alive time counts, until the first byte of the next one.
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._end)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        self._deadline = None
        self.transport.abort()


def find_network(text: str) -> str:
    """What counts as one address: of IPv6 a /64, which one machine has whole, and all of loopback."""
    try:
        address: Any = ipaddress.ip_address(text)
    except ValueError:
        return text
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    return str(address) if address.version == 4 else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
