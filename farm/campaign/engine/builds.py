"""Builds for all campaigns, on all machines that Ray has: each module is compiled once, and libraries are cached.

Each machine has a pool of compilers (`farm.search.codegen.build_pool`): actors rather than tasks, so that our pool, not
Ray's, decides which is replaced and when. Here is what the pools share: the queue, who waits for a build, the order of
dispatch, when compilers of a cluster are requested and released, and what a dead compiler or machine means.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from device_agent.protocol import Status
from farm.campaign.engine import ray_calls, ray_nodes
from farm.campaign.engine.ray_nodes import RayNode
from farm.closing import Closing
from farm.errors import UnavailableError
from farm.processes.calls import Calls
from farm.search.codegen import build_pool
from farm.search.codegen.build_pool import BuildCache, BuildPool, BuildResult, build_key, compiler_versions
from farm.settings import Settings

# A module that took two compilers down is to blame; one may be an accident.
MAX_LOSSES = 2
# After this many failures in a row that blame no module, a machine's builds go elsewhere.
_MAX_FAULTS = 5
# How often a compiler that cannot start is started again.
_MAX_STARTS = 3
# A build that starts here within the time of one build needs no other machine.
_PATIENCE_S = 1.0
# How often to ask Ray's head for machines that joined or left.
_NODES_INTERVAL_S = 2.0
# Starting and loading takes seconds, a minute on a busy machine; longer means a fault.
_START_TIMEOUT_S = 300.0

_log = logging.getLogger(__name__)
# The pause after a requested compiler ended before it had a machine.
_AGAIN_S = 5.0


@dataclasses.dataclass(eq=False)
class _Build:
    """One module to compile, for all that wait for it. `avoid` is a machine where it failed."""

    key: str
    module_json: str
    target: Mapping[str, Any]
    standalone: bool
    answers: list[Future[BuildResult]]
    losses: int = 0
    avoid: str = ""
    since: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(eq=False)
class _Machine:
    """A node and its compilers. `faults` and `failed_starts` are in a row."""

    node: RayNode
    pool: BuildPool[_Build]
    faults: int = 0
    failed_starts: int = 0

    @property
    def is_free(self) -> bool:
        return self.pool.free > 0 and self.pool.has_loaded()


class BuildFarm(Closing):
    """Compilers on all machines of the running Ray. Not thread-safe; a context manager that ends them."""

    def __init__(
        self, settings: Settings, cache_folder: Path, host_cores: int, note: Callable[[str], None] = _log.warning
    ) -> None:
        """Start this machine's compilers: FARM_BUILD_WORKERS, or `host_cores`. A cluster is asked once builds wait.

        `note` gets messages for operators: machines that join, leave or cannot be used.
        """
        self._settings, self._note = settings, note
        # How many builds this machine runs at a time.
        self._own_workers = settings.build_workers or host_cores
        self._cache = BuildCache(cache_folder, note)
        # This machine, and those of the cluster that have compilers of this farm.
        self._machines: dict[str, _Machine] = {}
        self._wanted = CompilerDemand()
        self._waited_at = 0.0  # when a build last waited for too long
        self._trouble = ""
        self._refused: set[str] = set()
        self._builds: dict[str, _Build] = {}
        self._queue: collections.deque[_Build] = collections.deque()
        self._stuck_since: float | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        self._next_look = 0.0
        own = next(node for node in ray_nodes.fetch_nodes() if node.is_here)
        pool: BuildPool[_Build] = BuildPool(self._own_workers, settings, lambda: RayCompiler(ray_nodes.here()))
        self._machines[own.id] = _Machine(own, pool)

    @property
    def workers(self) -> int:
        """How many builds can run at a time, here and on machines that a cluster may add."""
        return self._own_workers + (self._settings.ray_max_builders if self._settings.ray_address else 0)

    @property
    def pending(self) -> list[Future[Any]]:
        """Calls to wait for; `poll` goes on once one is done."""
        calls = [call for machine in self._machines.values() for call in machine.pool.pending]
        return [*calls, *self._wanted.asked.pending]

    @property
    def waiting(self) -> int:
        """How many builds no compiler has begun."""
        return len(self._queue)

    def submit(self, module_json: str, target: Mapping[str, Any], standalone: bool = False) -> Future[BuildResult]:
        """Queue a module for compiling; return its answer. Never waits.

        A library that came from the cache, or was built for another, took 0 s.
        """
        answer: Future[BuildResult] = Future()
        key = build_key(module_json, target, standalone)
        if (build := self._builds.get(key)) is not None:
            build.answers.append(answer)
        elif (library := self._cache.find(key)) is not None:
            self.counts["cached"] += 1
            answer.set_result(BuildResult(Status.OK, "", library, hashlib.sha256(library).hexdigest()))
        else:
            self._builds[key] = build = _Build(key, module_json, dict(target), standalone, [answer])
            self._queue.append(build)
            self._dispatch()
        return answer

    def poll(self) -> None:
        """Answer what ended, and go on. Never waits. Raises UnavailableError where no machine can start a compiler."""
        if self._settings.ray_address:
            self._follow_cluster()
        for machine in list(self._machines.values()):
            self._look_at(machine)
        self._dispatch()
        self._check_progress()

    def close(self) -> None:
        self._wanted.withdraw()
        for machine in self._machines.values():
            machine.pool.close()
        self._machines.clear()
        self._queue.clear()
        self._builds.clear()

    # Machines

    def _follow_cluster(self) -> None:
        """Request compilers of the cluster while builds wait, take in those that started, release idle ones."""
        if time.monotonic() >= self._next_look:
            self._look_at_nodes()
        if self._wanted.asked:
            self._take_in()
        now, settings = time.monotonic(), self._settings
        others = [machine for machine in self._machines.values() if not machine.node.is_here]
        if waiting := sum(build.since <= now - _PATIENCE_S for build in self._queue):
            self._waited_at = now
            loading, asked = sum(machine.pool.loading for machine in others), len(self._wanted.asked)
            room = settings.ray_max_builders - sum(machine.pool.size for machine in others) - asked
            self._wanted.ask(
                min(room, waiting - loading - asked), ray_nodes.elsewhere(settings.ray_builder_label, self._refused)
            )
        elif now - self._waited_at > settings.ray_idle_s:
            self._wanted.withdraw()
        for machine in others:
            if machine.pool.give_back(settings.ray_idle_s) and not machine.pool.size:
                self._drop(machine, f"it was idle for {settings.ray_idle_s:g} s")

    def _take_in(self) -> None:
        """Add started compilers to their machines' pools."""
        arrived = self._wanted.take()
        if self._wanted.trouble != self._trouble:
            self._trouble = self._wanted.trouble
            self._note(f"a compiler that the cluster was asked for ended: {self._trouble}")
        if any(node not in self._machines for _, node in arrived):
            nodes = {node.id: node for node in ray_nodes.fetch_nodes()}
            for id in {node for _, node in arrived} & nodes.keys() - self._machines.keys() - self._refused:
                pool: BuildPool[_Build] = BuildPool(0, self._settings, lambda: RayCompiler({}))
                self._machines[id] = _Machine(nodes[id], pool)
                self._note(f"{nodes[id].name} builds too")
        for compiler, node in arrived:
            machine = self._machines.get(node)
            if machine is None or machine.node.is_here:  # it is gone or refused by now
                compiler.kill()
            else:
                machine.pool.adopt(compiler)

    def _look_at_nodes(self) -> None:
        """Requeue the builds of machines that left."""
        nodes = {node.id for node in ray_nodes.fetch_nodes()}
        for gone in [id for id in self._machines if id not in nodes]:
            self._drop(self._machines[gone], "it left the cluster")
        self._refused &= nodes
        self._next_look = time.monotonic() + _NODES_INTERVAL_S

    def _look_at(self, machine: _Machine) -> None:
        pool = machine.pool
        if why := pool.look():
            machine.failed_starts += 1
            if machine.failed_starts >= _MAX_STARTS:
                self._give_up(machine, f"no compiler can be started there: {why}")
                return
        elif pool.versions:
            machine.failed_starts = 0
            if pool.versions != compiler_versions():
                self._give_up(machine, f"it has {pool.versions}, not {compiler_versions()} as this machine")
                return
        for build, result in pool.poll():
            self._on_ended(machine, build, result)

    def _give_up(self, machine: _Machine, why: str) -> None:
        """Use a machine no more until it has left and returned. Raises UnavailableError for this machine."""
        if machine.node.is_here:
            raise UnavailableError(f"this machine cannot build: {why}", "Try `farm doctor`.")
        self._refused.add(machine.node.id)
        self._drop(machine, why)

    def _drop(self, machine: _Machine, why: str) -> None:
        self._note(f"{machine.node.name} builds no more: {why}")
        self._machines.pop(machine.node.id, None)
        self._queue.extendleft(reversed(machine.pool.jobs))
        machine.pool.close()

    # Builds

    def _dispatch(self) -> None:
        """Give waiting builds to free compilers: other machines' first, since searches share this one.

        The fullest of those comes first, so that machines that are not needed become idle.
        """
        while self._queue and (free := [each for each in self._machines.values() if each.is_free]):
            build = self._queue.popleft()
            machine = max(free, key=lambda each: (each.node.id != build.avoid, not each.node.is_here, -each.pool.free))
            machine.pool.submit(build, build.module_json, build.target, build.standalone)

    def _on_ended(self, machine: _Machine, build: _Build, result: BuildResult) -> None:
        if result.status is Status.FARM_ERROR:
            self._on_fault(machine, build, result)
            return
        machine.faults = 0
        if result.status is Status.BUILD_TIMEOUT and not machine.node.is_here and not build.avoid:
            # a machine that hangs or is cut off looks the same
            self._again(machine, build)
            return
        if result.library is not None:
            self._cache.keep(build.key, result.library)
        self._conclude(build, result)

    def _on_fault(self, machine: _Machine, build: _Build, result: BuildResult) -> None:
        """Repeat a build whose compiler died or failed, elsewhere if possible."""
        if self._settings.ray_address:
            self._look_at_nodes()
        if self._machines.get(machine.node.id) is not machine:  # the whole machine is gone: no module is to blame
            self._again(machine, build)
            return
        machine.faults += 1
        if result.died:
            build.losses += 1
            if build.losses >= MAX_LOSSES:
                message = f"took {build.losses} compilers down: {result.message}"
                self._conclude(
                    build, dataclasses.replace(result, status=Status.BUILD_FAILED, message=message, died=False)
                )
            else:
                self._again(machine, build)
        elif len(self._machines) > 1 and not build.avoid:
            self._again(machine, build)
        else:
            self._conclude(build, result)
        if machine.faults >= _MAX_FAULTS and not machine.node.is_here:
            self._give_up(machine, f"{machine.faults} builds in a row failed there: {result.message}")

    def _again(self, machine: _Machine, build: _Build) -> None:
        build.avoid = machine.node.id
        self._queue.appendleft(build)

    def _conclude(self, build: _Build, result: BuildResult) -> None:
        """Answer all that wait; the first one counts as having had it built."""
        del self._builds[build.key]
        self.counts["built"] += 1
        self.counts["joined"] += len(build.answers) - 1
        first, *others = build.answers
        first.set_result(result)
        for other in others:
            other.set_result(dataclasses.replace(result, seconds=0.0))

    def _check_progress(self) -> None:
        """Raise UnavailableError where builds wait and no compiler has become ready for too long."""
        if not self._queue or any(machine.pool.jobs or machine.is_free for machine in self._machines.values()):
            self._stuck_since = None
            return
        now = time.monotonic()
        self._stuck_since = self._stuck_since or now
        if now - self._stuck_since > _START_TIMEOUT_S:
            raise UnavailableError(
                f"no compiler became ready within {_START_TIMEOUT_S:g} s, {len(self._queue)} builds wait",
                "Try `farm doctor`; `ray status` shows what a cluster's machines do.",
            )


def launch_compiler(options: Mapping[str, Any]) -> Any:
    """Start an actor that compiles; `options` are Ray's placement. Never waits."""

    # A class within a function travels by value: it also runs on a machine that lacks the farm.
    class Compiler:
        def where(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

        def load(self) -> str:
            return str(build_pool.serve("load"))

        def build(self, *order: Any) -> tuple[BuildResult, int, int]:
            return build_pool.serve("build", *order)  # type: ignore[no-any-return]

        def pid(self) -> int:
            return int(build_pool.serve("pid"))

    return ray.remote(**{"num_cpus": 0, "max_restarts": 0, **options})(Compiler).remote()


class RayCompiler:
    """A compiler as an actor."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._actor = launch_compiler(options)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return ray_calls.call(getattr(self._actor, method), *arguments)

    def kill(self) -> None:
        ray_calls.kill(self._actor)


class CompilerDemand:
    """Compilers requested from a cluster that have no machine yet. Not thread-safe.

    An autoscaler sees them as demand: each is an actor that waits for a CPU.
    """

    def __init__(self) -> None:
        self.asked: Calls[RayCompiler] = Calls()  # for the id of its machine; `take` reads them
        self._not_before = 0.0
        self.trouble = ""  # why the last of them ended before it had a machine

    def ask(self, count: int, options: Mapping[str, Any]) -> None:
        if time.monotonic() >= self._not_before:
            for _ in range(count):
                compiler = RayCompiler(options)
                self.asked.add(compiler.call("where"), compiler, math.inf)

    def take(self) -> list[tuple[RayCompiler, str]]:
        """Return compilers that have a machine since the last call, with its id. Never waits."""
        arrived = []
        for compiler, call in self.asked.take():
            if call.exception() is None:
                arrived.append((compiler, str(call.result())))
            else:
                self.trouble, self._not_before = build_pool.explain(call), time.monotonic() + _AGAIN_S
                compiler.kill()
        return arrived

    def withdraw(self) -> None:
        for compiler in self.asked.drop(lambda _: True):
            compiler.kill()
