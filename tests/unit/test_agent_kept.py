"""Workers that outlive a job: how jobs travel to them, and what of one job is not blamed on the next."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import mmap
import os
import pathlib
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from device_agent import processes
from device_agent.protocol import Limits, Outcome, Status, pack_frame
from device_agent.worker import limits, worker
from device_agent.worker.plan import Marks
from device_agent.worker.watch import BEGUN, SIZE, End, Orders, Watch

MEMORY_BYTES = 256 << 20
# From mman.h; Python has no name for it.
MAP_NORESERVE = 0x4000
ALLOWED = Limits(timeout_s=30.0, memory_bytes=MEMORY_BYTES)


def take(marks: Marks, value: bytes) -> bytes:
    marks.set("cpu_s", len(value))
    return value


def test_a_job_arrives_as_it_was_sent(tmp_path: pathlib.Path) -> None:
    """Marks, which cannot be copied, are the same memory; everything else is the job's own; no file stays."""
    marks = Marks()
    orders = Orders(tmp_path, (marks,))
    orders.send(functools.partial(take, marks, b"x" * 100_000), "more")
    found = orders.receive()
    assert found[0]() == b"x" * 100_000
    assert marks.read().cpu_s == 100_000
    assert found[1:] == ("more",)
    assert list(tmp_path.iterdir()) == []
    orders.close(orders.writing)
    assert orders.receive() is None
    orders.close()


def test_a_job_for_a_worker_that_is_gone_is_an_error(tmp_path: pathlib.Path) -> None:
    """The answer is not awaited, and its file does not stay."""
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
        worker._report(ends, run, lambda: limits.data_bytes(os.getpid()) + MEMORY_BYTES)
        signal.pause()

    made = worker._Worker(body, ())
    try:
        watch = Watch(made, time.monotonic() + 30.0, Marks().read)
        watch.look = limits.data_bytes
        yield made, watch.run()
    finally:
        processes.kill_group(made.pid)
        processes.reap(made.pid, time.monotonic() + 10.0)
        made.leave()


def reserve() -> None:
    """Address space that nothing lies in, much of it, for as long as the process runs."""
    mapped = ctypes.CDLL(None, use_errno=True).mmap
    mapped.restype, mapped.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long),
    )
    found = mapped(None, 16 << 30, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    assert found != ctypes.c_void_p(-1).value


def nothing() -> None:
    """A job."""


def leave_thread() -> None:
    threading.Thread(target=signal.pause, daemon=True).start()


def pass_through() -> None:
    """A job: much is taken for a while, and more reserved for good, as a driver does."""
    mmap.mmap(-1, 4 * MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    reserve()


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def fill_and_crash() -> None:
    mapped = mmap.mmap(-1, MEMORY_BYTES - (8 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    os.kill(os.getpid(), signal.SIGSEGV)
    mapped.close()


@pytest.mark.parametrize(
    ("earlier", "job", "jobs", "goes_on"),
    [
        (nothing, nothing, 1, True),
        (leave_thread, nothing, 1, True),
        (nothing, leave_thread, 0, True),
        (nothing, leave_thread, 1, False),
    ],
    ids=["no thread", "the context's thread", "the first kernel's thread", "the candidate's thread"],
)
def test_a_worker_in_which_a_job_left_a_thread_is_not_kept(
    earlier: Callable[[], object], job: Callable[[], object], jobs: int, goes_on: bool
) -> None:
    """Threads from before the job are no reason, nor those of the first one: drivers start some with the first code."""
    with start(earlier, job) as (made, end):
        assert worker._judge(end, ALLOWED)[0].status is Status.OK
        made.jobs = jobs
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
    """What counts is what the job has mapped itself, not what the process had before."""
    with start(earlier, job) as (made, end):
        assert end.crashing
        end.status = processes.reap(made.pid, time.monotonic() + 10.0)
        outcome, _ = worker._judge(end, ALLOWED, on_gpu=True)
        assert (outcome.status, outcome.signal) == (status, "SIGSEGV"), outcome.message


@pytest.mark.parametrize(
    ("load_s", "on_gpu", "status", "said"),
    [
        (None, True, Status.FARM_ERROR, "for 15 s: the GPU's driver does not answer"),
        (5.0, True, Status.FARM_ERROR, "for 15 s: the GPU's driver does not answer"),
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


def take_much_and_reserve() -> None:
    limits.allow_data(MEMORY_BYTES)
    reserve()
    bytearray(2 * MEMORY_BYTES)


def test_address_space_is_not_limited_and_memory_is() -> None:
    """A driver may reserve many times what a job may have; what the job takes beyond its limit fails."""
    with start(nothing, take_much_and_reserve) as (_, end):
        outcome, _ = worker._judge(end, ALLOWED, on_gpu=True)
        assert outcome.status is Status.OUT_OF_MEMORY, outcome.message


def test_a_limit_of_one_job_is_lifted_after_it() -> None:
    """What the next one needs before its own limit counts for no job."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        allowed = limits.allow_data(1 << 40)
        assert resource.getrlimit(resource.RLIMIT_DATA) == (allowed, before[1])
        limits.lift()
        assert resource.getrlimit(resource.RLIMIT_DATA) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_what_a_worker_prepares_counts_against_no_candidate() -> None:
    """Its deadline begins when the worker has what it needs: a driver, arguments."""

    def body(ends: worker._Ends) -> None:
        os.write(ends.report, BEGUN.pack(1, 1))
        signal.pause()

    made = worker._Worker(body, ())
    try:
        begun = time.monotonic()
        watch = Watch(made, begun + 60.0, Marks().read)
        watch.begun_s = 0.1
        assert watch.run().timed_out
        assert time.monotonic() - begun < 30.0
    finally:
        processes.kill_group(made.pid)
        processes.reap(made.pid, time.monotonic() + 10.0)
        made.leave()


def test_a_session_that_looks_late_blames_nobody_for_what_was_prepared_in_time() -> None:
    """What the worker wrote before the deadline lies in the pipe when we come."""
    report = pack_frame(Outcome(Status.OK, latency_s=(1.0,)).to_json(), b"")

    def body(ends: worker._Ends) -> None:
        os.write(ends.report, BEGUN.pack(1, 1) + SIZE.pack(len(report)) + report)
        signal.pause()

    made = worker._Worker(body, ())
    try:
        assert select.select([made.report], [], [], 30.0)[0]
        watch = Watch(made, time.monotonic() - 1.0, Marks().read)
        watch.begun_s = 30.0
        end = watch.run()
        assert (end.timed_out, end.report) == (False, report)
    finally:
        processes.kill_group(made.pid)
        processes.reap(made.pid, time.monotonic() + 10.0)
        made.leave()
