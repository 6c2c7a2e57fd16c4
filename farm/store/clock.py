"""The farm's clock for leases and cool-downs, which setting the time cannot move.

The wall clock is for people; see docs/adr/0013-leases-expire-on-the-kernels-clock.md.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from farm.errors import UnavailableError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Instant:
    """`seconds` on the clock called `clock`. Seconds of different clocks are not comparable."""

    clock: str
    seconds: float

    def claim(self, ttl_s: float) -> dict[str, Any]:
        """The columns of a row that is valid for `ttl_s` from now: a lease, a route, a request, an engine."""
        return {"clock": self.clock, "expires_s": self.seconds + ttl_s}

    def is_valid(self, row: Mapping[str, Any], prefix: str = "") -> bool:
        """Whether such a row is valid. One on another clock is from before this kernel's boot: its holder is gone."""
        return bool(row[f"{prefix}clock"] == self.clock and row[f"{prefix}expires_s"] > self.seconds)

    def find_lapsed(self, table: sa.Table) -> sa.ColumnElement[bool]:
        """The condition that such a row is no longer valid."""
        return (table.c.clock != self.clock) | (table.c.expires_s <= self.seconds)


def read_clock() -> Instant:
    """Seconds since this kernel's boot, suspend included: CLOCK_BOOTTIME, clock_gettime(2).

    All processes of one kernel share it; each boot is another clock, random(4). Raises UnavailableError if the kernel
    has no boot identity.
    """
    return Instant(read_boot(), time.clock_gettime(time.CLOCK_BOOTTIME))


@functools.cache
def read_process_space() -> str:
    """Identify this boot and this container's processes, as eight hexadecimal digits.

    A pid is meaningful only within one such space: pid_namespaces(7). Raises UnavailableError.
    """
    return hashlib.sha256(f"{read_boot()} {read_namespace()}".encode()).hexdigest()[:8]


def read_namespace() -> str:
    """The number of this process's pid namespace: pid_namespaces(7)."""
    return str(Path("/proc/self/ns/pid").readlink()).strip("pid:[]")


@functools.cache
def read_boot() -> str:
    """Identify this boot of the kernel. Raises UnavailableError if it is unreadable."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UnavailableError(f"cannot read {_BOOT_ID}, on which leases rest: {error.strerror}") from error
