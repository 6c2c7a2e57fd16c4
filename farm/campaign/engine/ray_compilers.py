"""Compilers as Ray actors, on this machine and on machines of a cluster.

They are actors rather than tasks, so that our pool, not Ray's, decides which is replaced and when. `builds` decides how
many are requested.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import ray

from farm.campaign.engine import ray_calls
from farm.processes.calls import Calls
from farm.search.codegen import build_pool
from farm.search.codegen.build_pool import BuildResult

# The pause after a requested compiler ended before it had a machine.
_AGAIN_S = 5.0


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
