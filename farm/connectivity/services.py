"""The farm's services of a FARM_HOME: their process, the socket on which they take requests, and their clients.

Commands find running services here, start them for a while or for good, and stop them; `farm.services` is what runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from farm.connectivity.tracker import Tracker
from farm.errors import (
    BoardUnsafeError,
    DeadlineError,
    FarmError,
    PermanentError,
    TransientError,
    UnavailableError,
    UsageError,
)
from farm.processes.home_process import LOOK_S, HomeProcess, find_process
from farm.processes.listening import accept_clients, start_thread
from farm.settings import Settings

# Beyond a request's own time: the answer of services on a busy machine.
_GRACE_S = 15.0
MAX_LINE_BYTES = 16 << 20
# A client sends its request as one line at once; any other connection is foreign.
_READ_TIMEOUT_S = 5.0

# Errors that cross the socket with their class; any other becomes PermanentError.
_ERRORS: dict[str, type[FarmError]] = {
    kind.__name__: kind for kind in (UsageError, TransientError, UnavailableError, BoardUnsafeError, PermanentError)
}

Handle = Callable[[str, Mapping[str, Any]], Any]

_log = logging.getLogger(__name__)
T = TypeVar("T")


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


class Services:
    """Running services, given what they have published. Valid while they run."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.info = info
        self.tracker = Tracker(*info["tracker"])
        # Whether they outlive the commands that use them.
        self.stays = True
        self._control = ControlClient(info["control"])

    def fetch_status(self) -> dict[str, Any]:
        """Status of process, tracker and connections; plain JSON. Raises UnavailableError."""
        return dict(self._control.ask("status", _GRACE_S + 30.0))

    def probe(self, names: Collection[str], timeout_s: float) -> list[dict[str, Any]]:
        """Probe boards as soon as they are reachable; return a report for each, `skipped` for one that took too long.

        Raises UsageError for an unregistered board, UnavailableError.
        """
        answer = self._control.ask("probe", timeout_s + _GRACE_S, boards=list(names), timeout_s=timeout_s)
        return list(answer)

    def retry(self, names: Collection[str]) -> None:
        """Reconnect to boards, as after a host key was confirmed."""
        self._control.ask("retry", _GRACE_S, boards=list(names))

    def wait_reachable(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Wait until a board's agent is reachable; return its part of the status.

        Raises DeadlineError with the reason.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            board = next((board for board in self.fetch_status()["boards"] if board["name"] == name), None)
            if board is not None and board["reachable"]:
                return dict(board)
            if time.monotonic() >= deadline:
                trouble = "it is not kept in reach" if board is None else board["trouble"]
                raise DeadlineError(f"board {name!r} could not be reached within {timeout_s:g} s: {trouble}")
            time.sleep(LOOK_S * 4)

    def stay(self, take_over: bool | None = None) -> dict[str, Any]:
        """Keep them running for all boards. `take_over`: whether they resume campaigns of killed engines; None leaves
        that as it is.
        """
        return dict(self._control.ask("stay", _GRACE_S + 30.0, take_over=take_over))

    def hold(self, boards: Collection[str] | None) -> socket.socket:
        """Keep them running, for these boards at least, while the socket is open."""
        sock, status = self._control.hold("need", _GRACE_S + 30.0, boards=None if boards is None else list(boards))
        self.stays = bool(status["stays"])
        return sock

    def is_needed(self) -> bool:
        """Whether they go on without this command. Raises UnavailableError."""
        status = self.fetch_status()
        return bool(status["stays"] or status["held_by"])

    def stop(self) -> None:
        """Stop them and wait; kill what does not end. Raises DeadlineError if that fails too."""
        SERVICES.end(self.info)


def find_services(settings: Settings) -> Services | None:
    """The services of this FARM_HOME; None if none run."""
    info = SERVICES.find(settings.home_path)
    return None if info is None else Services(info)


@contextlib.contextmanager
def using_services(
    settings: Settings, boards: Collection[str] | None = None, note: Callable[[str], None] = lambda text: None
) -> Iterator[Services]:
    """The services, for the block at least: running ones, else private ones for these boards (None: all).

    `note` is called if they have to be started. Raises UsageError for an unregistered board, UnavailableError,
    DeadlineError.
    """
    words = [] if boards is None else ["--boards", ",".join(boards)]
    # Those that nothing has held in time end, and so do those that come second.
    again = (0, SERVICES.refused)
    (services, sock), _ = _ensure(settings, lambda services: (services, services.hold(boards)), words, note, again)
    try:
        yield services
    finally:
        sock.close()
        if not services.stays:
            _wait_released(settings, services)


def start_services(settings: Settings, take_over: bool | None = None) -> tuple[Services, bool]:
    """Services that stay; return them and whether they had to be started. `take_over`: see `Services.stay`.

    Raises UnavailableError, DeadlineError.
    """

    def use(services: Services) -> Services:
        services.stay(take_over)
        return services

    return _ensure(settings, use, ["--stay", *(["--take-over"] if take_over else [])])


def _ensure(
    settings: Settings,
    use: Callable[[Services], T],
    words: Collection[str],
    note: Callable[[str], None] = lambda text: None,
    again: Collection[int] = (),
) -> tuple[T, bool]:
    """Return what `use` makes of running services, and whether they were started here; what is not used is ended."""
    started: list[subprocess.Popen[bytes]] = []

    def find(_: int | None) -> T | None:
        services = find_services(settings)
        return None if services is None else use(services)

    def start() -> subprocess.Popen[bytes]:
        note("starting the farm's services for this command (`farm up` keeps them up)")
        started.append(SERVICES.start(settings.home_path, *words))
        return started[-1]

    try:
        return SERVICES.ensure(settings.home_path, find, start, again=again), bool(started)
    except BaseException:
        for process in started:
            _end_unused(settings, process)
        raise


def _end_unused(settings: Settings, process: subprocess.Popen[bytes]) -> None:
    """End services that this command started and did not use, unless another command has found them meanwhile."""
    with contextlib.suppress(UnavailableError):
        services = find_services(settings)
        if services is not None and services.info["pid"] == process.pid and services.is_needed():
            return
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SERVICES.stop_timeout_s)


def _wait_released(settings: Settings, services: Services) -> None:
    """Wait for services that end with this command, so that nothing is left when it returns."""
    process = find_process(services.info)
    deadline = time.monotonic() + SERVICES.stop_timeout_s
    while process is not None and time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return
        with contextlib.suppress(UnavailableError, psutil.Error):
            if services.is_needed():  # by another command, meanwhile
                return
        time.sleep(LOOK_S)
