"""What a worker may use: memory, threads, core dumps; and the hold on a crashing worker.

Applied inside the worker, before it loads anything foreign.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import resource
import socket
from pathlib import Path

from device_agent.protocol import Limits

# From malloc.h. With glibc's default, every thread that allocates reserves 64-128 MiB of address space, which would
# count as the candidate's; TVM's own workspaces are cached per thread, so one arena costs them nothing.
_M_ARENA_MAX = -8

# TVM's AffinityMode (include/tvm/runtime/threading_backend.h): kBig and kSpecifyThreadShareAllCore.
_FAST_CORES_FIRST = 1
_SHARE_ALL_CORES = -3

# The words of Python's fault handler (Modules/faulthandler.c).
_FAULTS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


def apply(limits: Limits, cpus: tuple[int, ...] = ()) -> int:
    """Limit this process; return the address space it may map, in bytes."""
    prepare(limits, cpus)
    return allow(limits.memory_bytes)


def prepare(limits: Limits, cpus: tuple[int, ...] = ()) -> None:
    """Have this process dump no core, die before the agent does where memory runs out, and compute with its threads.

    TVM's thread pool is started here, so that its stacks are not charged to the candidate. With `cpus` its threads are
    placed on those cores, which is the only way onto cores that the kernel keeps free of everything (isolcpus).
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        # When the machine itself runs out, the kernel must take this process, not the agent.
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    start_threads(thread_count(limits, cpus), cpus)


def allow(memory_bytes: int) -> int:
    """Let this process map so much more than it has, for good; return what it may map in all, in bytes."""
    return _limit(resource.RLIMIT_AS, mapped_bytes(os.getpid()) + memory_bytes, for_good=True)


def allow_data(memory_bytes: int) -> int:
    """Let this process have so much more writable memory of its own than it has, until `lift`; return how much in all.

    For processes that use a GPU: its driver reserves many times the machine's memory as address space, now and later.
    The kernel counts private pages that may be written (setrlimit(2), RLIMIT_DATA, from Linux 4.7), so neither what is
    only reserved nor what a device shares.
    """
    return _limit(resource.RLIMIT_DATA, data_bytes(os.getpid()) + memory_bytes, for_good=False)


def lift() -> None:
    """Let this process have what memory it likes again, after `allow_data`."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _limit(which: int, allowed: int, *, for_good: bool) -> int:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(which, (allowed, allowed if for_good else hard))
    return allowed


def thread_count(limits: Limits, cpus: tuple[int, ...] = ()) -> int:
    """The number of threads a worker computes with: as asked for, or one per core it is placed on or may use."""
    return limits.threads or len(cpus) or len(os.sched_getaffinity(0))


def start_threads(count: int, cpus: tuple[int, ...] = ()) -> None:
    """Start TVM's thread pool with `count` threads, this one included, sharing `cpus` or one on each fast core.

    Raises OSError when none of `cpus` is online.
    """
    import tvm_ffi

    os.environ["TVM_NUM_THREADS"] = str(count)
    configure = tvm_ffi.get_global_func("runtime.config_threadpool")
    if cpus:
        os.sched_setaffinity(0, cpus)  # for whatever else the candidate starts
        configure(_SHARE_ALL_CORES, count, [str(cpu) for cpu in cpus])
    else:
        configure(_FAST_CORES_FIRST, count)


def mapped_bytes(pid: int) -> int:
    """The address space that process `pid` has mapped now; 0 once it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


def peak_mapped_bytes(pid: int) -> int:
    """The most address space that process `pid` ever had mapped; 0 once its memory is gone."""
    return _read_status(pid, "VmPeak")


def data_bytes(pid: int) -> int:
    """The writable memory of its own that process `pid` has now, as `allow_data` limits it; 0 once it is gone."""
    return _read_status(pid, "VmData")


def _read_status(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return int(found.group(1)) * 1024
    return 0


def hold_when_crashing(distress: socket.socket) -> None:
    """Make a crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) wait until the other end has looked.

    The kernel takes a dying process's memory away before it tells the parent, so that the parent could not see
    whether memory had run out. Python's fault handler writes its report from within the signal handler in many
    small pieces; a socket buffer as small as the kernel allows stops it there until the parent reads.
    """
    distress.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    faulthandler.enable(file=distress.fileno(), all_threads=True)


def find_reported_signal(report: str) -> str | None:
    """The signal that a fault handler's report speaks of, e.g. `SIGSEGV`."""
    return next((name for words, name in _FAULTS.items() if words in report), None)
