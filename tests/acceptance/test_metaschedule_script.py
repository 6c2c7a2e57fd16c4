"""A stock MetaSchedule script with three arguments changed, as the howto page has it, on two virtual boards."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.acceptance.conftest import Home, Running, new_home, wait_until

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "howto" / "use-with-metaschedule.md"
BOARDS = ("nano-01", "nano-02")
# What a user accepts between Ctrl-C and the prompt.
END_TIMEOUT_S = 15.0


def read_script() -> str:
    """The page's script."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return next(block for block in blocks if "tune_tir" in block)


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with new_home() as home:
        for name in BOARDS:
            assert home.run("board", "add", name, "--virtual", "jetson-nano").code == 0
        try:
            assert home.run("up").code == 0
            yield home
        finally:
            home.run("down", "--force")


def start(home: Home, script: str, *arguments: str) -> Running:
    name = f"script-{time.monotonic_ns()}"
    folder = home.path / "scripts"
    folder.mkdir(exist_ok=True)
    path, out, err = (folder / f"{name}.{kind}" for kind in ("py", "out", "err"))
    path.write_text(script)
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-u", str(path), *arguments],
            env=home.environment,
            cwd=home.path,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    return Running(process, out, err, time.monotonic())


def holders(home: Home) -> list[str]:
    return [board for board, purpose in home.rows("SELECT board, purpose FROM leases") if "script" in purpose]


def children(home: Home) -> list[int]:
    return [process.pid for process in home.processes() if "farm.metaschedule" in " ".join(process.cmdline())]


@pytest.mark.core
def test_the_script_of_the_page_measures_on_the_farm(home: Home) -> None:
    """The page's script, as pasted, tunes aarch64 code on both boards and gives them back at its end."""
    running = start(home, read_script(), "8")
    wait_until(lambda: len(holders(home)) == 2 or running.process.poll() is not None, "both boards to be leased")
    done = running.wait()
    assert done.code == 0, done.err
    [(count, best)] = re.findall(r"(\d+) candidates, the best takes ([\d.]+) us", done.out)
    assert int(count) == 8
    # Far below what an error would be taken for, and below an unscheduled product on any machine.
    assert 1.0 < float(best) < 1e5
    assert all(f"working on {name}" in done.err for name in BOARDS)
    assert (
        "aarch64"
        in (home.path / "tuning" / "database_workload.json").read_text()
        + (home.path / "tuning" / "database_tuning_record.json").read_text()
    )
    assert not holders(home)
    assert not children(home)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_is_ended_gives_its_boards_back(home: Home, number: signal.Signals) -> None:
    """Ctrl-C in the middle, or kill -9: nothing of the script is left and its boards are free within seconds."""
    running = start(home, read_script(), "4000")
    records = home.path / "tuning" / "database_tuning_record.json"
    begun = records.stat().st_size if records.exists() else 0

    def is_measuring() -> bool:
        return number == signal.SIGKILL or (records.exists() and records.stat().st_size > begun)

    wait_until(
        lambda: (len(holders(home)) == 2 and is_measuring()) or running.process.poll() is not None,
        "the script to be measuring",
    )
    running.send(number, group=number == signal.SIGINT)
    done = running.wait(END_TIMEOUT_S)
    # Where Ctrl-C meets TVM's own code, what Python shows in the end is TVM's RuntimeError. Met while tvm-ffi 0.1.14
    # hands a string to a callback, it ends with a damaged heap: an abort, after which nothing of Python's runs.
    killed = done.code == (-number if number == signal.SIGKILL else -signal.SIGABRT)
    # Python's own end after Ctrl-C is by the signal; what TVM made of it is an exception.
    assert killed or (done.code in (1, -signal.SIGINT) and number == signal.SIGINT), done.err
    wait_until(lambda: not holders(home) and not children(home), "the boards to be given back", END_TIMEOUT_S)
    assert killed or not list(home.temporary.glob("farm-script-*"))
