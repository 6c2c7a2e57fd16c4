"""An engine does not outlive its Ray: what waits for a node manager that is gone is ended."""

from __future__ import annotations

import subprocess
import sys

# A stand-in for the node manager, which is known by an argument, and a call that would never return.
_PROGRAM = """
import subprocess, sys, threading
from farm.campaign.engine.ray_watch import ray_watched
command = [sys.executable, "-c", "input()", "--raylet_socket_name=/nowhere/raylet"]
raylet = subprocess.Popen(command, stdin=subprocess.PIPE)
with ray_watched("/nowhere/raylet", grace_s=0.1):
    if sys.argv[1] == "dies":
        raylet.kill()
    if sys.argv[2] == "hangs":
        threading.Event().wait(60.0)
raylet.kill()
raylet.wait()
print("let go")
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The program with its two words; it ends by itself."""
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words], capture_output=True, text=True, timeout=50, check=False
    )


def test_a_call_that_waits_for_a_dead_ray_ends_with_the_process() -> None:
    """Where the node manager dies and a call does not return, the process ends, and says why."""
    done = run("dies", "hangs")
    assert (done.returncode, done.stdout) == (3, "")
    assert "node manager" in done.stderr


def test_who_lets_go_of_ray_goes_on() -> None:
    """A block that ends by itself is left alone."""
    assert run("lives", "ends").stdout == "let go\n"
