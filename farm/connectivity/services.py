"""The services as seen by a command: find running ones, start them for a while or for good, and stop them."""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import psutil

from farm.connectivity.services_state import SERVICES, ControlClient
from farm.connectivity.tracker import Tracker
from farm.errors import DeadlineError, UnavailableError
from farm.processes.home_process import LOOK_S, find_process
from farm.settings import Settings

# Beyond a request's own time: the answer of services on a busy machine.
_GRACE_S = 15.0


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

    def hold(self, boards: Collection[str] | None) -> tuple[socket.socket, dict[str, Any]]:
        """Keep them running, for these boards at least, while the socket is open."""
        sock, status = self._control.hold("need", _GRACE_S + 30.0, boards=None if boards is None else list(boards))
        return sock, dict(status)

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
    started: list[subprocess.Popen[bytes]] = []

    def use(_: int | None) -> Services | None:
        # They may be ending just now, or be the killed ones whose file is still there.
        with contextlib.suppress(UnavailableError):
            if (services := find_services(settings)) is not None:
                services.stay(take_over)
                return services
        return None

    words = ["--stay", *(["--take-over"] if take_over else [])]
    return SERVICES.ensure(settings.home_path, use, functools.partial(_start, settings, words, started)), bool(started)


def _start(settings: Settings, words: list[str], started: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    started.append(SERVICES.start(settings.home_path, *words))
    return started[-1]


def _hold(
    settings: Settings, boards: Collection[str] | None, note: Callable[[str], None]
) -> tuple[Services, socket.socket]:
    started: list[subprocess.Popen[bytes]] = []

    def use(_: int | None) -> tuple[Services, socket.socket] | None:
        with contextlib.suppress(UnavailableError):  # they may be ending just now
            if (services := find_services(settings)) is not None:
                sock, status = services.hold(boards)
                services.stays = bool(status["stays"])
                return services, sock
        return None

    def start() -> subprocess.Popen[bytes]:
        note("starting the farm's services for this command (`farm up` keeps them up)")
        return _start(settings, [] if boards is None else ["--boards", ",".join(boards)], started)

    try:
        # Those that nothing has held in time end, and so do those that come second.
        return SERVICES.ensure(settings.home_path, use, start, again=(0, SERVICES.refused))
    except BaseException:
        for process in started:
            _end_unused(settings, process)
        raise


def _end_unused(settings: Settings, process: subprocess.Popen[bytes]) -> None:
    """End services that this command started and did not use, unless another command has found them meanwhile."""
    with contextlib.suppress(UnavailableError):
        services = find_services(settings)
        if services is not None and services.info["pid"] == process.pid:
            status = services.fetch_status()
            if status["stays"] or status["held_by"]:
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
            status = services.fetch_status()
            if status["stays"] or status["held_by"]:  # another command needs them now
                return
        time.sleep(LOOK_S)
