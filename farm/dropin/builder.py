"""`FarmBuilder`: MetaSchedule's builder over compilers that stay warm and the farm's own linker.

Stock starts a pool of processes for every batch, each of which imports for a minute; the farm's are started once.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from farm import settings as farm_settings
from farm.dropin.tvm_objects import as_tvm_object, load_for_script, to_plain_target
from farm.errors import UnavailableError, UsageError
from farm.processes.partners import Child

# A busy machine takes ten times the usual 3 s to start a process that loads TVM.
START_TIMEOUT_S = 120.0
# A compiler that dies on its way up this often in a row will not come up.
_MAX_FALSE_STARTS = 3
# What was there when so many compilers died made them die; one alone may have been the kernel's pick, or an operator's.
_MAX_DEATHS = 2
_MODULE = "farm.dropin.build_process"

load_for_script()
import tvm  # noqa: E402
import tvm.s_tir.meta_schedule as ms  # noqa: E402


@dataclasses.dataclass(frozen=True)
class BuiltForScript:
    """`library` is None where there is none, and `error` says why."""

    library: bytes | None = dataclasses.field(repr=False)
    error: str = ""


class Compilers:
    """Warm compiler processes for one script. Not thread-safe. `close` ends them."""

    def __init__(self, count: int, timeout_s: float, recycle_count: int, start: Callable[[], Child]) -> None:
        """`recycle_count`: builds after which a process is replaced, since TVM's memory only grows."""
        self._timeout_s, self._recycle_count, self._start_child = timeout_s, recycle_count, start
        self._ready: list[Child] = []
        self._starting: dict[Child, float] = {}
        self._busy: dict[Child, tuple[int, float]] = {}
        self._built: dict[Child, int] = {}
        self._deaths: dict[int, int] = {}
        self._waiting: list[int] = []
        self._false_starts = 0
        for _ in range(count):
            self._start()

    def build(self, jobs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[BuiltForScript]:
        """Compile (module JSON, target) pairs, in their order. Raises UnavailableError where compilers do not start."""
        self._waiting, self._deaths = list(range(len(jobs))), {}
        done: dict[int, BuiltForScript] = {}
        while len(done) < len(jobs):
            while self._waiting and self._ready:
                child, number = self._ready.pop(), self._waiting.pop(0)
                self._busy[child] = (number, time.monotonic() + self._timeout_s)
                # Where it is gone, the connection's end comes next.
                child.send(*jobs[number])
            self._collect(done)
            self._expire(done)
        return [done[number] for number in range(len(jobs))]

    def close(self) -> None:
        """End all compilers. Safe to call twice."""
        children = [*self._ready, *self._starting, *self._busy]
        self._ready, self._starting, self._busy = [], {}, {}
        for child in children:
            # They hold nothing but memory: no reason to wait for a build.
            child.kill()

    def pids(self) -> list[int]:
        """Their process ids, for tests that harm them."""
        return [child.process.pid for child in (*self._ready, *self._starting, *self._busy)]

    def _collect(self, done: dict[int, BuiltForScript]) -> None:
        children = {child.connection: child for child in (*self._starting, *self._busy)}
        ends = [*self._starting.values(), *(deadline for _, deadline in self._busy.values())]
        for connection in wait(list(children), max(0.0, min(ends) - time.monotonic())):
            child = children[connection]  # type: ignore[index]
            try:
                message = child.connection.recv()
            except (EOFError, OSError):
                self._bury(child, done)
                continue
            if not message:  # it is ready
                del self._starting[child]
                self._false_starts = 0
            else:
                number, _ = self._busy.pop(child)
                done[number] = BuiltForScript(*message)
                self._built[child] = self._built.get(child, 0) + 1
            if self._built.get(child, 0) < self._recycle_count:
                self._ready.append(child)
            else:
                self._replace(child)

    def _bury(self, child: Child, done: dict[int, BuiltForScript]) -> None:
        """A compiler ended by itself. What it was compiling is tried once more before it is to blame."""
        if child in self._starting:
            self._count_false_start(child.describe_end(), child)
        else:
            number, _ = self._busy.pop(child)
            self._deaths[number] = self._deaths.get(number, 0) + 1
            if self._deaths[number] < _MAX_DEATHS:
                self._waiting.insert(0, number)
            else:
                text = f"{_MAX_DEATHS} compiler processes died of it, the last with {child.describe_end()}"
                done[number] = BuiltForScript(None, text)
        self._replace(child)

    def _expire(self, done: dict[int, BuiltForScript]) -> None:
        now = time.monotonic()
        for child, (number, deadline) in list(self._busy.items()):
            if deadline <= now:
                del self._busy[child]
                done[number] = BuiltForScript(None, f"not built within {self._timeout_s:g} s")
                self._replace(child)
        for child, deadline in list(self._starting.items()):
            if deadline <= now:
                self._count_false_start(f"not ready within {START_TIMEOUT_S:g} s", child)
                self._replace(child)

    def _count_false_start(self, reason: str, child: Child) -> None:
        del self._starting[child]
        self._false_starts += 1
        if self._false_starts >= _MAX_FALSE_STARTS:
            child.kill()
            raise UnavailableError(f"the farm's compiler processes do not start: {reason}", f"See {child.log}.")

    def _replace(self, child: Child) -> None:
        child.kill()
        self._built.pop(child, None)
        self._start()

    def _start(self) -> None:
        self._starting[self._start_child()] = time.monotonic() + START_TIMEOUT_S


@as_tvm_object
class FarmBuilder(ms.builder.PyBuilder):
    """Builds candidates into linked libraries, in warm processes of its own; give it to `tune_*` as `builder=`.

    `max_workers` processes (one per core), `timeout_sec` per build (FARM_BUILD_TIMEOUT_S). Code is made for the target
    that the script tunes for. The processes end with `close`, at the end of a `with` block, or with the script.
    """

    def __init__(self, max_workers: int | None = None, timeout_sec: float | None = None) -> None:
        """Start the compilers; they load TVM in the background. Raises UsageError."""
        super().__init__()
        if max_workers is not None and max_workers < 1:
            raise UsageError(f"max_workers must be at least 1, not {max_workers}")
        if timeout_sec is not None and not timeout_sec > 0:
            raise UsageError(f"timeout_sec must be above 0, not {timeout_sec}")
        settings = farm_settings.load()
        log = settings.home_path / "logs" / "script-compilers.log"
        cache = str(settings.home_path / "cache" / "zig")
        environment = {"FARM_ZIG_CACHE": cache, **os.environ}
        self._pid = os.getpid()
        self.compilers = Compilers(
            max_workers or settings.build_workers or len(os.sched_getaffinity(0)),
            timeout_sec or settings.build_timeout_s,
            settings.build_recycle_count,
            lambda: Child.start(_MODULE, log, environment),
        )
        self._folder = Path(tempfile.mkdtemp(prefix="farm-script-"))
        atexit.register(self.close)

    def build(self, build_inputs: Sequence[Any]) -> list[Any]:
        """What MetaSchedule calls: a `BuilderResult` for each `BuilderInput`, in order."""
        jobs = [(str(tvm.ir.save_json(each.mod)), _to_config(each.target)) for each in build_inputs]
        results = []
        for built in self.compilers.build(jobs):
            if built.library is None:
                results.append(ms.builder.BuilderResult(None, f"FarmBuilder: {built.error}"))
                continue
            # A folder each: MetaSchedule removes the folder of what it has measured.
            path = Path(tempfile.mkdtemp(dir=self._folder)) / "candidate.so"
            path.write_bytes(built.library)
            results.append(ms.builder.BuilderResult(str(path), None))
        return results

    def close(self) -> None:
        """End the compilers and remove what they made. Safe to call twice."""
        if os.getpid() != self._pid:  # a forked copy of the script ends: its parent still needs them
            return
        atexit.unregister(self.close)
        self.compilers.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder, ignore_errors=True)


def _to_config(target: Any) -> dict[str, Any]:
    """A target in the dict form that the farm keeps. Raises UsageError for what its boards do not run."""
    if str(target.kind.name) != "llvm":
        raise UsageError(
            f"the farm builds CPU code only, not for targets of kind {target.kind.name!r}",
            'Tune for a target such as {"kind": "llvm", "num-cores": 4}, or the runner\'s own `target`.',
        )
    return to_plain_target(target)
