"""The farm's services of a FARM_HOME as a process, and the socket on which they take requests: server and client."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farm.errors import BoardUnsafeError, FarmError, PermanentError, TransientError, UnavailableError, UsageError
from farm.processes.home_process import HomeProcess
from farm.processes.listening import accept_clients, start_thread

MAX_LINE_BYTES = 16 << 20
# A client sends its request as one line at once; any other connection is foreign.
_READ_TIMEOUT_S = 5.0

# Errors that cross the socket with their class; any other becomes PermanentError.
_ERRORS: dict[str, type[FarmError]] = {
    kind.__name__: kind for kind in (UsageError, TransientError, UnavailableError, BoardUnsafeError, PermanentError)
}

_log = logging.getLogger(__name__)

Handle = Callable[[str, Mapping[str, Any]], Any]


class ControlServer:
    """Answers on `path` until `close`, each request in a thread."""

    def __init__(self, path: Path, handle: Handle, on_release: Callable[[], None]) -> None:
        """`handle` gets a verb and its arguments and returns plain JSON, or raises FarmError; it must be thread-safe.

        `on_release` is called whenever a holder has gone.
        """
        self._handle = handle
        self._on_release = on_release
        self._holds: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="farm-control", daemon=True).start()

    @property
    def holds(self) -> int:
        """The number of commands that need the services now."""
        with self._lock:
            return len(self._holds)

    def close(self) -> None:
        """Stop listening and disconnect all clients."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            holds = list(self._holds)
        for sock in holds:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        for sock in accept_clients(self._listener):
            if not start_thread("farm-control-client", self._serve, sock):
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, EOFError, ValueError, LookupError, AttributeError):
            sock.settimeout(_READ_TIMEOUT_S)
            request = json.loads(read_line(sock))
            verb = str(request.pop("verb"))
            if request.pop("hold", False):
                self._serve_holder(sock, verb, request)
            else:
                self._reply(sock, verb, request)

    def _serve_holder(self, sock: socket.socket, verb: str, request: Mapping[str, Any]) -> None:
        with self._lock:  # before the answer, or the services might end in between
            self._holds.add(sock)
        try:
            self._reply(sock, verb, request)
            sock.settimeout(None)
            sock.recv(1)  # the holder sends nothing more; this ends with it
        finally:
            with self._lock:
                self._holds.discard(sock)
            self._on_release()

    def _reply(self, sock: socket.socket, verb: str, request: Mapping[str, Any]) -> None:
        sock.sendall(json.dumps(self._answer(verb, request)).encode() + b"\n")

    def _answer(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self._handle(verb, arguments)}
        except FarmError as error:
            return {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        except Exception as error:  # noqa: BLE001 - edge: a bug in one request must not take the services down
            _log.exception("request %s failed", verb)
            return {"error": "InternalError", "message": f"{type(error).__name__}: {error}", "hint": ""}


class ControlClient:
    """A client of the services that listen on `path`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def ask(self, verb: str, within_s: float = 10.0, **arguments: Any) -> Any:
        """Send one request. Raises the services' error, UnavailableError without an answer in time."""
        with self._open(within_s) as sock:
            return self._exchange(sock, verb, arguments)

    def hold(self, verb: str, within_s: float = 10.0, **arguments: Any) -> tuple[socket.socket, Any]:
        """As `ask`, and keep the connection: the services live at least as long as it is open."""
        sock = self._open(within_s)
        try:
            return sock, self._exchange(sock, verb, {**arguments, "hold": True})
        except BaseException:
            sock.close()
            raise

    def _open(self, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(self._path)
        except OSError as error:
            sock.close()
            raise UnavailableError(f"the farm's services do not answer: {error}", "`farm status` says more.") from error
        return sock

    def _exchange(self, sock: socket.socket, verb: str, arguments: Mapping[str, Any]) -> Any:
        try:
            sock.sendall(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            answer = json.loads(read_line(sock))
        except (OSError, EOFError, ValueError) as error:
            raise UnavailableError(
                f"the farm's services did not answer `{verb}`: {error}", "`farm logs` shows what they logged."
            ) from error
        if "error" in answer:
            raise _ERRORS.get(answer["error"], PermanentError)(answer["message"], answer["hint"])
        return answer["result"]


def read_line(sock: socket.socket) -> bytes:
    """Bytes up to a newline, without it. Raises EOFError, ValueError for an endless line."""
    data = bytearray()
    while not data.endswith(b"\n"):
        if len(data) > MAX_LINE_BYTES:
            raise ValueError("a line without end")
        chunk = sock.recv(1 << 16)
        if not chunk:
            raise EOFError("the other side hung up")
        data += chunk
    return bytes(data[:-1])


def _remove_socket(home: Path, left: Mapping[str, Any]) -> None:
    """Remove what killed services left outside FARM_HOME."""
    if "control" in left:
        with contextlib.suppress(OSError):
            Path(left["control"]).unlink()
            Path(left["control"]).parent.rmdir()


# They publish `control`, the path of a Unix socket; `tracker`; `metrics`, Prometheus' target or null; `started_at`.
SERVICES = HomeProcess(
    name="services",
    title="the farm's services",
    module="farm.services",
    refusal=("the farm's services run already", "`farm status` shows them, `farm down` ends them."),
    # They load their modules and start the tracker in 2 s; a busy machine is far slower.
    start_timeout_s=60.0,
    # Connections close in parallel, in up to 5 s each.
    stop_timeout_s=30.0,
    begin=_remove_socket,
)
