"""The suite in two processes: what they say and how they end is what is said in all."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest

RUNNER = pathlib.Path(__file__).parents[1] / "run_shards.py"

_PASSES = "def test_it(): assert True\n"
_FAILS = "def test_it(): assert 'this' == 'that'\n"
_FAILS_ONCE = """
import pathlib
def test_it():
    begun = pathlib.Path(__file__).with_suffix('.begun')
    again = begun.exists()
    begun.touch()
    assert again
def test_other(): pass
"""
_WAITS = """
import pathlib, signal
def test_it():
    try:
        pathlib.Path(__file__).with_suffix('.begun').touch()
        signal.pause()
    finally:
        pathlib.Path(__file__).with_suffix('.ended').touch()
"""


def start(folder: pathlib.Path, first: str, second: str, *options: str) -> subprocess.Popen[str]:
    """Run two shards of one test each."""
    for name, text in (("test_first.py", first), ("test_second.py", second)):
        (folder / name).write_text(text)
    shards = {name: [str(folder / f"test_{name}.py")] for name in ("first", "second")}
    code = (
        f"import sys, runpy; run = runpy.run_path({str(RUNNER)!r}); "
        f"sys.exit(run['main']({['-c', '/dev/null', *options]!r}, {shards!r}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(
    ("first", "second", "options", "code"),
    [
        (_PASSES, _FAILS, (), 1),
        (_PASSES, "def test_other(): pass\n", ("-k", "test_it"), 0),
    ],
    ids=["one fails", "one has nothing to do"],
)
def test_both_have_to_pass(
    tmp_path: pathlib.Path, first: str, second: str, options: tuple[str, ...], code: int
) -> None:
    """The exit code is good only where both are; a shard that options leave nothing to do is as good as passed."""
    process = start(tmp_path, first, second, *options)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert "first |" in out
    assert "second |" in out
    assert ("FAILED" in out) == (code == 1)
    assert f"second: exit code {5 if options else code}" in out
    assert code == 1 or "1 passed" in out


def test_what_fails_once_is_unsteady(tmp_path: pathlib.Path) -> None:
    """A test that fails beside the others and passes alone is named, and does not fail the run."""
    process = start(tmp_path, _PASSES, _FAILS_ONCE)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "second: exit code 1" in out
    assert "test_second.py::test_it failed beside the other tests and passed alone" in out
    assert "1 failed, 1 passed" in out
    assert "1 passed, 1 deselected" in out


def test_a_run_that_an_option_ended_early_stays_failed(tmp_path: pathlib.Path) -> None:
    """With -x most tests have not run: what failed passing alone would say nothing of them."""
    process = start(tmp_path, _PASSES, _FAILS_ONCE, "-x")
    process.communicate(timeout=60)
    assert process.returncode == 1


def test_many_failures_are_no_accident(tmp_path: pathlib.Path) -> None:
    """Where more than a few tests fail, none of them is run again."""
    process = start(tmp_path, _PASSES, _FAILS_ONCE.replace("def test_it", _MANY + "def test_it"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "unsteady" not in out


def test_the_core_with_a_real_kernel_is_a_suite() -> None:
    """`--suite` chooses what runs; all other options stay pytest's."""
    command = [sys.executable, RUNNER, "--suite", "real-kernel-core", "--collect-only", "-q"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert "real kernel | tests/real_kernel/test_provision.py::test_a_full_disk_is_said" in done.stdout
    assert "::test_after_a_reboot_the_board_serves" not in done.stdout


def test_an_interrupt_ends_both(tmp_path: pathlib.Path) -> None:
    """Ctrl-C ends the tests of both shards in their own order: what they have to put back is put back."""
    process = start(tmp_path, _WAITS, _WAITS)
    assert process.stdout is not None
    try:
        begun = [tmp_path / f"test_{name}.begun" for name in ("first", "second")]
        watch = [sys.executable, "-c", _WATCH, *map(str, begun)]
        subprocess.run(watch, check=True, timeout=60)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert all(path.with_suffix(".ended").exists() for path in begun)
    assert "stopping the tests" in out


_MANY = "".join(
    f"def test_{index}(): assert pathlib.Path(__file__).with_suffix('.begun').exists()\n" for index in range(8)
)
_WATCH = """
import select, sys, pathlib
while not all(pathlib.Path(name).exists() for name in sys.argv[1:]):
    select.select([], [], [], 0.02)
"""
