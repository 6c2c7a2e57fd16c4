"""The processes that run once per FARM_HOME (services, engine, page): be one, find it, start it, stop it, read its log.

A lock says whether one runs, because the kernel releases it with its holder. A file says how to reach it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from device_agent.protocol.interpreters import python_command
from farm import folders
from farm import settings as farm_settings
from farm.errors import DeadlineError, FarmError, UnavailableError
from farm.processes import children, home_log
from farm.processes.listening import raise_descriptor_limit
from farm.processes.machine import process_identity

LOOK_S = 0.05
# After SIGKILL; a process in a system call ends with that.
_KILL_TIMEOUT_S = 5.0
# `is_held` holds the lock for microseconds.
_LOCK_TRIES = 50

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class HomeProcess:
    """One of these processes. `name` is that of its files and in the log; `title` is for messages.

    `refusal`, with its hint, refuses a second one, by the exit code `refused`. `begin` gets the home, and the file of a
    killed one, as soon as the lock is held. One with a `kill_hint` is not killed where it does not end in time.
    """

    name: str
    title: str
    module: str
    refusal: tuple[str, str]
    start_timeout_s: float
    stop_timeout_s: float
    failure_hint: str = ""
    kill_hint: str = ""
    refused: int = UnavailableError.exit_code
    begin: Callable[[Path, Mapping[str, Any]], None] = lambda home, left: None

    def is_held(self, home: Path) -> bool:
        """Whether such a process runs, ready or not."""
        try:
            with (home / f"{self.name}.lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def find(self, home: Path) -> dict[str, Any] | None:
        """What the process that runs has published; None where none runs, or it is starting or ending."""
        found = self._read(home) if self.is_held(home) else {}
        return found if "pid" in found else None

    def was_killed(self, home: Path) -> bool:
        """Whether the last one was killed: its file exists, but no process holds the lock."""
        return (home / f"{self.name}.json").exists() and not self.is_held(home)

    @contextlib.contextmanager
    def hold(self, home: Path) -> Iterator[None]:
        """Be this process for the block, or keep one from starting. Raises UnavailableError where another runs."""
        folders.require_private(home)
        # A process that can open it can lock it.
        with folders.open_private(home / f"{self.name}.lock", os.O_RDWR, "r+b") as file:
            for _ in range(_LOCK_TRIES):
                if folders.try_lock(file):
                    break
                os.sched_yield()
            else:
                error = UnavailableError(*self.refusal)
                error.exit_code = self.refused
                raise error
            left = self._read(home)
            self.withdraw(home)
            self.begin(home, left)
            try:
                yield
            finally:
                self.withdraw(home)

    def publish(self, home: Path, **about: Any) -> None:
        """Write this process's identity and `about` it, atomically, in a file of mode 0600: it takes requests."""
        folders.write_private(home / f"{self.name}.json", json.dumps(process_identity() | about))

    def withdraw(self, home: Path) -> None:
        """Take no more requests."""
        (home / f"{self.name}.json").unlink(missing_ok=True)

    def main(self, work: Callable[[farm_settings.Settings], object], *, foreground: bool = False) -> int:
        """Be this process while `work` lasts; return the exit code."""

        def hold(settings: farm_settings.Settings) -> None:
            raise_descriptor_limit()
            with self.hold(settings.home_path):
                work(settings)

        return run_logged(self.name, hold, foreground=foreground)

    def start(self, home: Path, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start one detached: it does not end with this process. What it says before it has a log goes to a file."""
        logs = home / "logs"
        folders.make_private(logs)
        with (logs / f"{self.name}.out").open("wb") as file:
            return subprocess.Popen(
                python_command("-m", self.module, *words),
                stdin=stdin,
                stdout=file,
                stderr=file,
                env=os.environ | farm_settings.find_folders() | {"FARM_HOME": str(home)},
                # It outlives the command, whose folder may be removed or unmounted.
                cwd="/",
                start_new_session=True,
            )

    def ensure(
        self,
        home: Path,
        use: Callable[[int | None], T | None],
        start: Callable[[], subprocess.Popen[bytes]],
        process: subprocess.Popen[bytes] | None = None,
        again: Collection[int] = (),
    ) -> T:
        """Return what `use` finds, as soon as it does; start a process where none runs. `process` was started before.

        `use` gets the exit code of the process started, None while it runs; after one of `again` another is started.
        `use` may raise UnavailableError, as one that is ending just now does not answer, and is called again. Raises
        UnavailableError, DeadlineError.
        """
        deadline, trouble = time.monotonic() + self.start_timeout_s, ""
        while True:
            code = None if process is None else process.poll()
            try:
                if (found := use(code)) is not None:
                    return found
            except UnavailableError as error:
                trouble = f": {error.message}"
            if not self.is_held(home) and (process is None or code is not None):
                if code is not None and code not in again:
                    text = f"{self.title} ended at once ({code}){self.explain(home)}"
                    raise UnavailableError(text, self.failure_hint)
                process = start()
            if time.monotonic() > deadline:
                text = f"{self.title}: not ready within {self.start_timeout_s:g} s"
                raise DeadlineError(text + (trouble or self.explain(home)))
            time.sleep(LOOK_S)

    def stop(self, home: Path) -> bool:
        """End the one that runs and wait; return whether there was one. Raises DeadlineError."""
        found = self.find(home)
        if found is not None:
            self.end(found)
        return found is not None

    def end(self, found: Mapping[str, Any]) -> None:
        """End the process that has published `found`, and wait. Raises DeadlineError."""
        process = find_process(found)
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        for timeout_s in (self.stop_timeout_s, _KILL_TIMEOUT_S):
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(timeout_s)
                return
            if self.kill_hint:
                break
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # its children die with it
        text = f"{self.title} (pid {process.pid}) did not end within {self.stop_timeout_s:g} s"
        raise DeadlineError(text, self.kill_hint)

    def explain(self, home: Path) -> str:
        """The last that it said, to be appended to a message."""
        logs = home / "logs"
        return f": {children.explain_end(logs / f'{self.name}.out', logged=home_log.read_end(logs, self.name))}"

    def _read(self, home: Path) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(json.loads((home / f"{self.name}.json").read_text()))
        return {}


def find_process(found: Mapping[str, Any]) -> psutil.Process | None:
    """The process that has published `found`; None where it has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(int(found["pid"]))
    return None


def run_logged(name: str, work: Callable[[farm_settings.Settings], object], *, foreground: bool = False) -> int:
    """Do the `work` of a process, called `name` in the home's log; return the exit code."""
    try:
        settings = farm_settings.load()
        home_log.start_log(name, settings.home_path / "logs", foreground=foreground)
        work(settings)
    except (FarmError, OSError) as error:
        _log.error("%s", error)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, FarmError) else UnavailableError.exit_code
    return 0
