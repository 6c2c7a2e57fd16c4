"""The engine from a command's side: see that one runs, see that it goes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

from farm.campaign.running.state import LOG_FILE, EngineInfo, find_engine, is_held
from farm.errors import DeadlineError, UnavailableError
from farm.fleet import processes
from farm.settings import Settings

# Loading TVM and Ray takes 3 s; five times that on a machine that is busy, and an engine that is just ending first.
START_TIMEOUT_S = 60.0
# Campaigns are noted, boards let go, Ray ended.
STOP_TIMEOUT_S = 30.0
_LOOK_S = 0.05
_OUTPUT = "engine.out"


def ensure_engine(settings: Settings) -> EngineInfo:
    """See that an engine runs which will look into the store after this call. Raises UnavailableError, DeadlineError.

    To be called once what is wanted of it stands in the store.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    process = None
    while True:
        found = find_engine(settings.home_path)
        if found is not None:
            return found
        if not is_held(settings.home_path) and (process is None or process.poll() is not None):
            # 3: another engine was faster; 0: there was nothing left to do.
            if process is not None and process.returncode not in (0, 3):
                raise UnavailableError(
                    f"the engine of campaigns ended at once ({process.returncode}){tail(settings)}",
                    "`farm doctor` examines the farm.",
                )
            process = _spawn(settings)
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
    """What the engine said last, to be put behind a message; empty where that is nothing."""
    logs = settings.home_path / "logs"
    said = processes.tail(logs / _OUTPUT) or processes.tail(logs / LOG_FILE)
    return f": {said}" if said else ""


def _spawn(settings: Settings) -> subprocess.Popen[bytes]:
    """Start the process on its own feet: it ends when no campaign needs it, not when we do."""
    logs = settings.home_path / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / _OUTPUT).open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "farm.campaign.running"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"FARM_HOME": str(settings.home_path)},
            cwd="/",
            start_new_session=True,
        )
