"""The farm's clock, on which leases expire and boards cool down: no setting of the time can move it.

The wall clock is for people alone; see docs/adr/0013-leases-expire-on-the-kernels-clock.md.
"""

from __future__ import annotations

import dataclasses
import functools
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
    return Instant(_read_boot(), time.clock_gettime(time.CLOCK_BOOTTIME))


@functools.cache
def _read_boot() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UnavailableError(f"cannot read {_BOOT_ID}, on which leases rest: {error.strerror}") from error
