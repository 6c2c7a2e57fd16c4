"""Which process is the farm's services, and where it answers: a lock and a small file under FARM_HOME. The means are
those of any process that there is once per FARM_HOME (`is_locked`, `hold_lock`, `write_whole`).

The lock is the truth, because the kernel lets go of it whatever happens to its holder; the file only says where to ask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from farm import folders
from farm.errors import UnavailableError

_LOCK, _FILE = "services.lock", "services.json"
# Whoever only looks (`is_locked`) has the lock for microseconds.
_LOCK_TRIES = 50


@dataclasses.dataclass(frozen=True)
class ServicesInfo:
    """Where running services answer. `control` is the path of a Unix socket, `started_at` seconds since the epoch.

    `metrics` is where Prometheus may look, None where nothing is exported.
    """

    pid: int
    control: str
    tracker: tuple[str, int]
    metrics: tuple[str, int] | None
    started_at: float


def find_running(home: Path) -> ServicesInfo | None:
    """The services of this FARM_HOME, or None where none run or they are not ready yet."""
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
    """Whether some process is the services of this FARM_HOME, ready or not."""
    return is_locked(home / _LOCK)


def was_killed(home: Path) -> bool:
    """Whether the last services of this FARM_HOME ended without a farewell: their file is there, nobody holds it."""
    return (home / _FILE).exists() and not is_held(home)


@contextlib.contextmanager
def services_lock(home: Path) -> Iterator[None]:
    """Be the services of this FARM_HOME for the block. Raises UnavailableError where another process is."""
    with hold_lock(home / _LOCK, "the farm's services run already", "`farm status` shows them, `farm down` ends them."):
        _remove_left(home)
        try:
            yield
        finally:
            (home / _FILE).unlink(missing_ok=True)


def _remove_left(home: Path) -> None:
    """Remove what services that were killed left: their file, and their socket with the folder that it is alone in."""
    if (left := _read(home)) is not None:
        control = Path(left.control)
        with contextlib.suppress(OSError):
            control.unlink()
            control.parent.rmdir()
    (home / _FILE).unlink(missing_ok=True)


def publish(home: Path, info: ServicesInfo) -> None:
    """Say where the services answer; in one step, so that nobody reads half of it."""
    write_whole(home / _FILE, json.dumps(dataclasses.asdict(info)))


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock at `path`."""
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
    """Hold the lock at `path` for the block. Raises UnavailableError with these words where another process does."""
    folders.require_private(path.parent)
    # Who can open it can hold it.
    with folders.open_private(path, os.O_RDWR, "r+b") as file:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.sched_yield()
        else:
            raise UnavailableError(refusal, hint)
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a file of mode 0600 in one step: a reader sees the old text or the new."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with folders.open_private(part, os.O_WRONLY | os.O_TRUNC, "w") as file:
        file.write(text)
    part.replace(path)
