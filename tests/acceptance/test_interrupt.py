"""Ending a command at any moment: nothing is left but what was found, and the next command goes on from there."""

from __future__ import annotations

import os
import signal

import pytest

from tests.acceptance.conftest import Done, Home, Running, wait_until

# Between Ctrl-C and the prompt. Measured: 3 s, and over 45 s on a very busy machine while Ray starts, which is not
# interrupted.
END_TIMEOUT_S = 120.0
# Processes orphaned by a kill -9 notice within this; measured: 3 s for Ray's workers.
ORPHAN_TIMEOUT_S = 20.0


def begin(home: Home, trials: int, *options: str) -> Running:
    return home.start("quickstart", "--model", "mlp", "--trials", str(trials), "--no-sweep", *options)


def interrupt(home: Home, running: Running, number: signal.Signals, group: bool) -> Done:
    """Interrupt, and assert what holds at every moment: exit code, message, time, and that no process is left."""
    running.send(number, group)
    done = running.wait(END_TIMEOUT_S)
    assert done.code == 130, done.err
    assert "interrupted; finished trials are kept" in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
    # Whom we were just starting hears of our end from the kernel, a moment after us.
    home.expect_no_processes()
    assert home.lock_is_free()
    # The second is ONNX Runtime's own, which leaves it wherever it has run.
    assert {path.name for path in home.temporary.iterdir()} <= {f"tvm-farm-{os.getuid()}.lock", ".ses"}
    return done


@pytest.mark.parametrize("process", ["device_agent", "raylet"])
def test_interrupted_while_starting(home: Home, process: str) -> None:
    """Ctrl-C while the farm's parts come up, the services or Ray, ends them all."""
    running = begin(home, 8, "--json")
    wait_until(lambda: any(process in " ".join(p.cmdline()) for p in home.processes()), process)
    interrupt(home, running, signal.SIGINT, group=True)
    assert home.count_trials() == 0


@pytest.mark.parametrize(
    ("moment", "number", "state"),
    [("is verifying", signal.SIGTERM, "paused"), ("compiling the model as", signal.SIGINT, "finished")],
)
def test_interrupted_after_tuning(home: Home, moment: str, number: signal.Signals, state: str) -> None:
    """SIGTERM while winners are verified, or Ctrl-C while the model is compiled: all ends, every trial is kept."""
    running = begin(home, 2, "--json")
    running.wait_for(moment)
    interrupt(home, running, number, group=number == signal.SIGINT)
    assert home.rows("SELECT state FROM campaigns") == [(state,)]
    assert home.count_trials() == 2
