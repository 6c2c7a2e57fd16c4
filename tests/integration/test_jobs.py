"""Work in a process of its own, asked for by programs that are not written for it."""

from __future__ import annotations

import functools
import operator
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from farm.artifacts.given_model import open_model
from farm.errors import DeadlineError, InternalError, UsageError
from farm.processes import jobs
from farm.processes.jobs import compile_in_subprocess


def test_a_result_or_an_error_of_ours_comes_back() -> None:
    """Its result is the caller's. A usage error in the child is one here; a child that ends is a bug, and says how it
    ended.
    """
    assert compile_in_subprocess(functools.partial(operator.add, 1, 2), "a sum") == 3
    with pytest.raises(UsageError, match="no file and no zoo model"):
        compile_in_subprocess(functools.partial(open_model, "nonsense"), "nonsense")
    with pytest.raises(InternalError, match=r"ended by itself \(exit code 7\)"):
        compile_in_subprocess(functools.partial(os._exit, 7), "nothing")
    with pytest.raises(InternalError, match=r"nothing was not compiled: .* \(killed by signal 9\)"):
        compile_in_subprocess(functools.partial(signal.raise_signal, signal.SIGKILL), "nothing")


def test_a_plain_script_is_not_run_once_more(tmp_path: pathlib.Path) -> None:
    """A program without a guard for being imported runs once, modules beside it are not taken for ours, and what
    a compiler prints stays off its stdout.
    """
    (tmp_path / "farm.py").write_text("raise SystemExit('the wrong farm')")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "script.py").write_text(
        "import functools, operator\n"
        "from farm.processes.jobs import compile_in_subprocess\n"
        "compile_in_subprocess(functools.partial(print, 'noise', flush=True), 'noise')\n"
        "print(compile_in_subprocess(functools.partial(operator.add, 1, 2), 'a sum'))\n"
    )
    done = subprocess.run(
        [sys.executable, "elsewhere/script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert "noise" in done.stderr


def test_a_job_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets a line every few seconds until the answer or the deadline."""
    monkeypatch.setattr(jobs, "_TELL_S", 0.1)
    said: list[str] = []
    assert compile_in_subprocess(functools.partial(operator.add, 1, 2), "a sum", say=said.append) == 3
    with pytest.raises(DeadlineError, match=r"a nap was not compiled within 0\.5 s"):
        compile_in_subprocess(functools.partial(time.sleep, 600), "a nap", 0.5, said.append)
    assert said.count("a nap: still compiling, 0 s so far") >= 2


def test_what_takes_too_long_is_ended() -> None:
    """The error names what was compiled, and no process is left."""
    before = set(psutil.Process().children())
    with pytest.raises(DeadlineError, match=r"a nap was not compiled within 0\.5 s"):
        compile_in_subprocess(functools.partial(time.sleep, 600), "a nap", 0.5)
    assert set(psutil.Process().children()) <= before


def test_a_terminal_s_ctrl_c_does_not_reach_it() -> None:
    """From its first moment on it is in a session of its own, and its parent ends it."""
    assert compile_in_subprocess(functools.partial(os.getsid, 0), "nothing") not in (os.getsid(0), 0)
