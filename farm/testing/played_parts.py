"""What a played farm has in place of Ray, of what runs there, of the kernel's processes, and of a store's server.

`replaced` gives it to the product. A candidate's code is JSON that says how it behaves on a played board.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import socket
import sqlite3
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psutil
from sqlalchemy.util.concurrency import in_greenlet

from device_agent.protocol import Status
from farm.campaign.engine import builds, engine, process, ray_calls, ray_nodes, searches, verifying
from farm.crew import held_board, leased_board, site
from farm.search.codegen.build_pool import BuildResult, compiler_versions
from farm.search.tuners.decisions import Candidate
from farm.store import database, leases, sqlite
from farm.testing import world
from farm.testing.world import EPOCH_S, HOST, PlayedHost, World

# How a candidate behaves, and how often.
_KINDS = (("status", Status.CRASHED, 0.03), ("status", Status.RUN_TIMEOUT, 0.02), ("wrong", True, 0.1))
_BUILD_FAILS = 0.05
# The longest wait for a store's turn to write, in s.
_WRITES_S = 0.005
UNTUNED_JSON = json.dumps({"candidate": "untuned", "latency_s": 0.01})
ARGUMENTS = (((4,), "float32"),)
_ERRORS = vars(ray_calls)["ray"].exceptions


class PlayedCall(Future[Any]):
    """In place of Ray's, and of the future of one."""

    def future(self) -> PlayedCall:
        return self


class Actor:
    """Serves calls in turn, each within `takes_s`; `dies` is the chance that a call kills it."""

    def __init__(self, played: World, of: Any, takes_s: float, dies: float) -> None:
        self._world, self._of, self._takes_s, self._dies = played, of, takes_s, dies
        self._free_s = 0.0
        self._open: list[PlayedCall] = []
        self._is_dead = False

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._of, name)
        return types.SimpleNamespace(remote=lambda *arguments: self._call(work, arguments))

    def end(self) -> None:
        """End it, and fail its calls."""
        self._is_dead, failed, self._open = True, self._open, []
        for reference in failed:
            reference.set_exception(_ERRORS.RayActorError())

    def _call(self, work: Callable[..., Any], arguments: Sequence[Any]) -> PlayedCall:
        reference, draw = PlayedCall(), self._world.random
        self._open.append(reference)
        if self._is_dead:
            self.end()
            return reference
        self._free_s = max(self._free_s, self._world.time()) + draw.uniform(0.3, 1.0) * self._takes_s
        self._world.call_at(self._free_s, self._answer, reference, work, arguments, draw.random() < self._dies)
        return reference

    def _answer(self, reference: PlayedCall, work: Callable[..., Any], arguments: Sequence[Any], dies: bool) -> None:
        if dies:
            self.end()
        if not self._is_dead:
            self._open.remove(reference)
            reference.set_result(work(*arguments))


# In place of the module.
PLAYED_RAY = types.SimpleNamespace(exceptions=_ERRORS, kill=Actor.end)


class PlayedSearch:
    """A search of `space` candidates a task, always in one order; it never proposes what it knows."""

    def __init__(self, space: int, salt: float) -> None:
        self._space, self._salt = space, salt
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
            candidate = make_candidate(key, at, self._salt)
            at += 1
            if candidate.hash not in self._known.get(key, ()):
                made.append(candidate)
        self._next[key] = at
        return made, at >= self._space

    def observe(self, key: str, results: Collection[Any]) -> None: ...

    def forget(self, key: str, candidate: str) -> None: ...

    def replay(self, key: str, trace_json: str) -> str:
        return make_candidate(key, json.loads(trace_json)[0], self._salt).module_json if trace_json else UNTUNED_JSON


def make_candidate(key: str, number: int, salt: float) -> Candidate:
    """Return a task's candidate of a number: equal for equal arguments."""
    _, _, workload = key.rsplit("|", 2)
    name = hashlib.sha256(f"{key} {number} {salt}".encode()).hexdigest()
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


class PlayedDatabase(sqlite.SqliteDatabase):
    """A SQLite file that passes for a server which all coordinators share; for times it is away, or full."""

    def __init__(self, path: Path, played: World) -> None:
        super().__init__(path)
        self.location: Any = "played"
        self.away_until_s = self.full_until_s = 0.0
        self._world = played

    def reading(self) -> Any:
        if self._world.time() < self.away_until_s:
            raise sqlite3.OperationalError("database is locked")
        return super().reading()

    def writing(self, durably: bool) -> Any:
        """See `SqliteDatabase`. Others may write, and hosts crash, before it begins; it takes no time."""
        if in_greenlet():
            world.wait(asyncio.sleep(self._world.random.uniform(0.0, _WRITES_S)))
        self.reading()
        if self._world.time() < self.full_until_s:
            raise sqlite3.OperationalError("database or disk is full")
        return super().writing(durably)

    def close(self) -> None:
        """Others use it."""


class PlayedProcess:
    """In place of `psutil.Process`: a host is one."""

    hosts: ClassVar[Mapping[str, PlayedHost]] = {}

    def __init__(self, pid: int | None = None) -> None:
        if pid is not None and pid not in {host.pid for host in self.hosts.values() if not host.is_dead}:
            raise psutil.NoSuchProcess(pid)

    def create_time(self) -> float:
        return 1.0

    def status(self) -> str:
        return str(psutil.STATUS_RUNNING)


@contextlib.contextmanager
def replaced(
    played: World, hosts: Mapping[str, PlayedHost], store: PlayedDatabase, space: int, dies: float
) -> Iterator[None]:
    """Give the product what is played, for the block. `hosts` are its processes by name.

    `space`: how many candidates a task has; `dies`: the chance that a call of Ray's kills its process.
    """
    salt, node = played.random.random(), types.SimpleNamespace(id="here", name="here", is_here=True)

    def act(of: Callable[[], Any], takes_s: float) -> Any:
        return lambda _: Actor(played, of(), takes_s, dies)

    PlayedProcess.hosts = hosts
    changes: dict[tuple[Any, str], Any] = {
        (time, "monotonic"): played.time,
        (time, "time"): lambda: EPOCH_S + played.time() + (host.skew_s if (host := HOST.get(None)) else 0.0),
        (time, "clock_gettime"): lambda _: played.time(),
        (time, "sleep"): lambda seconds: world.wait(asyncio.sleep(seconds)),
        (threading, "Thread"): world.Thread,
        (threading, "Event"): world.PlayedEvent,
        (os, "getpid"): lambda: HOST.get().pid,
        (socket, "gethostname"): lambda: HOST.get().name,
        (psutil, "Process"): PlayedProcess,
        (held_board, "start_loop"): world.PlayedLoop,
        (site, "start_loop"): world.PlayedLoop,
        (engine, "is_expected"): lambda: False,
        (process, "is_expected"): lambda: False,
        (process, "StopSignal"): lambda: types.SimpleNamespace(arrived=False),
        (verifying, "ModelCompiles"): lambda: mock.Mock(poll=list),  # there is none
        (database, "open_database"): lambda _: store,
        (leases, "read_process_space"): lambda: "00000000",
        (vars(leased_board)["_Renewals"], "_all"): {},  # of the processes of this world
        (searches, "_start_actor"): act(lambda: PlayedSearch(space, salt), 1.0),
        (builds, "launch_compiler"): act(PlayedCompiler, 0.6),
        (ray_nodes, "fetch_nodes"): lambda: [node],
        (ray_nodes, "here"): dict,
        **{(module, "ray"): PLAYED_RAY for module in (ray_calls, searches, builds)},
    }
    with contextlib.ExitStack() as stack:
        for (of, name), value in changes.items():
            stack.enter_context(mock.patch.object(of, name, value))
        yield
