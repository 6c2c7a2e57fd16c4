"""Models compiled for their finals, one after the other, in a process of its own that the engine never waits for."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from farm.errors import FarmError
from farm.processes.compile_subprocess import TIMEOUT_S, Apart
from farm.search import tvm_env


class ModelCompiles:
    """Jobs for the process, each with what the caller knows it by. Not thread-safe."""

    def __init__(self) -> None:
        self._apart: Apart | None = None
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._running: tuple[Any, Any, float] | None = None

    def prepare(self) -> None:
        """Start the process, which takes seconds: a job is expected."""
        if self._apart is None:
            self._apart = Apart([_load])
            self._running = (None, None, time.monotonic() + TIMEOUT_S)

    def submit(self, key: Any, request: Any) -> None:
        """Have `request.job` done; `poll` gives the answer."""
        self._waiting.append((key, request))

    def poll(self) -> list[tuple[Any, Any]]:
        """Requests that were done, each with what it returned or the FarmError that it raised."""
        done = []
        if self._running is not None and self._apart is not None:
            _, request, until_s = self._running
            late = time.monotonic() > until_s
            if late or self._apart.has_answer():
                self._running = None
                try:
                    answer = self._apart.take(0.0, request.what if request else "the compiler was not started")
                except FarmError as error:
                    answer = error
                    if late or not self._apart.is_alive():
                        self._end()
                if request is not None:
                    done.append((request, answer))
        if self._running is None and self._waiting:
            key, request = self._waiting.popleft()
            try:
                self._begin(key, request)
            except FarmError as error:  # no room for a process
                done.append((request, error))
        return done

    def forget(self, key: Any) -> None:
        """Nobody waits for a key's jobs any more."""
        self._waiting = deque(each for each in self._waiting if each[0] != key)
        if self._running is not None and self._running[0] == key:
            self._end()

    def close(self) -> None:
        """End the process."""
        self._waiting.clear()
        self._end()

    def _begin(self, key: Any, request: Any) -> None:
        if self._apart is None:
            self._apart = Apart([request.job])
        else:
            self._apart.give(request.job)
        self._running = (key, request, time.monotonic() + TIMEOUT_S)

    def _end(self) -> None:
        self._running = None
        apart, self._apart = self._apart, None
        if apart is not None:
            apart.__exit__()


def _load() -> None:
    """Load TVM's compiler."""
    tvm_env.load_compiler()
