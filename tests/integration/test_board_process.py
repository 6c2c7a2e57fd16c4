"""A board's process as its driver sees it: its input, and how it ends, dies and hangs."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from device_agent.protocol import Engine, MeasureSpec, OperatingPoint, RunSpec
from farm.crew import board_calls
from farm.crew.board_calls import BoardProcess, JobOrder, ProcessLostError, plan_limit_s
from farm.crew.board_process import Open, Request
from farm.crew.session_holder import Address
from farm.errors import DeadlineError, TransientError
from farm.measure.arrays import SharedBuffer, read
from farm.measure.asking import AgentAddress
from tests.awaiting import await_here

# Nothing listens there.
NOWHERE = Address(AgentAddress("127.0.0.1", 1), "jetson-nano/n1", None)
BIG = bytes(4 << 20)


@pytest.fixture
def process(tmp_path: pathlib.Path) -> Iterator[BoardProcess]:
    process = BoardProcess(tmp_path / "log")
    yield process
    process.kill()
    assert not psutil.pid_exists(process.pid)


def test_what_is_handed_over_is_gone_with_its_giver() -> None:
    """Small data is itself, big data can be read under its name for as long as its giver keeps it."""
    assert SharedBuffer(b"small").name == b"small"
    buffer = SharedBuffer(BIG)
    name = buffer.name
    assert (len(name), read(name)) == (len(BIG), BIG)
    del buffer
    with pytest.raises(TransientError, match="gone"):
        read(name)


def test_a_program_is_handed_over_once() -> None:
    """However often it is run, and whichever board runs it."""
    first, second = (board_calls.measure(MeasureSpec(()), BIG).job for _ in range(2))
    assert first == second


def test_a_stopped_process_holds_nobody_up(process: BoardProcess) -> None:
    """Sending big programs to one returns at once; who waits hears in time that it is stuck, and it is ended."""
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    order = board_calls.run(RunSpec(Engine.KERNEL), BIG, {})
    request = Request(NOWHERE, order.job, OperatingPoint(), 1.0)
    for _ in range(50):
        process.ask(order, request)
    with pytest.raises(ProcessLostError, match="stuck"):
        await_here(process.call(order, request, 0.2))
    assert time.monotonic() - began < 20


def test_a_job_that_waits_is_taken_back_and_a_dead_process_says_so(process: BoardProcess) -> None:
    """A job revoked before it began ends with None, also where the process itself has only begun; the end of the
    process is heard by the one that waits for it.
    """
    order = JobOrder(Open(0.2))
    # The first job waits for a board that never answers, so that the second has not begun when it is taken back.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        absent = Address(AgentAddress(*silent.getsockname()), "jetson-nano/n1", None)
        numbers = [process.ask(order, Request(absent, order.job, OperatingPoint(), 0.2)) for _ in range(2)]
        process.revoke(numbers[1])
        process.revoke(numbers[0])
        assert [process.receive() for _ in numbers] == [(number, None) for number in numbers]
    ended = await_here(process.call(order, Request(NOWHERE, order.job), plan_limit_s(order.job, 0.2)))
    assert isinstance(ended.result, TransientError)
    assert not isinstance(ended.result, DeadlineError)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="signal 9"), contextlib.closing(process.connection):
        process.receive()
