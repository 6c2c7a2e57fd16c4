"""Pools of compiler processes that keep TVM loaded; each builds one at a time and is replaced when old, fat or stuck.

Subclasses start processes and talk to them: `farm.campaign.engine.ray_compilers` for campaigns and
`farm.metaschedule.compilers` for scripts. A pool covers one machine; `farm.campaign.engine.builds` spans several.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from device_agent.protocol import Status
from farm.errors import FarmError
from farm.search import tvm_env
from farm.search.build import builder
from farm.search.build.build_cache import compiler_versions
from farm.settings import Settings

# A worker's first build includes starting and loading TVM: 4 s on an idle core, a minute on a busy two-core board.
LOAD_TIMEOUT_S = 90.0
# Deadline for a worker without a build: a busy machine takes ten times the usual 3 s to start Python and load TVM.
START_TIMEOUT_S = 120.0

Job = TypeVar("Job", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """`library` is None unless `status` is `ok`. `died`: the compiler process died with a `farm_error`."""

    status: Status
    message: str = ""
    library: bytes | None = dataclasses.field(default=None, repr=False)
    sha256: str | None = None
    seconds: float = 0.0
    died: bool = False


class Builder:
    """The part that runs in a compiler process."""

    def __init__(self) -> None:
        tvm_env.load_compiler()
        builder.remove_left()
        self._count = 0

    def build(self, module_json: str, target: Mapping[str, Any], standalone: bool) -> tuple[BuildResult, int, int]:
        """Compile one function; return the result, the number of builds so far, and the resident size in bytes."""
        self._count += 1
        started = time.monotonic()
        status, library, message = builder.try_to_build(module_json, target, standalone=standalone)
        sha256 = None if library is None else builder.content_address(library)
        result = BuildResult(status, message, library, sha256, time.monotonic() - started)
        return result, self._count, _resident_bytes()

    def pid(self) -> int:
        """Return the process id, for tests that kill it."""
        return os.getpid()

    def versions(self) -> str:
        """Return the versions that its libraries depend on (`compiler_versions`)."""
        return compiler_versions()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class CompilerLostError(Exception):
    """A compiler process died or failed to start; the message says how."""


@dataclasses.dataclass
class _Running(Generic[Job]):
    job: Job
    compiler: Any
    deadline: float
    started: float


@dataclasses.dataclass(frozen=True)
class _Loading:
    compiler: Any
    started: float


class BuildPool(abc.ABC, Generic[Job]):
    """Compiler processes, each with a `Builder`. Not thread-safe. A reference stands for a pending reply."""

    def __init__(self, size: int, settings: Settings) -> None:
        """Start `size` compilers, which load TVM in the background; one that ends is replaced.

        With size 0 the pool holds only compilers added by `adopt` and replaces none. Raises TransientError where there
        is no room.
        """
        self._settings = settings
        self._is_fixed = size > 0
        # The reference whose reply says that a compiler has loaded TVM.
        self._loading: dict[Any, _Loading] = {}
        self._lacking = 0  # compilers to replace that could not be started yet
        self._idle: dict[Any, float] = {}  # compiler to the time since when it is idle
        self._running: dict[Any, _Running[Job]] = {}
        self.versions = ""
        self.recycled = 0
        try:
            for _ in range(size):
                self._start()
        except FarmError:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The number of compilers."""
        return len(self._idle) + len(self._running)

    @property
    def free(self) -> int:
        """The number of builds that can be submitted now."""
        return len(self._idle)

    @property
    def pending(self) -> list[Any]:
        """References of running builds."""
        return list(self._running)

    @property
    def loading(self) -> list[Any]:
        """References that complete when a compiler has loaded; `look` handles them."""
        return list(self._loading)

    @property
    def jobs(self) -> list[Job]:
        """The jobs being built."""
        return [running.job for running in self._running.values()]

    def look(self) -> str:
        """Register compilers that have loaded; never block. Return why one failed to start, or "".

        A compiler that failed or is late is replaced. `versions` is set once one has loaded.
        """
        why = ""
        for reference in self._find_done(self.loading):
            compiler = self._loading.pop(reference).compiler
            try:
                self.versions = str(self._fetch(reference))
            except CompilerLostError as error:
                why = str(error)
                if compiler in self._idle:  # a building one reports the error at the end of its build
                    del self._idle[compiler]
                    self._replace(compiler)
        due = time.monotonic() - START_TIMEOUT_S
        late = [each.compiler for each in self._loading.values() if each.started <= due and each.compiler in self._idle]
        for compiler in late:
            why = f"one was not ready within {START_TIMEOUT_S:g} s"
            del self._idle[compiler]
            self._replace(compiler)
        return self._fill() or why

    def has_loaded(self) -> bool:
        """Say whether a free compiler was ready at the last `look`."""
        return len(self._idle) > sum(compiler in self._idle for compiler in self._list_loading())

    def submit(self, job: Job, module_json: str, target: Mapping[str, Any], standalone: bool = False) -> None:
        """Start a build; requires a free compiler."""
        self.look()
        loading = self._list_loading()
        # Last in, first out, so that surplus compilers stay idle and can be given back.
        newest = list(reversed(self._idle))
        compiler = next((each for each in newest if each not in loading), newest[0])
        del self._idle[compiler]
        now = time.monotonic()
        deadline = now + self._settings.build_timeout_s + (LOAD_TIMEOUT_S if compiler in loading else 0.0)
        reference = self._ask(compiler, module_json, dict(target), standalone)
        self._running[reference] = _Running(job, compiler, deadline, now)

    def poll(self) -> list[tuple[Job, BuildResult]]:
        """Return the builds that finished or timed out since the last call. Never blocks."""
        return [self.collect(each) for each in self._find_done(self.pending)] + self.expire()

    def collect(self, reference: Any) -> tuple[Job, BuildResult]:
        """Return the outcome of a finished build."""
        running = self._running.pop(reference)
        try:
            result, count, resident = self._fetch(reference)
        except CompilerLostError as error:
            self._replace(running.compiler)
            seconds = time.monotonic() - running.started
            message = f"the compiler process died: {error}"
            return running.job, BuildResult(Status.FARM_ERROR, message, seconds=seconds, died=True)
        if count >= self._settings.build_recycle_count or resident >= self._settings.build_recycle_bytes:
            self._replace(running.compiler)
        else:
            self._idle[running.compiler] = time.monotonic()
        return running.job, result

    def expire(self) -> list[tuple[Job, BuildResult]]:
        """End the builds whose deadline has passed."""
        now = time.monotonic()
        late = [reference for reference, running in self._running.items() if running.deadline < now]
        expired = []
        for reference in late:
            running = self._running.pop(reference)
            self.look()
            seconds = now - running.started
            if running.compiler in self._list_loading():
                message = f"the compiler did not start within {LOAD_TIMEOUT_S:g} s"
                result = BuildResult(Status.FARM_ERROR, message, seconds=seconds, died=True)
            else:
                message = f"not finished within {self._settings.build_timeout_s:g} s"
                result = BuildResult(Status.BUILD_TIMEOUT, message, seconds=seconds)
            self._replace(running.compiler)
            expired.append((running.job, result))
        return expired

    def pids(self) -> list[int]:
        """Return the process ids of the idle compilers, for tests that kill them."""
        return [self._find_pid(each) for each in self._idle]

    def adopt(self, compiler: Any, reference: Any) -> None:
        """Add a compiler that is loading TVM; `reference` stands for its `versions`."""
        self._loading[reference] = _Loading(compiler, time.monotonic())
        self._idle[compiler] = time.monotonic()

    def give_back(self, idle_s: float) -> int:
        """End compilers idle for `idle_s`, except those still loading; return how many."""
        loading, due = self._list_loading(), time.monotonic() - idle_s
        idle = [each for each, since in self._idle.items() if since <= due and each not in loading]
        for compiler in idle:
            del self._idle[compiler]
            self._kill(compiler)
        return len(idle)

    def close(self) -> None:
        """End all compilers; ignore those already gone."""
        for compiler in (*self._idle, *(running.compiler for running in self._running.values())):
            self._kill(compiler)
        self._idle.clear()
        self._running.clear()
        self._loading.clear()

    def _replace(self, compiler: Any) -> None:
        self._kill(compiler)
        self._loading = {key: each for key, each in self._loading.items() if each.compiler is not compiler}
        self.recycled += 1
        self._lacking += self._is_fixed
        self._fill()  # on failure `look` retries and reports the reason

    def _fill(self) -> str:
        """Start the missing compilers; return why one cannot start now, or ""."""
        try:
            while self._lacking:
                self._start()
                self._lacking -= 1
        except FarmError as error:
            return error.message
        return ""

    def _list_loading(self) -> list[Any]:
        return [each.compiler for each in self._loading.values()]

    def _start(self) -> None:
        self.adopt(*self._launch())

    @abc.abstractmethod
    def _launch(self) -> tuple[Any, Any]:
        """Start a compiler; return it and the reference to its `versions`."""

    @abc.abstractmethod
    def _ask(self, compiler: Any, *order: Any) -> Any:
        """Return the reference to the reply of its `Builder.build`."""

    @abc.abstractmethod
    def _find_done(self, references: Sequence[Any]) -> list[Any]:
        """Return the references whose reply or failure is available. Never blocks."""

    @abc.abstractmethod
    def _fetch(self, reference: Any) -> Any:
        """Return an available reply. Raises CompilerLostError."""

    @abc.abstractmethod
    def _kill(self, compiler: Any) -> None:
        """End a compiler unless it has ended."""

    @abc.abstractmethod
    def _find_pid(self, compiler: Any) -> int:
        """Return the process id of an idle compiler."""
