"""The cost of a call: found once per content and cached; `pace.py` scales it to a board's clocks. See docs/adr/0032.

Emulated code has an estimate. Code of this machine, which only agents without an emulator run, has its CPU seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from device_agent.protocol import Segment
from farm.virtual.gpu_time import Kernel

# Long enough to hide the clock's resolution and the uncounted call.
_BATCH_S = 0.002
# The minimum of several batches is the work, since disturbances only add to it; fewer suffice if calls take long.
_BATCHES, _FEWEST, _LONG_S = 8, 3, 1.0


@dataclasses.dataclass(frozen=True)
class Work:
    """CPU seconds of one call, on one core and spread over all; and its GPU work.

    `segments`: the cost of emulated code, instead of CPU seconds; see `farm/virtual/emulated/estimate.py`.
    """

    alone_s: float
    shared_s: float
    kernels: tuple[Kernel, ...] = ()
    segments: tuple[Segment, ...] = ()

    def base_s(self, cores: int) -> float:
        """Its time when parallel work spreads over so many cores."""
        return self.alone_s + self.shared_s / cores


def make_key(*parts: bytes | str) -> str:
    """The cache key: a hash over the parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class WorkBook:
    """Work by key, a small file each. Processes may share a folder; a value that is known stays."""

    def __init__(self, folder: Path | None) -> None:
        """None caches nothing."""
        self._folder = folder

    def find(self, key: str) -> Work | None:
        """The cached work of `key`; None also for an unreadable file."""
        if self._folder is None:
            return None
        try:
            value = json.loads(_path(self._folder, key).read_text())
            alone_s, shared_s = float(value["alone_s"]), float(value["shared_s"])
            kernels = tuple(Kernel(**each) for each in value.get("kernels", ()))
            segments = tuple((float(a), int(b), float(c), int(d)) for a, b, c, d in value.get("segments", ()))
            work = Work(alone_s, shared_s, kernels, segments)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return work if 0 <= work.alone_s < math.inf and 0 <= work.shared_s < math.inf and work.base_s(1) > 0 else None

    def keep(self, key: str, work: Work) -> Work:
        """Store `work` unless the key is known; return the valid one. A full folder stores nothing."""
        if self._folder is None:
            return work
        if (before := self.find(key)) is not None:
            return before
        path = _path(self._folder, key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".new-{os.getpid()}-{path.name}")
            try:
                new.write_text(json.dumps(dataclasses.asdict(work)))
                new.replace(path)
            finally:
                new.unlink(missing_ok=True)
        return work


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"


def establish(run: Callable[[int], float], calls_beside: int, host_cores: int, limit_s: float = math.inf) -> Work:
    """Measure one call: the minimum of several batches. `run(n)` makes n calls, and `calls_beside` more.

    `run` returns the host's seconds per call. The very first call, which loads code and data, counts only if `limit_s`
    leaves time for no other.
    """
    began = time.monotonic()
    number, batches = 1, 0
    least = _measure(run, 1, calls_beside, host_cores)
    while batches < _BATCHES and time.monotonic() - began < limit_s:
        took = _measure(run, number, calls_beside, host_cores)
        if number * took.base_s(host_cores) < _BATCH_S / 2:
            number = max(2 * number, math.ceil(_BATCH_S / took.base_s(host_cores)))
            continue
        least = min(least, took, key=lambda work: work.base_s(host_cores)) if batches else took
        batches += 1
        if batches >= _FEWEST and time.monotonic() - began > _LONG_S:
            break
    return least


def _measure(run: Callable[[int], float], number: int, calls_beside: int, host_cores: int) -> Work:
    cpu_s, own_s, programs_s = time.process_time(), time.thread_time(), _read_programs_s()
    host_s = run(number)
    calls = number + calls_beside
    programs_s = _read_programs_s() - programs_s
    # The calling thread's own CPU time if less: beside busy programs it waits for a core and for its helpers.
    own_s = (time.thread_time() - own_s + programs_s) / calls
    return split_work(min(host_s, own_s), (time.process_time() - cpu_s + programs_s) / calls, host_cores)


def _read_programs_s() -> float:
    """The CPU time of the programs that this process ran to their end, in s."""
    ran = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ran.ru_utime + ran.ru_stime


def split_work(host_s: float, cpu_s: float, host_cores: int) -> Work:
    """Split a call that took `host_s` with `cpu_s` of CPU time on `host_cores`.

    CPU time below the wall time means waiting, mostly for other processes of the host, which the board would not do.
    CPU time above the cores' capacity was not the call's.
    """
    cpu_s = min(cpu_s, host_s * host_cores)
    if host_cores == 1 or cpu_s <= host_s:
        return Work(max(cpu_s, 1e-9), 0.0)
    shared_s = min((cpu_s - host_s) * host_cores / (host_cores - 1), cpu_s)
    return Work(cpu_s - shared_s, shared_s)
