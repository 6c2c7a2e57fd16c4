"""The part of Ray that campaigns use, played in a `World`, and what runs there: searches and compilers.

A candidate's code is JSON that says how it behaves on a played board.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray.exceptions

from device_agent.protocol import Status
from farm.crew.coroutines import ring_all
from farm.search.build.build_cache import compiler_versions
from farm.search.build.build_pool import BuildResult
from farm.search.candidates import Candidate
from farm.testing.world import World

# How a candidate behaves, and how often.
_KINDS = (("status", Status.CRASHED, 0.03), ("status", Status.RUN_TIMEOUT, 0.02), ("wrong", True, 0.03))
_BUILD_FAILS = 0.05
UNTUNED_JSON = json.dumps({"candidate": "untuned", "latency_s": 0.01})
ARGUMENTS = (((4,), "float32"),)


@dataclasses.dataclass(eq=False)
class Reference:
    """An answer to come."""

    value: Any = None
    error: Exception | None = None
    is_done: bool = False

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        if not self.is_done:
            self.value, self.error, self.is_done = value, error, True
            ring_all()


class Actor:
    """Serves calls in turn, each within `takes_s`; `dies` is the chance that a call kills it."""

    def __init__(self, world: World, of: Any, takes_s: float, dies: float) -> None:
        self._world, self._of, self._takes_s, self._dies = world, of, takes_s, dies
        self._free_s = 0.0
        self._open: list[Reference] = []
        self._is_dead = False

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._of, name)
        return types.SimpleNamespace(remote=lambda *arguments: self._call(work, arguments))

    def end(self) -> None:
        """End it, and fail its calls."""
        self._is_dead = True
        for reference in self._open:
            reference.settle(error=ray.exceptions.RayActorError())

    def _call(self, work: Callable[..., Any], arguments: Sequence[Any]) -> Reference:
        reference, draw = Reference(), self._world.random
        if self._is_dead:
            reference.settle(error=ray.exceptions.RayActorError())
            return reference
        self._open.append(reference)
        self._free_s = max(self._free_s, self._world.time()) + draw.uniform(0.3, 1.0) * self._takes_s
        self._world.call_at(self._free_s, self._answer, reference, work, arguments, draw.random() < self._dies)
        return reference

    def _answer(self, reference: Reference, work: Callable[..., Any], arguments: Sequence[Any], dies: bool) -> None:
        if dies:
            self.end()
        if not self._is_dead:
            self._open.remove(reference)
            reference.settle(work(*arguments))


class PlayedRay:
    """In place of the module `ray`."""

    exceptions = ray.exceptions

    @staticmethod
    def wait(references: Sequence[Reference], **_: Any) -> tuple[list[Reference], list[Reference]]:
        done = [each for each in references if each.is_done]
        return done, [each for each in references if not each.is_done]

    @staticmethod
    def get(reference: Reference, timeout: float | None = None) -> Any:
        if reference.error is not None:
            raise reference.error
        return reference.value

    @staticmethod
    def put(value: Any) -> Reference:
        return Reference(value, is_done=True)

    @staticmethod
    def kill(actor: Actor) -> None:
        actor.end()


class PlayedSearch:
    """A search of `space` candidates a task, always in one order; it never proposes what it knows."""

    def __init__(self, space: int) -> None:
        self._space = space
        self._known: dict[str, set[str]] = {}
        self._next: dict[str, int] = {}

    def serve(self, campaign: str, settings: Any) -> None: ...

    def open(self, key: str, task: Any, known: Any, under_way: Any, foreign: Any) -> tuple[str, list[str]]:
        self._known[key] = {each[0] for each in (*known, *under_way)}
        return "", []

    def propose(self, key: str, count: int) -> tuple[list[Candidate], bool]:
        made: list[Candidate] = []
        at = self._next.get(key, 0)
        while at < self._space and len(made) < count:
            candidate = make_candidate(key, at)
            at += 1
            if candidate.hash not in self._known.get(key, ()):
                made.append(candidate)
        self._next[key] = at
        return made, at >= self._space

    def observe(self, key: str, results: Collection[Any]) -> None: ...

    def forget(self, key: str, candidate: str) -> None: ...

    def replay(self, key: str, trace_json: str) -> str:
        return make_candidate(key, json.loads(trace_json)[0]).module_json if trace_json else UNTUNED_JSON


def make_candidate(key: str, number: int) -> Candidate:
    """Return a task's candidate of a number: equal for equal arguments."""
    _, _, workload = key.rsplit("|", 2)
    name = hashlib.sha256(f"{key} {number}".encode()).hexdigest()
    draw = random.Random(name)
    about = {"candidate": name, "latency_s": round(1e-3 * (1.0 + draw.expovariate(1.0)), 7)}
    if draw.random() < _BUILD_FAILS:
        about["build"] = "failed"
    for what, value, chance in _KINDS:
        if draw.random() < chance:
            about[what] = value
    trace = json.dumps([number, key, None, [["TENSOR", dtype, list(shape)] for shape, dtype in ARGUMENTS]])
    return Candidate(workload, name, ARGUMENTS, trace, json.dumps(about))


class PlayedCompiler:
    """A compiler, whose library is the module."""

    def __init__(self) -> None:
        self._count = 0

    def load(self) -> str:
        return compiler_versions()

    def build(self, module_json: str, target: Any, standalone: bool) -> tuple[BuildResult, int, int]:
        self._count += 1
        if json.loads(module_json).get("build") == "failed":
            return BuildResult(Status.BUILD_FAILED, "it is said to", seconds=0.3), self._count, 0
        library = module_json.encode()
        return BuildResult(Status.OK, "", library, hashlib.sha256(library).hexdigest(), 0.3), self._count, 0
