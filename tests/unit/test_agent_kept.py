"""Workers that outlive a job: how jobs travel to them, and what of one job is not blamed on the next."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import mmap
import os
import pathlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from device_agent import limits, processes, worker
from device_agent.kept import Orders
from device_agent.marks import Marks
from device_agent.protocol import Limits, Outcome, Status, pack_frame
from device_agent.watch import End, Watch

MEMORY_BYTES = 256 << 20
ALLOWED = Limits(timeout_s=30.0, memory_bytes=MEMORY_BYTES)


def take(marks: Marks, value: bytes) -> bytes:
    """A job: leaves a note."""
    marks.set("cpu_s", len(value))
    return value


def test_a_job_arrives_as_it_was_sent(tmp_path: pathlib.Path) -> None:
    """Marks, which cannot be copied, are the same memory; everything else is the job's own; no file stays."""
    marks = Marks()
    orders = Orders(tmp_path, (marks,))
    orders.send(functools.partial(take, marks, b"x" * 100_000), "more")
    found = orders.receive()
    assert found is not None
    assert found[0]() == b"x" * 100_000
    assert marks.read().cpu_s == 100_000
    assert found[1:] == ("more",)
    assert list(tmp_path.iterdir()) == []
    orders.close(orders.writing)
    assert orders.receive() is None
    orders.close()


def test_a_job_for_a_worker_that_is_gone_is_an_error(tmp_path: pathlib.Path) -> None:
    """Nobody waits for an answer, and its file does not stay."""
    orders = Orders(tmp_path, ())
    orders.clear()
    orders.close(orders.reading)
    with pytest.raises(OSError, match="Broken pipe"):
        orders.send(os.getpid)
    orders.clear()
    assert list(tmp_path.iterdir()) == []
    orders.close(orders.writing)


@contextlib.contextmanager
def start(earlier: Callable[[], object], job: Callable[[], object]) -> Iterator[tuple[worker._Worker, End]]:
    """A worker after it did `job`, one that has done `earlier` before, and what was seen of it."""

    def run() -> bytes:
        job()
        return pack_frame(Outcome(Status.OK, latency_s=(1.0,)).to_json(), b"")

    def body(ends: worker._Ends) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # pytest's, which is inherited
        earlier()
        worker._report(ends, run, lambda: limits.mapped_bytes(os.getpid()) + MEMORY_BYTES)
        signal.pause()

    made = worker._Worker(body, ())
    try:
        yield made, Watch(made, time.monotonic() + 30.0, Marks().read).run()
    finally:
        processes.kill_group(made.pid)
        processes.reap(made.pid, time.monotonic() + 10.0)
        made.leave()


def nothing() -> None:
    """A job."""


def leave_thread() -> None:
    """A job: leaves a thread behind."""
    threading.Thread(target=signal.pause, daemon=True).start()


def pass_through() -> None:
    """A job: much is mapped for a while."""
    mmap.mmap(-1, 4 * MEMORY_BYTES).close()


def crash() -> None:
    """A job: crashes with little mapped."""
    os.kill(os.getpid(), signal.SIGSEGV)


def fill_and_crash() -> None:
    """A job: crashes with almost all mapped that it may."""
    mapped = mmap.mmap(-1, MEMORY_BYTES - (8 << 20))
    os.kill(os.getpid(), signal.SIGSEGV)
    mapped.close()


@pytest.mark.parametrize(
    ("earlier", "job", "goes_on"),
    [(nothing, nothing, True), (leave_thread, nothing, True), (nothing, leave_thread, False)],
    ids=["no thread", "the driver's thread", "the candidate's thread"],
)
def test_a_worker_in_which_a_job_left_a_thread_is_not_kept(
    earlier: Callable[[], object], job: Callable[[], object], goes_on: bool
) -> None:
    """Threads from before the job are no reason."""
    with start(earlier, job) as (made, end):
        assert worker._is_ok(end)
        assert made.may_go_on(ALLOWED, end) is goes_on


@pytest.mark.parametrize(
    ("earlier", "job", "status"),
    [
        (nothing, crash, Status.CRASHED),
        (pass_through, crash, Status.CRASHED),
        (nothing, fill_and_crash, Status.OUT_OF_MEMORY),
        (pass_through, fill_and_crash, Status.OUT_OF_MEMORY),
    ],
)
def test_a_crash_is_not_blamed_on_memory_of_an_earlier_job(
    earlier: Callable[[], object], job: Callable[[], object], status: Status
) -> None:
    """What counts is what the job has mapped itself, whatever the process once had."""
    with start(earlier, job) as (made, end):
        assert end.crashing
        end.status = processes.reap(made.pid, time.monotonic() + 10.0)
        outcome, _ = worker._judge(end, ALLOWED, on_gpu=True)
        assert (outcome.status, outcome.signal) == (status, "SIGSEGV"), outcome.message


@pytest.mark.parametrize(
    ("load_s", "on_gpu", "status", "said"),
    [
        (None, True, Status.FARM_ERROR, "for 30 s: the GPU's driver does not answer"),
        (5.0, True, Status.FARM_ERROR, "for 5 s: the GPU's driver does not answer"),
        (None, False, Status.RUN_TIMEOUT, "not finished after 30 s; nothing of it had been called yet"),
        (5.0, False, Status.LOAD_FAILED, "not loaded within 5 s"),
    ],
)
def test_a_worker_that_never_begins_says_which_deadline_passed(
    load_s: float | None, on_gpu: bool, status: Status, said: str
) -> None:
    """A driver is spoken of where there is one."""
    end = End(status=signal.SIGKILL, timed_out=True, stage="loading")
    outcome, _ = worker._judge(end, Limits(timeout_s=30.0, load_timeout_s=load_s), on_gpu=on_gpu)
    assert outcome.status is status
    assert said in outcome.message


def test_a_limit_of_one_job_is_lifted_after_it() -> None:
    """What the next one needs before its own limit is nobody's."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        allowed = limits.allow(1 << 40, for_good=False)
        assert resource.getrlimit(resource.RLIMIT_AS) == (allowed, before[1])
        limits.lift()
        assert resource.getrlimit(resource.RLIMIT_AS) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
