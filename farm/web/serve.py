"""The server's process: addresses, connections and shutdown; one per FARM_HOME."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import signal
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from farm.errors import UnavailableError, UsageError
from farm.processes.listening import raise_descriptor_limit
from farm.settings import Settings
from farm.web.access import Access, read_token
from farm.web.app import make_app
from farm.web.running import WEB

# Most connections at once, watching pages included.
MOST_CONNECTIONS = 1000
# The share of one address. A proxy and all SSH forwards are one address: loopback.
MOST_OF_ADDRESS = MOST_CONNECTIONS // 2
# Connections in a TLS handshake included, which uvicorn does not count: each takes a descriptor.
MOST_ACCEPTED = 2 * MOST_CONNECTIONS
# A browser sends a head at once; a slow link needs a second or two.
HEAD_TIMEOUT_S = 10.0
_REFUSAL = b"too many connections from this address\n"
_REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_REFUSAL), _REFUSAL)
)
# As for the tracker: a second farm on this machine finds room.
_TRIES = 10
# Running requests end after this; updates end at once.
_GRACE_S = 2


class Listener(socket.socket):
    """A listening socket that refuses connections beyond an address's share, before it reads a byte."""

    speaks_tls = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._networks: weakref.WeakKeyDictionary[socket.socket, str] = weakref.WeakKeyDictionary()

    def accept(self) -> tuple[socket.socket, Any]:
        """See `socket.accept`. Raises ConnectionAbortedError for a refused one, which asyncio ignores."""
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
    """One connection. Close it where a request's head is incomplete after `HEAD_TIMEOUT_S`."""

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
    """Return what counts as one address: a /64 of IPv6, which one machine has whole, and all of loopback."""
    try:
        address: Any = ipaddress.ip_address(text)
    except ValueError:
        return text
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    return str(address) if address.version == 4 else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


@dataclasses.dataclass(frozen=True)
class WebPlace:
    """Return where to listen; the server answers to `names`. Raises UsageError for an address that is not allowed."""

    host: str = "127.0.0.1"
    port: int = 8642
    cert: Path | None = None
    key: Path | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise UsageError("a certificate and its key go together", "Give --tls-cert and --tls-key.")
        if not self.is_private and self.cert is None:
            raise UsageError(
                f"{self.host} can be reached from other machines, where the token would be sent in the clear",
                "Give --tls-cert and --tls-key, or stay on 127.0.0.1 and come by SSH (ssh -L 8642:127.0.0.1:8642).",
            )
        for file in filter(None, (self.cert, self.key)):
            if not os.access(file, os.R_OK):
                raise UsageError(f"{file} cannot be read")

    @property
    def is_private(self) -> bool:
        """Return whether only this machine reaches the address."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


def serve(settings: Settings, place: WebPlace, announce: Callable[[str], None]) -> None:
    """Serve until a signal ends it; call `announce` with the address.

    Raises UnavailableError where no port is free, or this FARM_HOME has a server already.
    """
    home = settings.home_path
    raise_descriptor_limit()
    token = read_token(home)
    assert token  # made now, so that a full disk is reported at once
    own = () if place.is_private else (place.host, socket.gethostname(), socket.getfqdn())
    access = Access(home, private=place.is_private, secure=place.cert is not None, names=(*place.names, *own))
    with WEB.hold(home), _listen(place) as sock:
        host = f"[{place.host}]" if ":" in place.host else place.host
        url = f"{'https' if place.cert else 'http'}://{host}:{sock.getsockname()[1]}/"
        config = uvicorn.Config(
            make_app(settings, access),
            log_level="warning",
            access_log=False,
            ssl_certfile=place.cert,
            ssl_keyfile=place.key,
            limit_concurrency=MOST_CONNECTIONS,
            http=Connection,
            timeout_graceful_shutdown=_GRACE_S,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=32 << 10,
            ws="none",
        )
        WEB.publish(home, url=url)
        announce(url)
        _Server(config).run(sockets=[sock])


class _Server(uvicorn.Server):
    """Disconnects watchers at shutdown: their responses never end by themselves."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End at the first signal; a terminal may send several."""
        self.should_exit = True
        if sig != signal.SIGINT:
            logging.getLogger(__name__).info("ending")


def _listen(place: WebPlace) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    for port in range(place.port, min(place.port + _TRIES, 65536)) if place.port else (0,):
        sock = Listener(family, socket.SOCK_STREAM)
        sock.speaks_tls = place.cert is not None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((place.host, port))
            sock.listen(128)
        except OSError as error:
            sock.close()
            last = error
            continue
        return sock
    raise UnavailableError(
        f"nothing can listen on {place.host} from port {place.port} on: {last.strerror}", "Give another with --port."
    )
