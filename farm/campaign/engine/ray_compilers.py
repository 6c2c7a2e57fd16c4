"""Compilers as Ray's actors: those of this machine, and those of other machines, which a cluster is asked for.

They are actors rather than plain tasks, so that who is replaced, and when, is decided by the pool and not by Ray's.
How many are asked for is `builds`' business.
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

# Where compilers end before they are anywhere, one is asked for again after so long.
_AGAIN_S = 5.0


def launch_compiler(options: Mapping[str, Any]) -> Any:
    """Ask Ray for an actor that compiles; `options` are Ray's, and say where. Never waits."""

    # A class within a function travels by value: it says where it is also from a machine that lacks the farm.
    class Compiler:
        def where(self) -> str:
            """The node that it is on."""
            return str(ray.get_runtime_context().get_node_id())

        def load(self) -> str:
            """Get ready, and say with which versions."""
            self._builder = build_pool.Builder()
            return self._builder.versions()

        def build(self, *order: Any) -> tuple[BuildResult, int, int]:
            return self._builder.build(*order)

        def pid(self) -> int:
            return self._builder.pid()

    return ray.remote(**{"num_cpus": 0, "max_restarts": 0, **options})(Compiler).remote()


class RayBuildPool(BuildPool[Job]):
    """References are Ray's."""

    def __init__(self, size: int, settings: Settings, options: Mapping[str, Any] | None = None) -> None:
        """`options` are Ray's for actors: where they run."""
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
    """A compiler that Ray has found a machine for: `reference` stands for its versions, `node` is the machine's id."""

    compiler: Any
    reference: Any
    node: str


class CompilerDemand:
    """Compilers that a cluster was asked for and has no machine for yet. Not thread-safe.

    An autoscaler sees them as demand: each is an actor that waits for a CPU.
    """

    def __init__(self) -> None:
        self._asked: dict[Any, Any] = {}  # what says where it is -> compiler
        self._not_before = 0.0
        self.trouble = ""  # why the last of them ended before it was anywhere

    @property
    def count(self) -> int:
        """How many are on their way."""
        return len(self._asked)

    @property
    def pending(self) -> list[Any]:
        """References to wait for; `take` takes note of them."""
        return list(self._asked)

    def ask(self, count: int, options: Mapping[str, Any]) -> None:
        """Ask for so many more."""
        if time.monotonic() >= self._not_before:
            for _ in range(count):
                compiler = launch_compiler(options)
                self._asked[compiler.where.remote()] = compiler

    def take(self) -> list[PlacedCompiler]:
        """Those that have come up since the last time; they load. Never waits."""
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
        """Ask for none any more."""
        for compiler in self._asked.values():
            ray_calls.kill(compiler)
        self._asked.clear()


def _fetch(reference: Any) -> Any:
    """An answer that is there. Raises CompilerLostError."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        # What a task raised comes with a traceback of Ray's before it.
        cause = getattr(error, "cause", None) or error
        raise CompilerLostError(f"{type(cause).__name__}: {find_reason(cause)}") from error
