"""The farm's services of a FARM_HOME: a lock, and a small file with their address. `is_locked`, `hold_lock` and
`write_whole` serve any process that is unique per FARM_HOME.

The lock is authoritative, because the kernel releases it with its holder; the file only holds the address.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from farm import folders
from farm.errors import BoardUnsafeError, FarmError, PermanentError, TransientError, UnavailableError, UsageError
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


_LOCK, _FILE = "services.lock", "services.json"
# `is_locked` holds the lock for microseconds.
_LOCK_TRIES = 50


@dataclasses.dataclass(frozen=True)
class ServicesInfo:
    """The address of running services. `control` is the path of a Unix socket, `started_at` seconds since the epoch.

    `metrics` is Prometheus' target, None without an exporter.
    """

    pid: int
    control: str
    tracker: tuple[str, int]
    metrics: tuple[str, int] | None
    started_at: float


def find_running(home: Path) -> ServicesInfo | None:
    """The services of this FARM_HOME; None if none run or they are not ready."""
    return _read(home) if is_held(home) else None


def _read(home: Path) -> ServicesInfo | None:
    try:
        document = json.loads((home / _FILE).read_text())
        metrics = document["metrics"]
        return ServicesInfo(
            int(document["pid"]),
            str(document["control"]),
            (str(document["tracker"][0]), int(document["tracker"][1])),
            (str(metrics[0]), int(metrics[1])) if metrics else None,
            float(document["started_at"]),
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def is_held(home: Path) -> bool:
    """Whether a process is the services of this FARM_HOME, ready or not."""
    return is_locked(home / _LOCK)


def was_killed(home: Path) -> bool:
    """Whether the last services of this FARM_HOME were killed: their file exists, but no process holds the lock."""
    return (home / _FILE).exists() and not is_held(home)


@contextlib.contextmanager
def services_lock(home: Path) -> Iterator[None]:
    """Be the services of this FARM_HOME for the block. Raises UnavailableError if another process is."""
    with hold_lock(home / _LOCK, "the farm's services run already", "`farm status` shows them, `farm down` ends them."):
        _remove_left(home)
        try:
            yield
        finally:
            (home / _FILE).unlink(missing_ok=True)


def _remove_left(home: Path) -> None:
    """Remove the file and the socket folder of killed services."""
    if (left := _read(home)) is not None:
        control = Path(left.control)
        with contextlib.suppress(OSError):
            control.unlink()
            control.parent.rmdir()
    (home / _FILE).unlink(missing_ok=True)


def publish(home: Path, info: ServicesInfo) -> None:
    """Publish the services' address atomically."""
    folders.write_private(home / _FILE, json.dumps(dataclasses.asdict(info)))


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock at `path`."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def hold_lock(path: Path, refusal: str, hint: str) -> Iterator[None]:
    """Hold the lock at `path` for the block. Raises UnavailableError with these words if another process does."""
    folders.require_private(path.parent)
    # A process that can open it can lock it.
    with folders.open_private(path, os.O_RDWR, "r+b") as file:
        for _ in range(_LOCK_TRIES):
            if folders.try_lock(file):
                break
            os.sched_yield()
        else:
            raise UnavailableError(refusal, hint)
        yield


write_whole = folders.write_private
