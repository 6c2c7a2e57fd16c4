"""Any program on a board: what it wrote, its time and energy; and bad ones, after each of which the board is idle."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import psutil
import pytest

from device_agent.protocol import Command, EnergySpec, Engine, Limits, OperatingPoint, Outcome, RunSpec, Status
from farm.errors import BoardLostError
from farm.measure.answers import AgentAddress
from farm.measure.blocking import BlockingSession
from tests.clocks import wait_until
from tests.integration.conftest import Agent

Ended = tuple[Outcome, list[str]]

SPIN = """
#include <stdio.h>
int main(void) {
    volatile unsigned long n = 0;
    puts("begin"); fflush(stdout);
    for (unsigned long i = 0; i < 60000000; i++) n += i;
    puts("end"); puts("rate = 12.5");
    return 0;
}
"""

# Without a C library, of which ziglang would have to build one first.
AARCH64 = """
static long call(long number, long first, const char *second, long third) {
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = first, x2 __asm__("x2") = third;
    register const char *x1 __asm__("x1") = second;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
}
void _start(void) { call(64, 1, "aarch64\\n", 8); call(94, 0, 0, 0); }
"""


@pytest.fixture(scope="module")
def spin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A program that computes for a fixed number of cycles."""
    path = tmp_path_factory.mktemp("spin") / "spin"
    subprocess.run(["gcc", "-O1", "-o", path, "-x", "c", "-"], input=SPIN.encode(), check=True, timeout=60)
    return path.read_bytes()


@contextlib.contextmanager
def opened(agent: Agent, board_type: str = "local") -> Iterator[BlockingSession]:
    key = f"{board_type}/{agent.key.partition('/')[2]}"
    with BlockingSession(AgentAddress("127.0.0.1", agent.port), key) as session:
        yield session


@pytest.fixture(scope="module")
def agent(start_agent: Callable[..., Agent]) -> Agent:
    """Of this machine, without a tracker."""
    return start_agent()


@pytest.fixture
def board(agent: Agent) -> Iterator[BlockingSession]:
    with opened(agent) as session:
        yield session


@pytest.fixture(scope="module")
def virtual(start_agent: Callable[..., Agent]) -> Iterator[BlockingSession]:
    with opened(start_agent("--virtual", "jetson-nano"), "jetson-nano") as session:
        yield session


def run(board: BlockingSession, *arguments: str, sent: Mapping[str, bytes] | None = None, **more: Any) -> Ended:
    """Run a command with these files; `more` are fields of Command and RunSpec."""
    about = {name: more.pop(name) for name in ("begin", "end", "processes") if name in more}
    sent = sent or {}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sent.items()}
    spec = RunSpec(Engine.PROGRAM, command=Command(tuple(arguments), files, **about), **more)
    arrays = {name: np.frombuffer(content, np.uint8) for name, content in sent.items()}
    outcome, outputs = board.run_model(spec, b"", arrays)
    return outcome, [array.tobytes().decode() for array in outputs.values()]


def script(board: BlockingSession, text: str, **more: Any) -> Ended:
    return run(board, sys.executable, "-c", text, **more)


def test_a_program_is_run_as_it_is(board: BlockingSession, spin: bytes) -> None:
    """A file that was sent runs in a folder of its own; each run's output comes back, and its time is a sample."""
    outcome, texts = run(board, "./spin", sent={"spin": spin}, runs=3, warmup=1)
    assert outcome.status is Status.OK, outcome.message
    assert len(outcome.latency_s) == 3
    assert texts == ["begin\nend\nrate = 12.5\n", ""] * 3
    assert outcome.details is not None
    assert outcome.details.output == "begin\nend\nrate = 12.5"
    assert outcome.details.peak_memory_bytes is not None
    outcome, texts = script(board, "import os, sys; print(os.listdir()); print(sys.stdin.read(), file=sys.stderr)")
    assert texts == ["[]\n", "\n"]
    outcome, texts = script(board, "print(open('words').read())", sent={"words": b"as sent"})
    assert texts[0] == "as sent\n"


def test_between_two_lines(board: BlockingSession) -> None:
    """What is before and after the lines that are looked for does not count."""
    text = "import time; time.sleep(0.3); print('go'); time.sleep(0.1); print('stop'); time.sleep(0.3)"
    outcome, _ = script(board, text, begin="^go$", end="^stop$", runs=2)
    assert outcome.status is Status.OK, outcome.message
    assert all(0.05 < latency_s < 0.35 for latency_s in outcome.latency_s)
    outcome, _ = script(board, text, begin="nowhere")
    assert outcome.status is Status.CRASHED
    assert "no line of the output has 'nowhere'" in outcome.message
    outcome, _ = script(board, "import os; os.write(1, b'go\\nstop\\n')", begin="^go$", end="^stop$")
    assert "both lines came at once" in outcome.message


def test_energy_on_a_virtual_board(virtual: BlockingSession, spin: bytes) -> None:
    """A virtual board scales processor time by its clock, and its energy window is the program's own time."""
    sent = {"spin": spin}
    energy = EnergySpec(min_updates=5, limit_s=1.0, idle_s=0.5)
    found = {}
    for hz in (921_600_000, 1_479_000_000):
        virtual.pin(OperatingPoint(cpu_freq_hz={"a57": hz}))
        outcome, _ = run(virtual, "./spin", sent=sent, runs=3, energy=energy)
        assert outcome.status is Status.OK, outcome.message
        assert outcome.simulated
        assert outcome.energy is not None
        assert outcome.energy.busy.window_s == pytest.approx(sum(outcome.latency_s), rel=0.01)
        assert outcome.energy.per_call_j is not None
        found[hz] = float(np.median(outcome.latency_s))
    assert found[921_600_000] / found[1_479_000_000] == pytest.approx(1479 / 921.6, rel=0.02)
    outcome, _ = run(virtual, "./spin", sent=sent, runs=3, energy=energy, begin="begin", end="end")
    assert outcome.energy is not None
    assert outcome.energy.busy.window_s == pytest.approx(sum(outcome.latency_s), rel=1e-6)
    outcome, _ = run(virtual, "./spin", sent=sent, device="gpu")
    assert "no GPU" in outcome.message


FORKS = "import os, time\nfor _ in range(1000):\n    if os.fork() == 0: time.sleep(60); os._exit(0)\ntime.sleep(60)"
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf')\ntime.sleep(60)"
DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)\nprint('left one behind')"
BAD = {
    "missing": (("no-such-program",), Status.LOAD_FAILED, "there is no program 'no-such-program'"),
    "not executable": (("/etc/passwd",), Status.LOAD_FAILED, "it is not executable"),
    "fails": ((sys.executable, "-c", "print('so'); raise SystemExit(3)"), Status.CRASHED, "code 3; it last wrote: so"),
    "crashes": ((sys.executable, "-c", "import os; os.abort()"), Status.CRASHED, "killed by SIGABRT; it wrote nothing"),
    "endless output": (("yes",), Status.CRASHED, "more than 64 MiB of output"),
    "forks": ((sys.executable, "-c", FORKS), Status.CRASHED, "more than 256 processes"),
    "deaf": ((sys.executable, "-c", DEAF), Status.RUN_TIMEOUT, "not finished after 2 s"),
    "memory": ((sys.executable, "-c", "b = bytearray(1 << 30)"), Status.CRASHED, "MemoryError"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_program_leaves_nothing(board: BlockingSession, agent: Agent, name: str) -> None:
    """Each has one outcome that says why, and afterwards the board is idle: no process, no file."""
    arguments, status, said = BAD[name]
    outcome, _ = run(
        board, *arguments, limits=Limits(timeout_s=2.0 if name == "deaf" else 30.0, memory_bytes=512 << 20)
    )
    assert (outcome.status, said in outcome.message) == (status, True), outcome
    wait_until(lambda: not [each for each in agent.descendants() if _is_foreign(each)], "the board to be idle")
    assert not list(agent.folder.glob("device-agent-*/session-*/run-*"))
    assert run(board, "true")[0].status is Status.OK


def _is_foreign(process: psutil.Process) -> bool:
    try:
        return any(word in " ".join(process.cmdline()) for word in ("yes", "time.sleep", "bytearray"))
    except psutil.Error:
        return False


def test_what_a_program_leaves_running_is_ended(board: BlockingSession, agent: Agent) -> None:
    """A process that has moved to a session of its own ends with the run, which is good."""
    outcome, texts = script(board, DAEMON)
    assert outcome.status is Status.OK, outcome.message
    assert texts[0] == "left one behind\n"
    wait_until(lambda: not [each for each in agent.descendants() if _is_foreign(each)], "the board to be idle")


def test_a_program_ends_with_its_agent(start_agent: Callable[..., Agent]) -> None:
    """An agent that is killed takes the program along."""
    agent = start_agent()
    with opened(agent) as board, concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(script, board, "import time; time.sleep(60)")
        wait_until(lambda: any(map(_is_foreign, agent.descendants())), "the program")
        (program,) = filter(_is_foreign, agent.descendants())
        agent.process.kill()
        assert isinstance(answer.exception(timeout=30), BoardLostError)
        program.wait(timeout=10)


def test_a_full_disk(start_agent: Callable[..., Agent], tmp_path: pathlib.Path) -> None:
    """A program that fills the disk is ended while there is still room, and what it wrote is gone."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=400m,mode=755", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, timeout=30).returncode:
        pytest.skip("a full disk is made with mount, which is not permitted here")
    try:
        agent = start_agent(folder=tmp_path)
        with opened(agent) as board:
            text = "import time\nfor n in range(300):\n open(str(n), 'wb').write(bytes(1 << 20)); time.sleep(0.001)"
            outcome, _ = script(board, text)
            assert (outcome.status, "it filled the disk" in outcome.message) == (Status.CRASHED, True), outcome
            assert shutil.disk_usage(tmp_path).free > 350 << 20
        agent.stop()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=30)


def test_a_program_of_aarch64(virtual: BlockingSession, board: BlockingSession, tmp_path: pathlib.Path) -> None:
    """A virtual board runs it in QEMU; this machine says why it does not."""
    source, path = tmp_path / "main.c", tmp_path / "main"
    source.write_text(AARCH64)
    command = ["-target", "aarch64-linux-none", "-nostdlib", "-static", "-O1", "-o", str(path), str(source)]
    subprocess.run([sys.executable, "-m", "ziglang", "cc", *command], check=True, timeout=300, capture_output=True)
    sent = {"main": path.read_bytes()}
    outcome, texts = run(virtual, "./main", sent=sent)
    if shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64"):
        assert texts[0] == "aarch64\n", outcome.message
    else:
        assert "needs QEMU" in outcome.message
    outcome, _ = run(board, "./main", sent=sent)
    assert (outcome.status, "another processor" in outcome.message) == (Status.LOAD_FAILED, True), outcome


def test_a_board_owner_says_which_programs_run(start_agent: Callable[..., Agent], spin: bytes) -> None:
    """With --no-programs none runs; with --programs only those, and nothing that is sent."""
    for options, allowed in ((("--no-programs",), False), (("--programs", "/bin/true"), True)):
        with opened(start_agent(*options)) as board:
            assert (run(board, "true")[0].status is Status.OK) is allowed
            outcome, _ = run(board, "./spin", sent={"spin": spin})
            assert outcome.status is Status.LOAD_FAILED
            assert "owner allows no other programs" in outcome.message
