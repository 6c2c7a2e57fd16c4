"""An engine does not outlive its Ray: what waits for a node manager or a head that is gone is ended."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

# Stand-ins for the node manager and the head, which are known by arguments, and a call that would never return.
_PROGRAM = """
import pathlib, subprocess, sys, threading
from farm.campaign.engine.ray_nodes import ray_watched
from farm.campaign.engine.state import ENGINE, leave_last_words, read_last_words
from farm.errors import FarmError, TransientError
from farm.processes.machine import process_identity

how, then, home = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
def start(name, argument):
    return subprocess.Popen([name, "-c", "read x", argument], executable="/bin/sh", stdin=subprocess.PIPE)

raylet = start("raylet", "--raylet_socket_name=/nowhere/sockets/raylet")
head = start("/ray/gcs_server", "--session-dir=/nowhere")
def tell(reason):
    leave_last_words(home, reason)
    print(read_last_words(home, process_identity()), flush=True)

try:
    with ENGINE.hold(home), ray_watched("/nowhere/sockets/raylet", tell, grace_s=0.1):
        if how != "lives":
            dying = head if how == "head" else raylet
            dying.kill()
            dying.wait()
        if then == "hangs":
            threading.Event().wait(60.0)
        if then == "fails":
            raise TransientError("an actor is gone")
except FarmError as error:
    print(error.message)
for each in (raylet, head):
    each.kill()
    each.wait()
print("let go")
"""


def run(home: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words, str(home)], capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize("part", ["node manager", "head"])
def test_a_call_that_waits_for_a_dead_ray_ends_with_the_process(tmp_path: pathlib.Path, part: str) -> None:
    """Where a part of Ray dies and a call does not return, the process ends, and leaves the cause."""
    done = run(tmp_path, part, "hangs")
    assert done.returncode == 3
    assert part in done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith(f"Ray's {part} (pid ")


def test_what_a_dead_ray_ends_in_order_names_the_cause(tmp_path: pathlib.Path) -> None:
    """The error of a call is not what went wrong where the node manager is gone, and is where it lives."""
    assert "node manager" in run(tmp_path, "dies", "fails").stdout.splitlines()[-2]
    assert run(tmp_path, "lives", "fails").stdout.splitlines() == ["an actor is gone", "let go"]


def test_who_lets_go_of_ray_goes_on(tmp_path: pathlib.Path) -> None:
    """A block that ends by itself is left alone."""
    assert run(tmp_path, "lives", "ends").stdout == "let go\n"
