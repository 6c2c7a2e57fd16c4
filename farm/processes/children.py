"""The farm's processes outside Ray: children that end with their parent, and detached processes of a FARM_HOME."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from farm import folders
from farm.errors import PermanentError, TransientError
from farm.processes import home_log

# After this long up, the next end has a new reason: restart with short pauses.
STABLE_S = 30.0

# The end of a command's output, for people: a line or two.
_SAID_BYTES = 400
# For a child to end after SIGTERM; then its group is killed.
STOP_TIMEOUT_S = 5.0
LOG_BYTES = 4 << 20
_TAIL_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
# With less, a program can write neither its startup files nor a line of its log.
_LEAST_FREE_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Pauses between attempts, in seconds: each is drawn from the upper half of a span that doubles up to `last_s`."""

    first_s: float = 0.5
    last_s: float = 15.0
    give_up_s: float = float("inf")

    def plan_pause_s(self, attempt: int) -> float:
        """The pause after the `attempt`-th failure in a row, from 1. Random, so that a rack does not retry in step."""
        span_s = min(self.last_s, self.first_s * 2.0 ** min(attempt - 1, 32))
        return random.uniform(span_s / 2, span_s)


class Restarts:
    """Attempts at one thing. Not thread-safe."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._up_since: float | None = None
        self._again_at = 0.0
        self.failures = 0  # in a row

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._again_at

    def note_up(self) -> None:
        """Record that it is up."""
        self._up_since = time.monotonic()

    def note_end(self) -> float:
        """Record its end, or a failed attempt; return the pause before the next one, in s."""
        now = time.monotonic()
        stable = self._up_since is not None and now - self._up_since >= STABLE_S
        self._up_since = None
        self.failures = 1 if stable else self.failures + 1
        pause_s = self._backoff.plan_pause_s(self.failures)
        self._again_at = now + pause_s
        return pause_s


def run(
    command: Sequence[str], timeout_s: float, *, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> str:
    """Run a command to its end; return the end of its output. Kills what it left running in its group.

    `environment` is added to this process's. Raises PermanentError if it cannot run, TransientError for a timeout or an
    exit code other than 0.
    """
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                env={**os.environ, **(environment or {})},
                cwd="/",
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise PermanentError(f"{command[0]} cannot be run: {getattr(error, 'strerror', None) or error}") from None
        try:
            process.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            raise TransientError(f"{command[0]} did not end within {timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - _SAID_BYTES))
        text = " ".join(said.read().decode(errors="replace").split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    if process.returncode:
        raise TransientError(f"{command[0]} ended with exit code {process.returncode}{f': {text}' if text else ''}")
    return text


_libc = ctypes.CDLL(None, use_errno=True)


def start(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    cores: set[int] | None = None,
    pipes: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child in its own session, its output in `log`, pinned to `cores` if given.

    With `pipes` its standard input and output are pipes, and only its stderr goes to `log`. Its own session protects it
    from the terminal's Ctrl-C, so that this process decides the order of ends. Raises TransientError if the machine
    lacks processes, memory or disk.
    """
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the line above took effect
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    with room_for_process():
        folders.make_private(log.parent)
        with log.open("ab") as output:
            return subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=in_child,
            )


@contextlib.contextmanager
def room_for_process() -> Iterator[None]:
    """Raise TransientError if the machine lacks resources for what the block starts."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise TransientError(
            f"a process cannot be started: {error}", "This machine is short of processes, memory, files or disk."
        ) from error


def stop(process: subprocess.Popen[bytes], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Stop the child, then kill its whole group."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, lines: int = 5) -> str:
    """The last lines of a log, for an error message; reads only the end of a long one."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return " | ".join(file.read().decode(errors="replace").strip().splitlines()[-lines:])
    return ""


def explain_end(log: Path | None, code: int | None = None, logged: str = "") -> str:
    """Why a child ended, or does not answer: its exit code if given, the end of its log, and a full disk, which
    silences it. `logged` replaces an empty log. Never empty; without a log it is the code alone.
    """
    said = [] if code is None else [f"killed by signal {-code}" if code < 0 else f"exit code {code}"]
    if log is None:
        return "; ".join(said) or "it said nothing"
    if text := tail(log) or logged:
        said.append(text)
    with contextlib.suppress(OSError):
        if shutil.disk_usage(log.parent).free < _LEAST_FREE_BYTES:
            said.append(f"the disk that holds {log.parent} is full")
    return "; ".join(said) or f"it said nothing; its log is {log}"


def trim_logs(folder: Path) -> None:
    """Truncate every child's log below `folder` that is longer than `LOG_BYTES`, and keep one older piece of each.

    The child appends to it, as opened by `start`, and goes on; some lines may be lost meanwhile.
    """
    for log in folder.rglob("*.log"):
        if log.name == home_log.LOG_FILE:  # its writers rotate it
            continue
        with contextlib.suppress(OSError):  # just removed, or the disk is full: next time
            if log.stat().st_size > LOG_BYTES:
                older = log.with_name(log.name + ".1")
                older.unlink(missing_ok=True)
                try:
                    shutil.copyfile(log, older)
                finally:
                    os.truncate(log, 0)
