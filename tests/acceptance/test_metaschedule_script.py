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

# Half of what it tunes aborts as soon as it runs, with any schedule.
_CRASHING = """
import tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms
from farm.search import FarmBuilder, FarmDatabase, FarmRunner

a = te.placeholder((64,), "float32", name="a")
good = te.compute((64,), lambda i: a[i] + 1.0, name="good")
bad = te.compute((64,), lambda i: a[i] + tvm.tirx.call_extern("float32", "abort"), name="bad")
module = tvm.IRModule({
    name: te.create_prim_func([a, result]).with_attr("global_symbol", name)
    for name, result in (("good", good), ("bad", bad))
})
with FarmRunner(board_type="jetson-nano", repeat=2, wait="90s") as runner, FarmBuilder(max_workers=2) as builder:
    database = ms.tune_tir(
        module, runner.target, "crashing", 8, num_trials_per_iter=4, builder=builder, runner=runner,
        database=FarmDatabase(), cost_model="random", task_scheduler="round-robin",
    )
    for record in database.get_all_tuning_records():
        print([float(sample) for sample in record.run_secs])
"""


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


def test_a_crashing_candidate_does_not_take_the_board_down(home: Home) -> None:
    """Candidates that abort are errors; the others are measured, and both boards stay in service."""
    done = start(home, _CRASHING).wait()
    assert done.code == 0, done.err
    records = [
        [float(word) for word in line.strip("[]").split(",")] for line in done.out.splitlines() if line.startswith("[")
    ]
    assert {min(record) < 1.0 for record in records} == {True, False}
    shown = {board["name"]: board["health"] for board in home.run("board", "list", "--json").json()}
    assert shown == dict.fromkeys(BOARDS, "good")
    # Only what was measured is in the store, and says that it is a model's.
    trials = home.rows("SELECT status, simulated, board FROM trials")
    assert {(status, simulated) for status, simulated, _ in trials} == {("ok", 1)}
    assert home.rows("SELECT command, state FROM campaigns") == [("script", "finished")]
