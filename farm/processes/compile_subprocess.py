"""Run TVM's compiler in a separate process: it takes seconds and hundreds of megabytes, blocks signals, and cannot be
loaded beside the runtime that talks to boards.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from farm.errors import FarmError, InternalError
from farm.processes.worker_processes import Child, Parent

# The largest models take a minute to import and some to build; the linker's first use half a minute.
TIMEOUT_S = 900.0
# How often to report progress to the user.
_TELL_S = 5.0

T = TypeVar("T")


class Apart:
    """Jobs in a separate process, run in sequence; it starts at once and ends with the block."""

    def __init__(self, jobs: Sequence[Callable[[], Any]]) -> None:
        """`jobs`, their results and errors must be picklable."""
        self._child = Child.start(__name__)
        self._child.send(*jobs)  # where it is gone, its answer tells how it ended

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()

    def give(self, job: Callable[[], Any]) -> None:
        """Add a job after the others."""
        self._child.send(job)

    def has_answer(self, wait_s: float = 0.0) -> bool:
        """Whether `take` returns at once, for a finished job or a dead process. Waits up to `wait_s` for that."""
        try:
            return self._child.connection.poll(wait_s)
        except (OSError, EOFError):
            return True

    def is_alive(self) -> bool:
        return self._child.process.poll() is None

    def take(self, timeout_s: float, what: str) -> Any:
        """The result of the next job. Raises its error, DeadlineError beginning with `what`, and InternalError if the
        process ended.
        """
        result, error = self._child.receive(timeout_s, what)
        if error is not None:
            raise error
        return result

    def take_compiled(self, name: str, timeout_s: float = TIMEOUT_S, say: Callable[[str], None] | None = None) -> Any:
        """The result of the next job, which compiles `name`; `say` gets a progress line from time to time.

        Raises as `take`.
        """
        began_s = time.monotonic()
        while say is not None and not self.has_answer(_TELL_S) and time.monotonic() - began_s < timeout_s:
            say(f"{name}: still compiling, {time.monotonic() - began_s:.0f} s so far")
        return self.take(timeout_s, f"{name} was not compiled")


def compile_in_subprocess(
    job: Callable[[], T], name: str, timeout_s: float = TIMEOUT_S, say: Callable[[str], None] | None = None
) -> T:
    """The result of a single job that compiles `name`. `say`: see `Apart.take_compiled`.

    Raises as `Apart.take`.
    """
    with Apart([job]) as apart:
        answer: T = apart.take_compiled(name, timeout_s, say)
    return answer


def main(parent: Parent) -> None:
    """The process's main loop: receive jobs, send answers."""
    # A running compiler handles no signal, and would leave memory and a temporary folder behind.
    parent.on_stop = functools.partial(os._exit, 1)
    while True:
        for job in parent.receive() or ():
            try:
                parent.send(job(), None)
            except FarmError as error:
                parent.send(None, error)
            except Exception as error:  # noqa: BLE001 - the edge of a process: the error is sent to the caller
                parent.send(None, InternalError(f"{type(error).__name__}: {error}"))
