"""Serve metrics to Prometheus over HTTP, on this machine's loopback alone. What is served is `farm_metrics.py`'s.

`/metrics` holds the coordinator's own; `/targets` says, in the form of Prometheus' HTTP service discovery, where the
boards' own metrics can be scraped on this machine.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from farm.closing import Closing
from farm.errors import UnavailableError

HOST = "127.0.0.1"
# As for the tracker: a second farm on this machine finds room.
TRIES = 10


class Exporter(Closing):
    """Serves a registry until `close`."""

    def __init__(self, registry: CollectorRegistry, first_port: int) -> None:
        """Listen on the first free port from `first_port` on. Raises UnavailableError where ten are busy."""
        self._lock = threading.Lock()
        self._targets: list[dict[str, object]] = []
        self._server, self._thread = _start(registry, first_port)
        self._serve_metrics = make_wsgi_app(registry)
        self._server.set_app(self._serve)
        self.address: tuple[str, int] = (HOST, int(self._server.server_address[1]))

    def set_targets(self, targets: Mapping[str, tuple[str, tuple[str, int]]]) -> None:
        """Where boards' own metrics are reached here: board, its type, address. Replaces what was said before."""
        found: list[dict[str, object]] = [
            {"targets": [f"{host}:{port}"], "labels": {"board": name, "board_type": board_type}}
            for name, (board_type, (host, port)) in sorted(targets.items())
        ]
        with self._lock:
            self._targets = found

    def close(self) -> None:
        """Stop serving. Blocks for half a second at most."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path in ("/", "/metrics"):
            served: Iterable[bytes] = self._serve_metrics(environ, start_response)
            return served
        if path == "/targets":
            with self._lock:
                body = json.dumps(self._targets).encode()
            start_response("200 OK", [("Content-Type", "application/json")])
            return [body]
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"there are /metrics and /targets\n"]


def _start(registry: CollectorRegistry, first_port: int) -> tuple[WSGIServer, threading.Thread]:
    for port in range(first_port, min(first_port + TRIES - 1, 65535) + 1):
        with contextlib.suppress(OSError):
            return start_http_server(port, HOST, registry)
    raise UnavailableError(
        f"ports {first_port} to {first_port + TRIES - 1} are all in use, so metrics cannot be served",
        "Set FARM_METRICS_PORT to the first of ten free ports, or to 0 for no metrics.",
    )
