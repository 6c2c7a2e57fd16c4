"""The engine from a command's side: see that one runs, see that it goes."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import subprocess
import time
from collections.abc import Iterator

import psutil

from farm.campaign.engine.state import ANOTHER_RUNS, find_engine, is_held
from farm.errors import DeadlineError, UnavailableError
from farm.processes import children, home_log
from farm.settings import Settings

# Loading TVM and Ray takes 3 s; five times that on a machine that is busy, and an engine that is just ending first.
START_TIMEOUT_S = 60.0
# Campaigns are noted, boards let go, Ray ended.
STOP_TIMEOUT_S = 30.0
_LOOK_S = 0.05
_OUTPUT = "engine.out"


def ensure_engine(settings: Settings, process: subprocess.Popen[bytes] | None = None) -> None:
    """See that an engine does what stands in the store by now, starting one if need be; it is not waited for.

    `process` is an engine that was started already. Raises UnavailableError where none can run, DeadlineError.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if find_engine(settings.home_path) is not None:
            return
        ended = None if process is None else process.poll()
        if ended == 0:
            return  # it has looked, and there was nothing left to do
        if not is_held(settings.home_path) and (process is None or ended is not None):
            if process is not None and ended != ANOTHER_RUNS:
                raise UnavailableError(
                    f"the engine of campaigns ended at once ({ended}){tail(settings)}",
                    "`farm doctor` examines the farm.",
                )
            process = spawn_engine(settings)
        if time.monotonic() > deadline:
            raise DeadlineError(f"the engine of campaigns was not ready within {START_TIMEOUT_S:g} s{tail(settings)}")
        time.sleep(_LOOK_S)


def stop_engine(settings: Settings) -> bool:
    """Tell the engine to end and wait; campaigns under way are interrupted. Returns whether there was one.

    Raises DeadlineError.
    """
    found = find_engine(settings.home_path)
    if found is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(found.pid)
        if process.create_time() == found.identity["created"]:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except psutil.TimeoutExpired:
                raise DeadlineError(
                    f"the engine of campaigns (pid {found.pid}) did not end within {STOP_TIMEOUT_S:g} s",
                    "`kill -9` ends it; no trial is lost, and `farm campaign resume` goes on.",
                ) from None
    return True


def tail(settings: Settings) -> str:
    """What the engine said last, to be put behind a message."""
    logs = settings.home_path / "logs"
    return f": {children.explain_end(logs / _OUTPUT, logged=home_log.read_end(logs, 'engine'))}"


def spawn_engine(settings: Settings, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start the process on its own feet: it ends when no campaign needs it, not when we do. `stdin`: see `ahead`."""
    return children.start_for_home(settings.home_path, ["farm.campaign.engine"], _OUTPUT, stdin)


_STDIN = 0


class Ahead:
    """What a command has of the engine that it may start; see `engine_ahead`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start an engine, unless one runs."""
        if not is_held(self._settings.home_path):
            self.process = spawn_engine(self._settings, stdin=subprocess.PIPE)

    def ensure(self) -> None:
        """See that an engine does what stands in the store by now. Raises what `ensure_engine` raises."""
        ensure_engine(self._settings, self.process)
        self.close()

    def close(self) -> None:
        """Expect nothing more of the engine than what stands in the store."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()


@contextlib.contextmanager
def engine_ahead(settings: Settings) -> Iterator[Ahead]:
    """An engine for what the block will submit; it ends with the block if that has submitted nothing."""
    ahead = Ahead(settings)
    try:
        yield ahead
    finally:
        ahead.close()


def is_expected() -> bool:
    """Whether somebody is about to submit a campaign to us, the engine. Does not wait."""
    try:
        if not stat.S_ISFIFO(os.fstat(_STDIN).st_mode):
            return False
    except OSError:  # closed
        return False
    # Nobody writes there: what can be read is the end.
    return not select.select([_STDIN], [], [], 0)[0]
