"""`FarmBuilder`: MetaSchedule's builder with warm compiler processes and the farm's linker.

MetaSchedule starts a pool of processes per batch, each of which imports for a minute; the farm starts them once.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any

from device_agent.protocol import Status
from farm import settings as farm_settings
from farm.errors import UnavailableError, UsageError
from farm.metaschedule.tvm_objects import as_tvm_object, load_for_script, to_plain_target
from farm.search.codegen.build_pool import START_TIMEOUT_S, BuildPool, BuildResult, ChildCompiler

load_for_script()
import tvm  # noqa: E402
import tvm.s_tir.meta_schedule as ms  # noqa: E402

# Failed starts in a row, without a working compiler, after which starting is given up.
_MAX_FALSE_STARTS = 3
# Deaths after which the job is blamed; a single one may be the kernel's or an operator's choice.
_MAX_DEATHS = 2
# How often deadlines are checked.
_LOOK_S = 0.5


class Compilers(BuildPool[int]):
    """A pool that builds batches. Not thread-safe; call `close`."""

    _asked = _false_starts = 0

    def build(self, jobs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[BuildResult]:
        """Compile (module JSON, target) pairs in order. Raises UnavailableError where compilers do not start."""
        # Numbers continue over batches, since jobs of an interrupted batch may still end.
        numbers = range(self._asked, self._asked + len(jobs))
        self._asked = numbers.stop
        waiting, deaths = collections.deque(numbers), collections.Counter[int]()
        done: dict[int, BuildResult] = {}
        ready_by = time.monotonic() + START_TIMEOUT_S
        while len(done) < len(jobs):
            if why := self.look():
                self._false_starts += 1
                if self._false_starts >= _MAX_FALSE_STARTS and not (self.jobs or self.has_loaded()):
                    raise _unavailable(why)
            elif self.jobs or self.has_loaded():
                self._false_starts, ready_by = 0, time.monotonic() + START_TIMEOUT_S
            elif time.monotonic() > ready_by:
                raise _unavailable(f"none was ready within {START_TIMEOUT_S:g} s")
            while waiting and self.has_loaded():
                number = waiting.popleft()
                self.submit(number, *jobs[number - numbers.start])
            wait(self.pending, _LOOK_S, FIRST_COMPLETED)
            for number, result in self.poll():
                if number not in numbers:
                    continue
                deaths[number] += result.died
                if result.died and deaths[number] < _MAX_DEATHS:
                    waiting.appendleft(number)
                elif result.died:
                    text = f"{_MAX_DEATHS} compilers ended with it; {result.message}"
                    done[number] = dataclasses.replace(result, message=text)
                else:
                    done[number] = result
        return [done[number] for number in numbers]


def _unavailable(why: str) -> UnavailableError:
    return UnavailableError(
        f"the farm's compiler processes do not start: {why}", "Their log is FARM_HOME/logs/script-compilers.log."
    )


@as_tvm_object
class FarmBuilder(ms.builder.PyBuilder):
    """Builds candidates into linked libraries in warm processes; pass it to `tune_*` as `builder=`.

    It runs `max_workers` processes (default: one per core) with `timeout_sec` per build (FARM_BUILD_TIMEOUT_S), for the
    target of the script. The processes end with `close`, a `with` block, or the script.
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
        environment = {"FARM_ZIG_CACHE": str(settings.home_path / "cache" / "zig"), **os.environ}
        self._pid = os.getpid()
        self.compilers = Compilers(
            max_workers or settings.build_workers or len(os.sched_getaffinity(0)),
            dataclasses.replace(settings, build_timeout_s=timeout_sec or settings.build_timeout_s),
            lambda: ChildCompiler(log, environment),
        )
        self._folder = Path(tempfile.mkdtemp(prefix="farm-script-"))
        atexit.register(self.close)

    def build(self, build_inputs: Sequence[Any]) -> list[Any]:
        """Build for MetaSchedule: return a `BuilderResult` per `BuilderInput`, in order."""
        jobs = [(str(tvm.ir.save_json(each.mod)), _to_config(each.target)) for each in build_inputs]
        results = []
        for built in self.compilers.build(jobs):
            if built.library is None:
                ours = "not the candidate's fault: " if built.status is Status.FARM_ERROR and not built.died else ""
                results.append(ms.builder.BuilderResult(None, f"FarmBuilder: {ours}{built.message}"))
                continue
            # A folder each, since MetaSchedule removes the folder of a measured candidate.
            path = Path(tempfile.mkdtemp(dir=self._folder)) / "candidate.so"
            path.write_bytes(built.library)
            results.append(ms.builder.BuilderResult(str(path), None))
        return results

    def close(self) -> None:
        """End the compilers and remove their files. Safe to call twice."""
        if os.getpid() != self._pid:  # a fork of the script ends: its parent still needs them
            return
        atexit.unregister(self.close)
        self.compilers.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder, ignore_errors=True)


def _to_config(target: Any) -> dict[str, Any]:
    """Return a target in dict form. Raises UsageError for one that no board runs."""
    if str(target.kind.name) != "llvm":
        raise UsageError(
            f"the farm builds CPU code only, not for targets of kind {target.kind.name!r}",
            'Tune for a target such as {"kind": "llvm", "num-cores": 4}, or the runner\'s own `target`.',
        )
    return to_plain_target(target)
