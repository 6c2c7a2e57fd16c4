"""A worker's limits: memory, threads, core dumps; and holding a crashing worker.

Applied inside the worker, before it loads foreign code.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

from device_agent.protocol import Limits

# From malloc.h. With glibc's default, each allocating thread reserves 64-128 MiB of address space, charged to the
# candidate; TVM caches its workspaces per thread, so one arena costs nothing.
_M_ARENA_MAX = -8

# TVM's AffinityMode (include/tvm/runtime/threading_backend.h): kBig and kSpecifyThreadShareAllCore.
_FAST_CORES_FIRST = 1
_SHARE_ALL_CORES = -3

# The line of smaps_rollup (proc(5)) for memory that is no file's; kernels before 5.4 do not have it.
_PSS = re.compile(r"^Pss_Anon:\s+(\d+) kB", re.MULTILINE)

# Phrases of Python's fault handler (Modules/faulthandler.c).
_FAULTS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


def apply(limits: Limits, cpus: tuple[int, ...] = ()) -> int:
    """Limit this process; return its address-space limit in bytes."""
    prepare(limits, cpus)
    return allow(limits.memory_bytes)


def prepare(limits: Limits, cpus: tuple[int, ...] = ()) -> None:
    """Disable core dumps, prefer this process for the OOM killer, and start its compute threads.

    TVM's thread pool starts here, so that its stacks are not charged to the candidate. `cpus` places its threads, the
    only way onto isolated cores (isolcpus).
    """
    _yield_to_agent()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    start_threads(thread_count(limits, cpus), cpus)


def prepare_program(limits: Limits, cpus: tuple[int, ...] = ()) -> int:
    """As `apply`, for a worker that only starts programs: each process gets its limit by `allow_program`."""
    _yield_to_agent()
    if cpus:
        os.sched_setaffinity(0, cpus)
    return limits.memory_bytes


def allow_program(pid: int, memory_bytes: int) -> None:
    """Allow another process, and those that it starts, so much private writable memory each.

    Not address space, of which a GPU's driver reserves many times the machine's memory. Raises ProcessLookupError.
    """
    resource.prlimit(pid, resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _yield_to_agent() -> None:
    """Write no core dumps. If the machine runs out of memory, the kernel must kill this process, not the agent."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def allow(memory_bytes: int) -> int:
    """Allow this process so much more address space, permanently; return its limit in bytes."""
    return _limit(resource.RLIMIT_AS, _read_status(os.getpid(), "VmSize") + memory_bytes, for_good=True)


def allow_data(memory_bytes: int) -> int:
    """Allow this process so much more private writable memory, until `lift`; return its limit in bytes.

    For GPU processes: the driver reserves many times the machine's memory as address space. RLIMIT_DATA counts private
    writable pages (setrlimit(2), from Linux 4.7), so neither reservations nor memory shared with a device.
    """
    return _limit(resource.RLIMIT_DATA, data_bytes(os.getpid()) + memory_bytes, for_good=False)


def lift() -> None:
    """Remove the limit of `allow_data`."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _limit(which: int, allowed: int, *, for_good: bool) -> int:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(which, (allowed, allowed if for_good else hard))
    return allowed


def thread_count(limits: Limits, cpus: tuple[int, ...] = ()) -> int:
    """The number of compute threads: as requested, or one per core of the worker."""
    return limits.threads or len(cpus) or len(os.sched_getaffinity(0))


def start_threads(count: int, cpus: tuple[int, ...] = ()) -> None:
    """Start TVM's thread pool with `count` threads, this one included, sharing `cpus` or one per fast core.

    Raises OSError when none of `cpus` is online.
    """
    import tvm_ffi

    os.environ["TVM_NUM_THREADS"] = str(count)
    configure = tvm_ffi.get_global_func("runtime.config_threadpool")
    if cpus:
        os.sched_setaffinity(0, cpus)  # for other threads of the candidate
        configure(_SHARE_ALL_CORES, count, [str(cpu) for cpu in cpus])
    else:
        configure(_FAST_CORES_FIRST, count)


def peak_mapped_bytes(pid: int) -> int:
    """The peak mapped address space of process `pid`; 0 once its memory is gone."""
    return _read_status(pid, "VmPeak")


def data_bytes(pid: int) -> int:
    """The private writable memory of process `pid`, as `allow_data` limits it; 0 once it is gone."""
    return _read_status(pid, "VmData")


def resident_bytes(pids: Sequence[int]) -> int:
    """The memory of processes that is in RAM and their own; what forked ones share is shared out among them."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            if len(pids) > 1 and (found := _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())):
                total += int(found.group(1)) * 1024
            else:
                _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
                total += max(0, resident - shared) * resource.getpagesize()
    return total


def _read_status(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return int(found.group(1)) * 1024
    return 0


def hold_when_crashing(distress: socket.socket) -> None:
    """Make a crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) wait until the other end has read.

    The kernel frees a dying process's memory before it notifies the parent, which then cannot see whether memory ran
    out. Python's fault handler writes its report in small pieces from the signal handler; a minimal socket buffer
    blocks it until the parent reads.
    """
    distress.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    faulthandler.enable(file=distress.fileno(), all_threads=True)


def find_reported_signal(report: str) -> str | None:
    """The signal in a fault handler's report, e.g. `SIGSEGV`."""
    return next((name for words, name in _FAULTS.items() if words in report), None)
