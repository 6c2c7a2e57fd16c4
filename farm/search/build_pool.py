"""Compilers in Ray workers that keep TVM loaded: one build each at a time, replaced when old, fat, stuck or dead.

They are actors rather than plain tasks, so that who is replaced, and when, is decided here and not by Ray's pool. A
pool is on one machine; several machines have one each, and what they share is in `farm.campaign.engine.builds`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray

from device_agent.protocol import Status
from farm.search.build_cache import compiler_versions
from farm.search.tvm_errors import find_reason
from farm.settings import Settings

# Within its first build's deadline a worker also starts and loads TVM: 4 s on an idle core, a minute on a busy board of
# two. What takes longer was never going to answer.
LOAD_TIMEOUT_S = 90.0

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
    """What runs in a Ray worker."""

    def __init__(self) -> None:
        from farm.search import builder, tvm_env

        tvm_env.load_compiler()
        builder.remove_left()
        self._count = 0

    def build(self, module_json: str, target: Mapping[str, Any], standalone: bool) -> tuple[BuildResult, int, int]:
        """Compile one function. Returns the result, how many builds this was, and the resident size in bytes."""
        from farm.search import builder

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


@dataclasses.dataclass
class _Running(Generic[Job]):
    job: Job
    actor: Any
    deadline: float
    started: float


class BuildPool(Generic[Job]):
    """A fixed number of builders. Not thread-safe."""

    def __init__(self, size: int, settings: Settings, options: Mapping[str, Any] | None = None) -> None:
        """Start `size` workers; they load TVM in the background. `options` are Ray's for actors: where they run."""
        self._settings = settings
        self._options = {"num_cpus": 0, "max_restarts": 0, **(options or {})}
        # The answer that says that a worker has loaded TVM, until it is there.
        self._loading: dict[Any, Any] = {}
        self._idle = [self._start() for _ in range(size)]
        self._running: dict[Any, _Running[Job]] = {}
        self.versions = ""
        self.recycled = 0

    @property
    def free(self) -> int:
        """How many builds may be submitted now."""
        return len(self._idle)

    @property
    def pending(self) -> list[Any]:
        """Ray references to wait for."""
        return list(self._running)

    @property
    def loading(self) -> list[Any]:
        """Ray references that say when a worker has loaded; `look` takes note of them."""
        return list(self._loading)

    @property
    def jobs(self) -> list[Job]:
        """What is being built."""
        return [running.job for running in self._running.values()]

    def look(self) -> str:
        """Take note of workers that have loaded; never waits. Returns why workers could not start, if any could not.

        Those are replaced. `versions` is set as soon as one has loaded.
        """
        if not self._loading:
            return ""
        why = ""
        done, _ = ray.wait(list(self._loading), num_returns=len(self._loading), timeout=0)
        for reference in done:
            actor = self._loading.pop(reference)
            try:
                self.versions = str(ray.get(reference))
            except ray.exceptions.RayError as error:
                why = f"{type(error).__name__}: {find_reason(error)}"
                if actor in self._idle:  # one that is building says so at the end of the build
                    self._idle.remove(actor)
                    self._replace(actor)
        return why

    def has_loaded(self) -> bool:
        """Whether a free worker is ready to build, as far as `look` has seen."""
        return len(self._idle) > sum(actor in self._idle for actor in self._loading.values())

    def submit(self, job: Job, module_json: str, target: Mapping[str, Any], standalone: bool = False) -> None:
        """Begin a build; the caller made sure that a worker is free."""
        self.look()
        loading = list(self._loading.values())
        actor = next((each for each in self._idle if each not in loading), self._idle[-1])
        self._idle.remove(actor)
        now = time.monotonic()
        deadline = now + self._settings.build_timeout_s + (LOAD_TIMEOUT_S if actor in loading else 0.0)
        reference = actor.build.remote(module_json, dict(target), standalone)
        self._running[reference] = _Running(job, actor, deadline, now)

    def collect(self, reference: Any) -> tuple[Job, BuildResult]:
        """The outcome of a finished build."""
        running = self._running.pop(reference)
        try:
            result, count, resident = ray.get(reference)
        except ray.exceptions.RayError as error:
            self._replace(running.actor)
            message = f"the compiler process died: {str(error).strip().splitlines()[0]}"
            return running.job, BuildResult(
                Status.FARM_ERROR, message, seconds=time.monotonic() - running.started, died=True
            )
        if count >= self._settings.build_recycle_count or resident >= self._settings.build_recycle_bytes:
            self._replace(running.actor)
        else:
            self._idle.append(running.actor)
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
            if running.actor in self._loading.values():
                message = f"the compiler did not start within {LOAD_TIMEOUT_S:g} s"
                result = BuildResult(Status.FARM_ERROR, message, seconds=seconds, died=True)
            else:
                message = f"not finished within {self._settings.build_timeout_s:g} s"
                result = BuildResult(Status.BUILD_TIMEOUT, message, seconds=seconds)
            self._replace(running.actor)
            expired.append((running.job, result))
        return expired

    def pids(self) -> list[int]:
        """Process ids of the idle workers, for tests that harm them."""
        return [int(pid) for pid in ray.get([actor.pid.remote() for actor in self._idle])]

    def close(self) -> None:
        """End all workers; never raises for those that are gone already."""
        for actor in [*self._idle, *(running.actor for running in self._running.values())]:
            _kill(actor)
        self._idle.clear()
        self._running.clear()
        self._loading.clear()

    def _replace(self, actor: Any) -> None:
        _kill(actor)
        self._loading = {reference: each for reference, each in self._loading.items() if each is not actor}
        self.recycled += 1
        self._idle.append(self._start())

    def _start(self) -> Any:
        actor = ray.remote(**self._options)(Builder).remote()
        self._loading[actor.versions.remote()] = actor
        return actor


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor)
