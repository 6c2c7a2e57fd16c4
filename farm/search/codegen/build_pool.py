"""Pools of compiler processes that keep TVM loaded; each builds one at a time and is replaced when old, fat or stuck.

They are Ray actors for campaigns (`farm.campaign.engine.builds`) and children for scripts
(`farm.metaschedule.builder`). A pool covers one machine; `farm.campaign.engine.builds` spans several.
`BuildCache` keeps what they built, keyed by its inputs: a miss or a failure means that the caller builds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from device_agent.protocol import Status
from farm import folders
from farm.errors import FarmError
from farm.processes.calls import Calls
from farm.processes.jobs import JobProcess, ProcessEndedError
from farm.search import tvm_env
from farm.search.codegen import lowering
from farm.search.tvm_errors import find_reason
from farm.settings import Settings

# A library is 17 to 60 KB, so this keeps some fifty thousand.
MAX_BYTES = 2 << 30
# After this many new files the folder is scanned and trimmed to this share of its limit.
_LOOK_EVERY = 1000
_KEPT_SHARE = 0.8
# Version of the steps between module and library; raise it when `lowering` or `linker` change them.
_RECIPE = 4
_SUM_BYTES = hashlib.sha256().digest_size
# A worker's first build includes starting and loading TVM: 4 s on an idle core, a minute on a busy two-core board.
LOAD_TIMEOUT_S = 90.0
# Deadline for a worker without a build: a busy machine takes ten times the usual 3 s to start Python and load TVM.
START_TIMEOUT_S = 120.0
Job = TypeVar("Job", bound=Hashable)


@functools.cache
def compiler_versions() -> str:
    """Return the versions that a library depends on besides its module and target, as one line. Loads no TVM."""
    packages = ("apache-tvm", "apache-tvm-ffi", "ziglang")
    return " ".join([*(f"{each}=={importlib.metadata.version(each)}" for each in packages), f"recipe=={_RECIPE}"])


def build_key(module_json: str, target: Mapping[str, Any], standalone: bool) -> str:
    """Return the cache key of a build as hexadecimal: equal for equal input and compiler."""
    terms = [compiler_versions(), json.dumps(dict(target), sort_keys=True), str(bool(standalone)), module_json]
    return hashlib.sha256("\0".join(terms).encode()).hexdigest()


class BuildCache:
    """Libraries in `folder`. Several processes may share it. Not thread-safe."""

    def __init__(self, folder: Path, note: Callable[[str], None], max_bytes: int = MAX_BYTES) -> None:
        """`note` gets one message when the folder cannot be used."""
        self._folder, self._note, self._max_bytes = folder, note, max_bytes
        self._warned = False
        self._until_look = _LOOK_EVERY

    def find(self, key: str) -> bytes | None:
        """Return the library, or None. Remove a damaged file."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            library = content[_SUM_BYTES:]
            if library and hashlib.sha256(library).digest() == content[:_SUM_BYTES]:
                os.utime(path)  # used now: the last to be dropped
                return library
            path.unlink()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
        return None

    def keep(self, key: str, library: bytes) -> None:
        """Write a library atomically. A full disk only loses the entry."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with folders.new_file(path) as part:
                part.write_bytes(hashlib.sha256(library).digest() + library)
        except OSError as error:
            self._warn(error)
            return
        self._until_look -= 1
        if self._until_look <= 0:
            self.trim()

    def trim(self) -> None:
        """Remove the least recently used files until the folder is well below its limit."""
        self._until_look = _LOOK_EVERY
        files: list[tuple[float, int, Path]] = []
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):  # removed meanwhile, by another process
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._max_bytes:
            return
        for _, size, path in sorted(files):
            if total <= self._max_bytes * _KEPT_SHARE:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._note(f"cannot cache built libraries in {self._folder}: {error.strerror or error}")


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
        lowering.remove_left()
        self._count = 0

    def build(self, module_json: str, target: Mapping[str, Any], standalone: bool) -> tuple[BuildResult, int, int]:
        """Compile one function; return the result, the number of builds so far, and the resident size in bytes."""
        self._count += 1
        started = time.monotonic()
        status, library, message = lowering.try_to_build(module_json, target, standalone=standalone)
        sha256 = None if library is None else lowering.content_address(library)
        result = BuildResult(status, message, library, sha256, time.monotonic() - started)
        return result, self._count, int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def pid(self) -> int:
        """Return the process id, for tests that kill it."""
        return os.getpid()

    def load(self) -> str:
        """Return the versions that its libraries depend on (`compiler_versions`)."""
        return compiler_versions()


@functools.cache
def _builder() -> Builder:
    return Builder()


def serve(method: str, *arguments: Any) -> Any:
    """Call a method of this process's `Builder`; the first call loads TVM."""
    return getattr(_builder(), method)(*arguments)


class Compiler(Protocol):
    """A process that serves its `Builder`'s methods in turn."""

    def call(self, method: str, *arguments: Any) -> Future[Any]: ...

    def kill(self) -> None:
        """End it unless it has ended."""


class ChildCompiler:
    """A compiler as a child process."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self._process = JobProcess(log, environment)
        self.kill = self._process.close

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return self._process.give(functools.partial(serve, method, *arguments))


@dataclasses.dataclass
class _Running(Generic[Job]):
    job: Job
    compiler: Compiler
    started: float


class BuildPool(Generic[Job]):
    """Compiler processes, each with a `Builder`. Not thread-safe."""

    def __init__(self, size: int, settings: Settings, launch: Callable[[], Compiler]) -> None:
        """Launch `size` compilers, which load TVM in the background; one that ends is replaced.

        With size 0 the pool holds only compilers added by `adopt` and replaces none. Raises TransientError where there
        is no room.
        """
        self._settings, self._launch = settings, launch
        self._is_fixed = size > 0
        self._loading: Calls[Compiler] = Calls()
        self._lacking = 0  # compilers to replace that could not be started yet
        self._idle: dict[Compiler, float] = {}  # the time since when each is idle
        self._running: Calls[_Running[Job]] = Calls()
        self.versions = ""
        self.recycled = 0
        try:
            for _ in range(size):
                self.adopt(launch())
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
    def pending(self) -> list[Future[Any]]:
        """Calls to wait for; `look` and `poll` handle them."""
        return [*self._running.pending, *self._loading.pending]

    @property
    def loading(self) -> int:
        """The number of compilers that have not loaded."""
        return len(self._loading)

    @property
    def jobs(self) -> list[Job]:
        """The jobs being built."""
        return [running.job for running in self._running.about]

    def look(self) -> str:
        """Register compilers that have loaded; never block. Return why one failed to start, or "".

        A compiler that failed or is late is replaced. `versions` is set once one has loaded.
        """
        why = ""
        for compiler, call in self._loading.take():
            is_idle = compiler in self._idle
            if not call.done() and not is_idle:  # it has its build's deadline
                self._loading.add(call, compiler, START_TIMEOUT_S)
                continue
            if call.done() and call.exception() is None:
                self.versions = str(call.result())
                continue
            why = explain(call) if call.done() else f"one was not ready within {START_TIMEOUT_S:g} s"
            if is_idle:  # a building one reports the error at the end of its build
                del self._idle[compiler]
                self._replace(compiler)
        return self._fill() or why

    def has_loaded(self) -> bool:
        """Say whether a free compiler was ready at the last `look`."""
        return len(self._idle) > sum(compiler in self._idle for compiler in self._loading.about)

    def submit(self, job: Job, module_json: str, target: Mapping[str, Any], standalone: bool = False) -> None:
        """Start a build; requires a free compiler."""
        self.look()
        loading = self._loading.about
        # Last in, first out, so that surplus compilers stay idle and can be given back.
        newest = list(reversed(self._idle))
        compiler = next((each for each in newest if each not in loading), newest[0])
        del self._idle[compiler]
        timeout_s = self._settings.build_timeout_s + (LOAD_TIMEOUT_S if compiler in loading else 0.0)
        call = compiler.call("build", module_json, dict(target), standalone)
        self._running.add(call, _Running(job, compiler, time.monotonic()), timeout_s)

    def poll(self) -> list[tuple[Job, BuildResult]]:
        """Return the builds that finished or timed out since the last call. Never blocks."""
        return [(running.job, self._conclude(running, call)) for running, call in self._running.take()]

    def pids(self) -> list[int]:
        """Return the process ids of the idle compilers, for tests that kill them."""
        return [int(each.call("pid").result(START_TIMEOUT_S)) for each in self._idle]

    def adopt(self, compiler: Compiler) -> None:
        """Add a compiler that was just started."""
        self._loading.add(compiler.call("load"), compiler, START_TIMEOUT_S)
        self._idle[compiler] = time.monotonic()

    def give_back(self, idle_s: float) -> int:
        """End compilers idle for `idle_s`, except those still loading; return how many."""
        loading, due = self._loading.about, time.monotonic() - idle_s
        idle = [each for each, since in self._idle.items() if since <= due and each not in loading]
        for compiler in idle:
            del self._idle[compiler]
            compiler.kill()
        return len(idle)

    def close(self) -> None:
        """End all compilers; ignore those already gone."""
        for compiler in (*self._idle, *(each.compiler for each in self._running.drop(lambda _: True))):
            compiler.kill()
        self._idle.clear()
        self._loading.drop(lambda _: True)

    def _conclude(self, running: _Running[Job], call: Future[Any]) -> BuildResult:
        """Return the outcome of a build; its compiler becomes idle, or is replaced."""
        compiler, seconds = running.compiler, time.monotonic() - running.started
        if call.done() and call.exception() is None:
            result, count, resident = call.result()
            if count >= self._settings.build_recycle_count or resident >= self._settings.build_recycle_bytes:
                self._replace(compiler)
            else:
                self._idle[compiler] = time.monotonic()
            return result  # type: ignore[no-any-return]
        self.look()
        status, died = Status.FARM_ERROR, True
        if call.done():
            message = f"the compiler process died: {explain(call)}"
        elif compiler in self._loading.about:
            message = f"the compiler did not start within {LOAD_TIMEOUT_S:g} s"
        else:
            message = f"not finished within {self._settings.build_timeout_s:g} s"
            status, died = Status.BUILD_TIMEOUT, False
        self._replace(compiler)
        return BuildResult(status, message, seconds=seconds, died=died)

    def _replace(self, compiler: Compiler) -> None:
        compiler.kill()
        self._loading.drop(lambda each: each is compiler)
        self.recycled += 1
        self._lacking += self._is_fixed
        self._fill()  # on failure `look` retries and reports the reason

    def _fill(self) -> str:
        """Start the missing compilers; return why one cannot start now, or ""."""
        try:
            while self._lacking:
                self.adopt(self._launch())
                self._lacking -= 1
        except FarmError as error:
            return error.message
        return ""


def explain(call: Future[Any]) -> str:
    """Say why a call to a compiler failed."""
    error: Any = call.exception()
    if isinstance(error, ProcessEndedError):
        return str(error)
    # Ray puts its own traceback before a task's exception.
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {find_reason(cause)}"
