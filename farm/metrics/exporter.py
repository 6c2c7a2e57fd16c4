"""Serve metrics to Prometheus over HTTP, on this machine's loopback alone. What is served is `farm_metrics.py`'s.

`/metrics` holds the coordinator's own; `/targets` says, in the form of Prometheus' HTTP service discovery, where the
boards' own metrics can be scraped on this machine.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Mapping
from types import TracebackType

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from farm.errors import UnavailableError

HOST = "127.0.0.1"
# As for the tracker: a second farm on this machine finds room.
TRIES = 10
# A client that connects and says nothing holds a thread for so long.
_CLIENT_TIMEOUT_S = 5.0


class Exporter:
    """Serves a registry until `close`."""

    def __init__(self, registry: CollectorRegistry, first_port: int) -> None:
        """Listen on the first free port from `first_port` on. Raises UnavailableError where ten are busy."""
        self._registry = registry
        self._lock = threading.Lock()
        self._targets: list[dict[str, object]] = []
        self._server = _open(self, first_port)
        self.address: tuple[str, int] = (HOST, int(self._server.server_address[1]))
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.5}, name="farm-metrics", daemon=True
        ).start()

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

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def answer(self, path: str, accept: str) -> tuple[str, bytes] | None:
        """Content type and body for a path, None where there is nothing."""
        if path in ("/", "/metrics"):
            encode, content_type = choose_encoder(accept)
            return content_type, encode(self._registry)
        if path == "/targets":
            with self._lock:
                return "application/json", json.dumps(self._targets).encode()
        return None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    # A port that another process listens on stays busy with this; one in TIME_WAIT is taken at once.
    allow_reuse_address = True
    exporter: Exporter

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is nobody's trouble."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        answer = self.server.exporter.answer(self.path.partition("?")[0], self.headers.get("Accept", ""))
        if answer is None:
            self.send_error(404)
            return
        content_type, body = answer
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is not worth a line."""


def _open(exporter: Exporter, first_port: int) -> _Server:
    for port in range(first_port, min(first_port + TRIES - 1, 65535) + 1):
        with contextlib.suppress(OSError):
            server = _Server((HOST, port), _Handler)
            server.exporter = exporter
            return server
    raise UnavailableError(
        f"ports {first_port} to {first_port + TRIES - 1} are all in use, so metrics cannot be served",
        "Set FARM_METRICS_PORT to the first of ten free ports, or to 0 for no metrics.",
    )
