"""The farm's clock, on which leases expire and boards cool down: no setting of the time can move it.

The wall clock is for people alone; see docs/adr/0013-leases-expire-on-the-kernels-clock.md.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from pathlib import Path

from farm.errors import UnavailableError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Instant:
    """`seconds` on the clock called `clock`. Seconds of two clocks say nothing about each other."""

    clock: str
    seconds: float


def read_clock() -> Instant:
    """Seconds since this kernel started, time asleep included: CLOCK_BOOTTIME, clock_gettime(2).

    Every process of one kernel reads the same clock; another start of it is another clock, random(4). Raises
    UnavailableError where the kernel does not say which start it is.
    """
    return Instant(read_boot(), time.clock_gettime(time.CLOCK_BOOTTIME))


@functools.cache
def read_process_space() -> str:
    """What tells this kernel's start and this container's processes from all others, as eight hexadecimal digits.

    The number of a process means something within one alone: pid_namespaces(7). Raises UnavailableError.
    """
    return hashlib.sha256(f"{read_boot()} {read_namespace()}".encode()).hexdigest()[:8]


def read_namespace() -> str:
    """The number of the namespace of processes that this one is in: pid_namespaces(7)."""
    return str(Path("/proc/self/ns/pid").readlink()).strip("pid:[]")


@functools.cache
def read_boot() -> str:
    """Which start of the kernel this is. Raises UnavailableError where it does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UnavailableError(f"cannot read {_BOOT_ID}, on which leases rest: {error.strerror}") from error
