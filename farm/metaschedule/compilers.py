"""Warm compiler processes of one script, and their main function."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from farm.errors import UnavailableError
from farm.processes.worker_processes import Child, Parent
from farm.search.build.build_pool import START_TIMEOUT_S, Builder, BuildPool, BuildResult, CompilerLostError
from farm.settings import Settings

# Failed starts in a row, without a working compiler, after which starting is given up.
_MAX_FALSE_STARTS = 3
# Deaths after which the job is blamed; a single one may be the kernel's or an operator's choice.
_MAX_DEATHS = 2
# How often deadlines are checked.
_LOOK_S = 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class _Answer:
    """A pending reply of a child; replies come in the order of requests."""

    child: Child


class Compilers(BuildPool[int]):
    """Compilers as child processes. Not thread-safe; call `close`."""

    def __init__(self, size: int, settings: Settings, start: Callable[[], Child]) -> None:
        """`start` starts a child that runs this module."""
        self._start_child = start
        self._due: dict[Child, collections.deque[_Answer]] = {}
        self._asked = self._false_starts = 0
        super().__init__(size, settings)

    def build(self, jobs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[BuildResult]:
        """Compile (module JSON, target) pairs in order. Raises UnavailableError where compilers do not start."""
        # Numbers continue over batches, since jobs of an interrupted batch may still end.
        numbers = range(self._asked, self._asked + len(jobs))
        self._asked = numbers.stop
        waiting, deaths = collections.deque(numbers), collections.Counter[int]()
        done: dict[int, BuildResult] = {}
        ready_by = time.monotonic() + START_TIMEOUT_S
        while len(done) < len(jobs):
            if why := self.look():
                self._false_starts += 1
                if self._false_starts >= _MAX_FALSE_STARTS and not (self.pending or self.has_loaded()):
                    raise _unavailable(why)
            elif self.pending or self.has_loaded():
                self._false_starts, ready_by = 0, time.monotonic() + START_TIMEOUT_S
            elif time.monotonic() > ready_by:
                raise _unavailable(f"none was ready within {START_TIMEOUT_S:g} s")
            while waiting and self.has_loaded():
                number = waiting.popleft()
                self.submit(number, *jobs[number - numbers.start])
            self._wait([*self.pending, *self.loading], _LOOK_S)
            for number, result in self.poll():
                if number not in numbers:
                    continue
                deaths[number] += result.died
                if result.died and deaths[number] < _MAX_DEATHS:
                    waiting.appendleft(number)
                elif result.died:
                    text = f"{_MAX_DEATHS} compilers ended with it; {result.message}"
                    done[number] = dataclasses.replace(result, message=text)
                else:
                    done[number] = result
        return [done[number] for number in numbers]

    def _wait(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        due = {each.child.connection: each for each in references if self._due[each.child][0] is each}
        return [due[connection] for connection in wait(list(due), timeout_s)]  # type: ignore[index]

    def _launch(self) -> tuple[Any, Any]:
        child = self._start_child()
        self._due[child] = collections.deque([_Answer(child)])
        return child, self._due[child][0]

    def _ask(self, compiler: Any, *order: Any) -> Any:
        compiler.send(*order)  # if it has ended, the connection's end comes next
        self._due[compiler].append(_Answer(compiler))
        return self._due[compiler][-1]

    def _find_done(self, references: Sequence[Any]) -> list[Any]:
        return self._wait(references, 0.0)

    def _fetch(self, reference: Any) -> Any:
        child = reference.child
        self._due[child].popleft()
        try:
            (answer,) = child.connection.recv()
        except (EOFError, OSError):
            raise CompilerLostError(child.describe_end()) from None
        return answer

    def _kill(self, compiler: Any) -> None:
        self._due.pop(compiler, None)
        compiler.kill()

    def _find_pid(self, compiler: Any) -> int:
        return int(compiler.process.pid)


def _unavailable(why: str) -> UnavailableError:
    return UnavailableError(
        f"the farm's compiler processes do not start: {why}", "Their log is FARM_HOME/logs/script-compilers.log."
    )


def main(parent: Parent) -> None:
    """Serve `Builder.build` until the script ends."""
    # A busy compiler handles no signal and leaves nothing but memory behind.
    parent.on_stop = functools.partial(os._exit, 1)
    builder = Builder()
    parent.send(builder.versions())
    while message := parent.receive():
        parent.send(builder.build(*message))
