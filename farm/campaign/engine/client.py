"""The engine from a command's side: see that one runs, see that it goes."""

from __future__ import annotations

import contextlib
import subprocess
import time

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
