"""Compilers in processes of their own that keep TVM loaded: one build each at a time, replaced when old, fat or stuck.

How a process is started and spoken to is its subclasses' business: `farm.campaign.engine.ray_compilers` for campaigns,
`farm.metaschedule.compilers` for scripts. A pool is on one machine; several machines have one each, and what they share is in
`farm.campaign.engine.builds`.
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
from farm.search.build.build_cache import compiler_versions
from farm.settings import Settings
from farm.search import tvm_env
from farm.search.build import builder

# Within its first build's deadline a worker also starts and loads TVM: 4 s on an idle core, a minute on a busy board of
# two. What takes longer was never going to answer.
LOAD_TIMEOUT_S = 90.0
# One that has no build yet: a busy machine takes ten times the usual 3 s to start a process that loads TVM.
START_TIMEOUT_S = 120.0

Job = TypeVar("Job", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """`library` is None unless `status` is `ok`. `died` says that a `farm_error` took the compiler process with it."""

    status: Status
    message: str = ""
    library: bytes | None = dataclasses.field(default=None, repr=False)
    sha256: str | None = None
    seconds: float = 0.0
    died: bool = False


class Builder:
    """What runs in a compiler's process."""

    def __init__(self) -> None:
        tvm_env.load_compiler()
        builder.remove_left()
        self._count = 0

    def build(self, module_json: str, target: Mapping[str, Any], standalone: bool) -> tuple[BuildResult, int, int]:
        """Compile one function. Returns the result, how many builds this was, and the resident size in bytes."""

        self._count += 1
        started = time.monotonic()
        status, library, message = builder.try_to_build(module_json, target, standalone=standalone)
        sha256 = None if library is None else builder.content_address(library)
        result = BuildResult(status, message, library, sha256, time.monotonic() - started)
        return result, self._count, _resident_bytes()

    def pid(self) -> int:
        """Process id, for tests that harm it."""
        return os.getpid()

    def versions(self) -> str:
        """What its libraries depend on; see `compiler_versions`."""
        return compiler_versions()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class CompilerLostError(Exception):
    """A compiler's process is gone, or did not come up; the message says how."""


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
    """Compilers, each with a `Builder`. Not thread-safe. References stand for answers to come."""

    def __init__(self, size: int, settings: Settings) -> None:
        """Start `size` compilers; they load TVM in the background. So many there will be, whatever ends some of them.

        With a size of 0 there are those that are brought by `adopt`, and none takes another's place. Raises
        TransientError where there is no room.
        """
        self._settings = settings
        self._is_fixed = size > 0
        # The answer that says that a compiler has loaded TVM, until it is there.
        self._loading: dict[Any, _Loading] = {}
        self._lacking = 0  # compilers in whose place no other one could be started yet
        self._idle: dict[Any, float] = {}  # and since when
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
        """How many compilers there are."""
        return len(self._idle) + len(self._running)

    @property
    def free(self) -> int:
        """How many builds may be submitted now."""
        return len(self._idle)

    @property
    def pending(self) -> list[Any]:
        """References to wait for."""
        return list(self._running)

    @property
    def loading(self) -> list[Any]:
        """References that say when a compiler has loaded; `look` takes note of them."""
        return list(self._loading)

    @property
    def jobs(self) -> list[Job]:
        """What is being built."""
        return [running.job for running in self._running.values()]

    def look(self) -> str:
        """Take note of compilers that have loaded; never waits. Returns why some could not start, if any could not.

        Those are replaced, and so is one that is late. `versions` is set as soon as one has loaded.
        """
        why = ""
        for reference in self._find_done(self.loading):
            compiler = self._loading.pop(reference).compiler
            try:
                self.versions = str(self._fetch(reference))
            except CompilerLostError as error:
                why = str(error)
                if compiler in self._idle:  # one that is building says so at the end of the build
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
        """Whether a free compiler is ready to build, as far as `look` has seen."""
        return len(self._idle) > sum(compiler in self._idle for compiler in self._list_loading())

    def submit(self, job: Job, module_json: str, target: Mapping[str, Any], standalone: bool = False) -> None:
        """Begin a build; the caller made sure that a compiler is free."""
        self.look()
        loading = self._list_loading()
        # Who was the last to build is the first again: those that are not needed are seen by their being idle.
        newest = list(reversed(self._idle))
        compiler = next((each for each in newest if each not in loading), newest[0])
        del self._idle[compiler]
        now = time.monotonic()
        deadline = now + self._settings.build_timeout_s + (LOAD_TIMEOUT_S if compiler in loading else 0.0)
        reference = self._ask(compiler, module_json, dict(target), standalone)
        self._running[reference] = _Running(job, compiler, deadline, now)

    def poll(self) -> list[tuple[Job, BuildResult]]:
        """What ended since the last time, by itself or by its deadline. Never waits."""
        return [self.collect(each) for each in self._find_done(self.pending)] + self.expire()

    def collect(self, reference: Any) -> tuple[Job, BuildResult]:
        """The outcome of a finished build."""
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
        """Process ids of the idle compilers, for tests that harm them."""
        return [self._find_pid(each) for each in self._idle]

    def adopt(self, compiler: Any, reference: Any) -> None:
        """Take in a compiler that loads TVM; `reference` stands for its `versions`."""
        self._loading[reference] = _Loading(compiler, time.monotonic())
        self._idle[compiler] = time.monotonic()

    def give_back(self, idle_s: float) -> int:
        """End the compilers that have had no build for so long; says how many. Those that still load are left."""
        loading, due = self._list_loading(), time.monotonic() - idle_s
        idle = [each for each, since in self._idle.items() if since <= due and each not in loading]
        for compiler in idle:
            del self._idle[compiler]
            self._kill(compiler)
        return len(idle)

    def close(self) -> None:
        """End all compilers; never raises for those that are gone already."""
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
        self._fill()  # where that fails, `look` tries again and says why: what the caller has to tell comes first

    def _fill(self) -> str:
        """Start the compilers that are lacking; returns why that cannot be done now."""
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
        """A compiler that loads TVM in the background, and the reference to its `versions`."""

    @abc.abstractmethod
    def _ask(self, compiler: Any, *order: Any) -> Any:
        """The reference to what its `Builder.build` answers."""

    @abc.abstractmethod
    def _find_done(self, references: Sequence[Any]) -> list[Any]:
        """The references whose answers, or failures, are there. Never waits."""

    @abc.abstractmethod
    def _fetch(self, reference: Any) -> Any:
        """An answer that is there. Raises CompilerLostError."""

    @abc.abstractmethod
    def _kill(self, compiler: Any) -> None:
        """End a compiler, if it has not ended by itself."""

    @abc.abstractmethod
    def _find_pid(self, compiler: Any) -> int:
        """Process id of a compiler that is idle."""
