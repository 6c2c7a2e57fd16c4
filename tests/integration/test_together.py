"""The suite in two processes: what it says of tests that fail at times, and that it ends everything it began."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from tests.integration.conftest import ROOT, wait_until

pytestmark = pytest.mark.core

_FAILS_ONCE = """
import pathlib
def test_it():
    begun = pathlib.Path(__file__).with_suffix('.begun')
    again = begun.exists()
    begun.touch()
    assert again
"""
_LEAVES = """
import pathlib, subprocess
def test_it():
    process = subprocess.Popen(['sleep', '600'], start_new_session=True)
    pathlib.Path(__file__).with_suffix('.left').write_text(str(process.pid))
"""
_WAITS = """
import pathlib, signal
def test_it():
    try:
        pathlib.Path(__file__).with_suffix('.begun').touch()
        signal.pause()
    finally:
        signal.sigtimedwait((), 6.0)  # longer than pytest-xdist would wait
        pathlib.Path(__file__).with_suffix('.ended').touch()
"""


def start(folder: pathlib.Path, first: str, second: str) -> subprocess.Popen[str]:
    (folder / "test_first.py").write_text(first)
    (folder / "test_second.py").write_text(second)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder), "-p", "tests.together"]
    command += ["--numprocesses=2", "--dist=loadfile", "--reruns=1", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_what_fails_once_is_named_and_what_is_left_is_ended(tmp_path: pathlib.Path) -> None:
    """A test that passes at its second try is unsteady, which is no failure; a process that a test forgot is killed."""
    process = start(tmp_path, _FAILS_ONCE, _LEAVES)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    assert "unsteady: test_first.py::test_it failed beside the other tests and passed the second time" in out
    assert "2 passed, 1 rerun" in out
    left = int((tmp_path / "test_second.left").read_text())
    assert f"left behind, and killed: {left} sleep 600" in out
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(left).status() == psutil.STATUS_ZOMBIE


def test_an_interrupt_ends_all(tmp_path: pathlib.Path) -> None:
    """Ctrl-C ends the tests of each process in their own order: what they have to put back is put back."""
    process = start(tmp_path, _WAITS, _WAITS)
    try:
        begun = [tmp_path / f"test_{name}.begun" for name in ("first", "second")]
        wait_until(lambda: all(path.exists() for path in begun), "both to have begun", 100)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 2, out
    assert all(path.with_suffix(".ended").exists() for path in begun), out
