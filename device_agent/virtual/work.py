"""The cost of a call in CPU seconds of this machine: measured once per content and cached.

A cost measured under other load is measured again once the machine is quiet; nothing else changes a cached value.
`pace.py` scales it to a board's clocks. See docs/adr/0032.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from device_agent.protocol import Segment
from device_agent.virtual.gpu_time import Kernel

# Long enough to hide the clock's resolution and the uncounted call.
_BATCH_S = 0.002
# The minimum of several batches is the work, since disturbances only add to it. It is accepted once three batches are
# this close to it, or after the most batches; fewer suffice if calls take long.
_BATCHES, _MOST_BATCHES = 5, 40
_CONFIRMED, _CLOSE = 3, 0.01
_FEWEST, _LONG_S = 3, 1.0
# With a larger share of disturbed batches, other processes shared caches and memory.
_DISTURBED = 0.2
# A cost measured under load stays if it is off by no more, so that figures stay the same.
_SAME = 0.02


@dataclasses.dataclass(frozen=True)
class Work:
    """CPU seconds of one call, on one core and spread over all; and its GPU work.

    `quiet`: no other process computed during the measurement. `segments`: the cost of emulated code, instead of CPU
    seconds; see `device_agent/emulated/estimate.py`.
    """

    alone_s: float
    shared_s: float
    kernels: tuple[Kernel, ...] = ()
    quiet: bool = False
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
    """Work by key, a small file each. Processes may share a folder; the first value of a key stays."""

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
            work = Work(alone_s, shared_s, kernels, bool(value.get("quiet", False)), segments)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return work if 0 <= work.alone_s < math.inf and 0 <= work.shared_s < math.inf and work.base_s(1) > 0 else None

    def keep(self, key: str, work: Work) -> Work:
        """Store `work` unless another process was first; return the valid one. A full folder stores nothing.

        A quiet measurement replaces one under load, unless both agree.
        """
        if self._folder is None:
            return work
        if (before := self.find(key)) is not None:
            if before.quiet or not work.quiet:
                return before
            if abs(work.base_s(1) - before.base_s(1)) <= _SAME * before.base_s(1):
                work = dataclasses.replace(before, quiet=True)
        path = _path(self._folder, key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            new = Path(name)
            try:
                os.write(descriptor, json.dumps(dataclasses.asdict(work)).encode())
                os.close(descriptor)
                try:
                    os.link(new, path)  # unlike a rename it never replaces a file
                except FileExistsError:
                    kept = self.find(key)
                    if kept is not None and (kept.quiet or not work.quiet):
                        return kept
                    new.replace(path)  # measured under load, or truncated by a power cut
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
    seen: list[Work] = []
    others: list[bool] = []
    number = 1
    least = _measure(run, 1, calls_beside, host_cores)
    while time.monotonic() - began < limit_s:
        took = _measure(run, number, calls_beside, host_cores)
        if number * took.base_s(host_cores) < _BATCH_S / 2:
            number = max(2 * number, math.ceil(_BATCH_S / took.base_s(host_cores)))
            continue
        seen.append(took)
        others.append(is_host_busy())
        least = min(seen, key=lambda work: work.base_s(host_cores))
        if len(seen) >= _MOST_BATCHES or (len(seen) >= _FEWEST and time.monotonic() - began > _LONG_S):
            break
        if len(seen) >= _BATCHES and _is_confirmed([each.base_s(host_cores) for each in seen]):
            break
    return dataclasses.replace(least, quiet=bool(others) and sum(others) <= _DISTURBED * len(others))


def is_host_busy() -> bool:
    """Whether other processes of this machine compute now; False if the kernel does not say."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        own = sum(_is_running(task) for task in Path("/proc/self/task").iterdir())
    except (OSError, ValueError, IndexError):
        return False
    return running > own


def _is_running(task: Path) -> bool:
    # The state follows the name, which is in parentheses and may contain any character.
    with contextlib.suppress(OSError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False


def _measure(run: Callable[[int], float], number: int, calls_beside: int, host_cores: int) -> Work:
    cpu_s, own_s = time.process_time(), time.thread_time()
    host_s = run(number)
    calls = number + calls_beside
    # The calling thread's own CPU time if less: beside busy programs it waits for a core and for its helpers.
    own_s = (time.thread_time() - own_s) / calls
    return split_work(min(host_s, own_s), (time.process_time() - cpu_s) / calls, host_cores)


def _is_confirmed(costs_s: list[float]) -> bool:
    return sorted(costs_s)[_CONFIRMED - 1] <= (1 + _CLOSE) * min(costs_s)


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
