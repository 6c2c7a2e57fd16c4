"""The services as seen by a command: find running ones, start them for a while or for good, and stop them."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import psutil

from farm.connectivity.services_state import ControlClient, ServicesInfo, find_running, is_held
from farm.connectivity.tracker import Tracker
from farm.errors import DeadlineError, UnavailableError
from farm.processes import children, home_log
from farm.settings import Settings

# Services load their modules and start the tracker in 2 s; a busy machine is far slower.
START_TIMEOUT_S = 60.0
# Connections close in parallel, in up to 5 s each; after this the services are killed.
STOP_TIMEOUT_S = 30.0
_LOOK_S = 0.05
# Beyond a request's own time: the answer of services on a busy machine.
_GRACE_S = 15.0


class Services:
    """Running services. Valid while they run."""

    def __init__(self, info: ServicesInfo) -> None:
        self.info = info
        self.tracker = Tracker(*info.tracker)
        # Whether they outlive the commands that use them.
        self.stays = True
        self._control = ControlClient(info.control)

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
            time.sleep(_LOOK_S * 4)

    def stay(self, take_over: bool | None = None) -> dict[str, Any]:
        """Keep them running for all boards. `take_over`: whether they resume campaigns of killed engines; None leaves
        that as it is.
        """
        return dict(self._control.ask("stay", _GRACE_S + 30.0, take_over=take_over))

    def hold(self, boards: Collection[str] | None) -> tuple[socket.socket, dict[str, Any]]:
        """Keep them running, for these boards at least, while the socket is open."""
        sock, status = self._control.hold("need", _GRACE_S + 30.0, boards=None if boards is None else list(boards))
        return sock, dict(status)

    def stop(self) -> None:
        """Stop them and wait; kill what does not end. Raises DeadlineError if that fails too."""
        process = _find_process(self.info.pid)
        with contextlib.suppress(UnavailableError):
            self._control.ask("stop")
        if process is None:
            return
        if _wait_gone(process, STOP_TIMEOUT_S):
            return
        process.send_signal(signal.SIGKILL)  # its children die with it
        if not _wait_gone(process, 5.0):
            raise DeadlineError(f"the farm's services (pid {process.pid}) do not end")


def find_services(settings: Settings) -> Services | None:
    """The services of this FARM_HOME; None if none run."""
    info = find_running(settings.home_path)
    return None if info is None else Services(info)


@contextlib.contextmanager
def using_services(
    settings: Settings, boards: Collection[str] | None = None, note: Callable[[str], None] = lambda text: None
) -> Iterator[Services]:
    """The services, for the block at least: running ones, else private ones for these boards (None: all).

    `note` is called if they have to be started. Raises UsageError for an unregistered board, UnavailableError,
    DeadlineError.
    """
    services, sock = _hold(settings, boards, note)
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
    found = find_services(settings)
    if found is not None:
        found.stay(take_over)
        return found, False
    process = _spawn(settings, ["--stay", *(["--take-over"] if take_over else [])])
    return _wait_ready(settings, process), True


def _hold(
    settings: Settings, boards: Collection[str] | None, note: Callable[[str], None]
) -> tuple[Services, socket.socket]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        return _hold_soon(settings, boards, note, started)
    except BaseException:
        for process in started:
            _end_unused(settings, process)
        raise


def _end_unused(settings: Settings, process: subprocess.Popen[bytes]) -> None:
    """End services that this command started and did not use, unless another command has found them meanwhile."""
    with contextlib.suppress(UnavailableError):
        services = find_services(settings)
        if services is not None and services.info.pid == process.pid:
            status = services.fetch_status()
            if status["stays"] or status["held_by"]:
                return
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)


def _hold_soon(
    settings: Settings,
    boards: Collection[str] | None,
    note: Callable[[str], None],
    started: list[subprocess.Popen[bytes]],
) -> tuple[Services, socket.socket]:
    """Hold services as soon as they run; append a process started here to `started`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    process = None
    while True:
        services = find_services(settings)
        if services is not None:
            # They may be ending just now.
            with contextlib.suppress(UnavailableError):
                sock, status = services.hold(boards)
                services.stays = bool(status["stays"])
                return services, sock
        if not is_held(settings.home_path) and (process is None or process.poll() is not None):
            if process is not None and process.returncode not in (0, 3):
                raise _ended(settings, process)
            note("starting the farm's services for this command (`farm up` keeps them up)")
            process = _spawn(settings, [] if boards is None else ["--boards", ",".join(boards)])
            started.append(process)
        if time.monotonic() > deadline:
            raise DeadlineError(f"the farm's services were not ready within {START_TIMEOUT_S:g} s{_tail(settings)}")
        time.sleep(_LOOK_S)


def _spawn(settings: Settings, options: list[str]) -> subprocess.Popen[bytes]:
    """Start the process detached: it ends when no command needs it, not with this one."""
    return children.start_for_home(settings.home_path, ["farm.services", *options], "services.out")


def _wait_ready(settings: Settings, process: subprocess.Popen[bytes]) -> Services:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        services = find_services(settings)
        if services is not None:
            # Right after a kill, the state found may still be the killed one's.
            with contextlib.suppress(UnavailableError):
                services.stay()
                return services
        if process.poll() is not None and not is_held(settings.home_path):
            raise _ended(settings, process)
        time.sleep(_LOOK_S)
    raise DeadlineError(f"the farm's services were not ready within {START_TIMEOUT_S:g} s{_tail(settings)}")


def _wait_released(settings: Settings, services: Services) -> None:
    """Wait for services that end with this command, so that nothing is left when it returns."""
    process = _find_process(services.info.pid)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while process is not None and time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return
        with contextlib.suppress(UnavailableError, psutil.Error):
            status = services.fetch_status()
            if status["stays"] or status["held_by"]:  # another command needs them now
                return
        time.sleep(_LOOK_S)


def _find_process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid)
    return None


def _wait_gone(process: psutil.Process, timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except psutil.TimeoutExpired:
        return False
    return True


def _ended(settings: Settings, process: subprocess.Popen[bytes]) -> UnavailableError:
    return UnavailableError(f"the farm's services ended at once ({process.returncode}){_tail(settings)}")


def _tail(settings: Settings) -> str:
    logs = settings.home_path / "logs"
    return f": {children.explain_end(logs / 'services.out', logged=home_log.read_end(logs, 'services'))}"
