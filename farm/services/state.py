"""Which process is the farm's services, and where it answers: a lock and a small file under FARM_HOME.

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
from typing import IO

from farm.errors import UnavailableError

LOG_FILE = "services.log"
_LOCK, _FILE = "services.lock", "services.json"
# Whoever only looks (`is_held`) has the lock for microseconds.
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
    if not is_held(home):
        return None
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
    try:
        with (home / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def was_killed(home: Path) -> bool:
    """Whether the last services of this FARM_HOME ended without a farewell: their file is there, nobody holds it."""
    return (home / _FILE).exists() and not is_held(home)


@contextlib.contextmanager
def services_lock(home: Path) -> Iterator[None]:
    """Be the services of this FARM_HOME for the block. Raises UnavailableError where another process is."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / _LOCK).open("a+b") as file:
        _lock(file)
        (home / _FILE).unlink(missing_ok=True)  # of one that was killed
        try:
            yield
        finally:
            (home / _FILE).unlink(missing_ok=True)


def publish(home: Path, info: ServicesInfo) -> None:
    """Say where the services answer; in one step, so that nobody reads half of it."""
    part = home / f".{_FILE}.{os.getpid()}"
    part.write_text(json.dumps(dataclasses.asdict(info)))
    part.replace(home / _FILE)


def _lock(file: IO[bytes]) -> None:
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        os.sched_yield()
    raise UnavailableError("the farm's services run already", "`farm status` shows them, `farm down` ends them.")
