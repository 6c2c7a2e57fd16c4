"""The process that serves the page of a FARM_HOME: find, start and stop it. Loads no part of the server."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import psutil

from farm.connectivity.services_state import is_locked
from farm.errors import DeadlineError, UnavailableError
from farm.processes import children
from farm.settings import Settings

LOCK, FILE, LOG = "web.lock", "web.json", "web.out"
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _LOOK_S = 30.0, 10.0, 0.05


def find_url(home: Path) -> str | None:
    """Return the page's address; None where no process serves it."""
    found = _read(home)
    return None if found is None else found[1]


def start(settings: Settings) -> str:
    """Start a process that serves the page until `stop`; return the address. Raises UnavailableError, DeadlineError."""
    home = settings.home_path
    if (url := find_url(home)) is not None:
        return url
    logs = home / "logs"
    process = children.start_for_home(home, ["farm.web"], LOG)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (url := find_url(home)) is not None:
            return url
        if process.poll() is not None:
            raise UnavailableError(f"the page's server ended at once{_tail(logs)}")
        time.sleep(_LOOK_S)
    process.kill()
    raise DeadlineError(f"the page's server was not ready within {_START_TIMEOUT_S:g} s{_tail(logs)}")


def stop(home: Path) -> bool:
    """End the process that serves the page; return whether one ran. Raises DeadlineError."""
    found = _read(home)
    if found is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(found[0])
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except psutil.TimeoutExpired:
            process.kill()
            raise DeadlineError(f"the page's server (pid {found[0]}) did not end, and was killed") from None
    return True


def _read(home: Path) -> tuple[int, str] | None:
    """Return process and address. The lock decides: the file of a killed server is stale."""
    if not is_locked(home / LOCK):
        return None
    try:
        document = json.loads((home / FILE).read_text())
        return int(document["pid"]), str(document["url"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _tail(logs: Path) -> str:
    return f": {children.explain_end(logs / LOG)}"
