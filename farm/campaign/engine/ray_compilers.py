"""Compilers as Ray actors, on this machine and on machines of a cluster.

They are actors rather than tasks, so that our pool, not Ray's, decides which is replaced and when. `builds` decides how
many are requested.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from farm.campaign.engine import ray_calls
from farm.search.build import build_pool
from farm.search.build.build_pool import BuildPool, BuildResult, CompilerLostError, Job
from farm.search.tvm_errors import find_reason
from farm.settings import Settings

# The pause after a requested compiler ended before it had a machine.
_AGAIN_S = 5.0


def launch_compiler(options: Mapping[str, Any]) -> Any:
    """Start an actor that compiles; `options` are Ray's placement. Never waits."""

    # A class within a function travels by value: it also runs on a machine that lacks the farm.
    class Compiler:
        def where(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

        def load(self) -> str:
            """Load the compiler; return its versions."""
            self._builder = build_pool.Builder()
            return self._builder.versions()

        def build(self, *order: Any) -> tuple[BuildResult, int, int]:
            return self._builder.build(*order)

        def pid(self) -> int:
            return self._builder.pid()

    return ray.remote(**{"num_cpus": 0, "max_restarts": 0, **options})(Compiler).remote()


class RayBuildPool(BuildPool[Job]):
    """A build pool whose references are Ray's."""

    def __init__(self, size: int, settings: Settings, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        super().__init__(size, settings)

    def _launch(self) -> tuple[Any, Any]:
        actor = launch_compiler(self._options)
        return actor, actor.load.remote()

    def _ask(self, compiler: Any, *order: Any) -> Any:
        return compiler.build.remote(*order)

    def _find_done(self, references: Sequence[Any]) -> list[Any]:
        return ray_calls.find_done(references)

    def _fetch(self, reference: Any) -> Any:
        return _fetch(reference)

    def _kill(self, compiler: Any) -> None:
        ray_calls.kill(compiler)

    def _find_pid(self, compiler: Any) -> int:
        return int(ray.get(compiler.pid.remote()))


@dataclasses.dataclass(frozen=True)
class PlacedCompiler:
    """A compiler that has a machine: `reference` stands for its versions, `node` is the machine's id."""

    compiler: Any
    reference: Any
    node: str


class CompilerDemand:
    """Compilers requested from a cluster that have no machine yet. Not thread-safe.

    An autoscaler sees them as demand: each is an actor that waits for a CPU.
    """

    def __init__(self) -> None:
        self._asked: dict[Any, Any] = {}  # reference to its node -> compiler
        self._not_before = 0.0
        self.trouble = ""  # why the last of them ended before it had a machine

    @property
    def count(self) -> int:
        return len(self._asked)

    @property
    def pending(self) -> list[Any]:
        """References to wait for; `take` reads them."""
        return list(self._asked)

    def ask(self, count: int, options: Mapping[str, Any]) -> None:
        if time.monotonic() >= self._not_before:
            for _ in range(count):
                compiler = launch_compiler(options)
                self._asked[compiler.where.remote()] = compiler

    def take(self) -> list[PlacedCompiler]:
        """Return compilers that have a machine since the last call; they are loading. Never waits."""
        arrived = []
        for reference in ray_calls.find_done(self.pending):
            compiler = self._asked.pop(reference)
            try:
                node = str(_fetch(reference))
            except CompilerLostError as error:
                self.trouble, self._not_before = str(error), time.monotonic() + _AGAIN_S
                ray_calls.kill(compiler)
            else:
                arrived.append(PlacedCompiler(compiler, compiler.load.remote(), node))
        return arrived

    def withdraw(self) -> None:
        for compiler in self._asked.values():
            ray_calls.kill(compiler)
        self._asked.clear()


def _fetch(reference: Any) -> Any:
    """Return an answer that is ready. Raises CompilerLostError."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        # Ray puts its own traceback before a task's exception.
        cause = getattr(error, "cause", None) or error
        raise CompilerLostError(f"{type(cause).__name__}: {find_reason(cause)}") from error
