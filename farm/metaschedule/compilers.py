"""Builds of one script, batch by batch, in compilers that stay warm."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from farm.errors import UnavailableError
from farm.search.codegen.build_pool import START_TIMEOUT_S, BuildPool, BuildResult

# Failed starts in a row, without a working compiler, after which starting is given up.
_MAX_FALSE_STARTS = 3
# Deaths after which the job is blamed; a single one may be the kernel's or an operator's choice.
_MAX_DEATHS = 2
# How often deadlines are checked.
_LOOK_S = 0.5


class Compilers(BuildPool[int]):
    """A pool that builds batches. Not thread-safe; call `close`."""

    _asked = _false_starts = 0

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
                if self._false_starts >= _MAX_FALSE_STARTS and not (self.jobs or self.has_loaded()):
                    raise _unavailable(why)
            elif self.jobs or self.has_loaded():
                self._false_starts, ready_by = 0, time.monotonic() + START_TIMEOUT_S
            elif time.monotonic() > ready_by:
                raise _unavailable(f"none was ready within {START_TIMEOUT_S:g} s")
            while waiting and self.has_loaded():
                number = waiting.popleft()
                self.submit(number, *jobs[number - numbers.start])
            wait(self.pending, _LOOK_S, FIRST_COMPLETED)
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


def _unavailable(why: str) -> UnavailableError:
    return UnavailableError(
        f"the farm's compiler processes do not start: {why}", "Their log is FARM_HOME/logs/script-compilers.log."
    )
