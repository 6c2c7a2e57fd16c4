"""A run of the whole suite by several processes (workers of pytest-xdist): how it ends, and what it says then.

A plug-in of pytest, by `tests/conftest.py`. What passes only at its second try (pytest-rerunfailures) is named as
unsteady, which is a defect of its own, but no reason to say that the change does not work.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
from typing import Any

import psutil
import pytest

# What tests and fixtures may take to stop everything that runs.
STOP_TIMEOUT_S = 60.0
# More than so many that pass only at their second try are no accident of the machine.
MOST_UNSTEADY = 2
# So much of its failure is shown.
_LINES = 30
# All processes of a run carry it: the folder that they share.
_RUN = "TVM_FARM_TEST_RUN"
_workers: list[Any] = []


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, _interrupt_once)
    else:
        # A shell has what it runs in the background ignore it, and so would all that tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise, by nohup
        os.environ[_RUN] = tempfile.mkdtemp(prefix="farm-tests-")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: Any) -> None:
    _workers.append(node)


def pytest_keyboard_interrupt() -> None:
    """Wait until the workers have ended what their tests began: pytest-xdist by itself gives them five seconds."""
    for worker in _workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.gateway._rinfo().pid, signal.SIGINT)  # a terminal has sent it already, `kill` has not
    for worker in _workers:
        with contextlib.suppress(worker.channel.TimeoutError, worker.channel.RemoteError, EOFError):
            worker.channel.waitclose(STOP_TIMEOUT_S)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name in _find_unsteady(terminalreporter):
        terminalreporter.write_line(f"unsteady: {name} failed beside the other tests and passed the second time:")
        first = next(report for report in terminalreporter.stats["rerun"] if report.nodeid == name)
        terminalreporter.write_line("\n".join(_shorten(first.longreprtext)))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and len(_find_unsteady(reporter)) > MOST_UNSTEADY and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the rest of this run's processes, and name them."""
    if forks := sys.modules.get("tests.acceptance.forks"):  # if it was loaded; after the last fixture's end
        forks.end_server()
    if hasattr(config, "workerinput"):
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(_RUN) == os.environ[_RUN]:
                print(f"left behind, and killed: {process.pid} {' '.join(process.cmdline())[:200]}")
                process.kill()
    shutil.rmtree(run_folder(), ignore_errors=True)


def run_folder() -> pathlib.Path:
    """Where tests keep what all processes of this run may use; it is gone with the run."""
    return pathlib.Path(os.environ[_RUN])


def share_what_is_built(home: pathlib.Path) -> None:
    """Have a home use what all homes of this run have built: it is named by its content, and takes seconds."""
    (home / "cache").mkdir(exist_ok=True)
    for name in ("golden", "builds", "emulator"):
        shared = run_folder() / name
        shared.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (home / "cache" / name).symlink_to(shared)


def _find_unsteady(reporter: Any) -> list[str]:
    named = {kind: {report.nodeid for report in reporter.stats.get(kind, ())} for kind in ("rerun", "failed", "error")}
    return sorted(named["rerun"] - named["failed"] - named["error"])


def _shorten(failure: str) -> list[str]:
    """Return the last lines of a failure, after those by which pytest shows a difference."""
    *before, _ = lines = failure.splitlines()
    different = [line for line in before[:-_LINES] if line.startswith(("E         -", "E         +"))]
    return [*different[:_LINES], *lines[-_LINES:]]


def _interrupt_once(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
