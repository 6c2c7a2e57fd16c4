"""The server's process: where it listens, over what, and how it ends; one per FARM_HOME."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from farm.connectivity.services_state import hold_lock, write_whole
from farm.errors import UnavailableError, UsageError
from farm.processes.listening import raise_descriptor_limit
from farm.settings import Settings
from farm.web.access import Access, read_token
from farm.web.app import make_app
from farm.web.connections import MOST_CONNECTIONS, Connection, Listener
from farm.web.running import FILE, LOCK

# As for the tracker: a second farm on this machine finds room.
_TRIES = 10
# Requests under way are ended after this; updates are cut at once.
_GRACE_S = 2


@dataclasses.dataclass(frozen=True)
class WebPlace:
    """Where to listen; `names` are those that the server answers to. Raises UsageError where nobody may listen so."""

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
        """Whether this machine alone reaches it."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


def serve(settings: Settings, place: WebPlace, announce: Callable[[str], None]) -> None:
    """Serve until told to end; `announce` is given the address once it is listened on.

    Raises UnavailableError where no port is free, or this FARM_HOME has a server already.
    """
    home = settings.home_path
    raise_descriptor_limit()
    token = read_token(home)
    assert token  # made now, so that a disk that takes nothing is told of at once
    access = Access(home, private=place.is_private, secure=place.cert is not None, names=_list_names(place))
    with hold_lock(home / LOCK, "the farm's page is served already", "`farm web url` says where."):
        sock = _listen(place)
        host = f"[{place.host}]" if ":" in place.host else place.host
        url = f"{'https' if place.cert else 'http'}://{host}:{sock.getsockname()[1]}/"
        app = make_app(settings, access)
        config = uvicorn.Config(
            app,
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
        write_whole(home / FILE, json.dumps({"pid": os.getpid(), "url": url}))
        try:
            announce(url)
            _Server(config).run(sockets=[sock])
        finally:
            (home / FILE).unlink(missing_ok=True)
            sock.close()


class _Server(uvicorn.Server):
    """Lets watchers go when it is told to end: their answers would never be over."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends it in good order; a terminal may send several."""
        self.should_exit = True
        if sig != signal.SIGINT:
            logging.getLogger(__name__).info("ending")


def _list_names(place: WebPlace) -> tuple[str, ...]:
    names = place.names
    if not place.is_private:
        names = (*names, place.host, socket.gethostname(), socket.getfqdn())
    return names


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
