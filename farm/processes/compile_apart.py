"""Work with TVM's compiler in a process of its own: it takes seconds and hundreds of megabytes, holds up signals, and
cannot be loaded beside the runtime that talks to boards.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TypeVar

from farm.errors import FarmError, InternalError
from farm.processes.partners import Child, Parent

# The biggest models take a minute to import and some to build; the linker's first use half a minute.
TIMEOUT_S = 900.0

T = TypeVar("T")


def compile_apart(job: Callable[[], T], name: str, timeout_s: float = TIMEOUT_S) -> T:
    """What `job` returns and raises, which must be fit to be pickled, as `job` itself; the process is gone afterwards.

    `name` is of what is compiled, for people. Raises DeadlineError, and InternalError where the process ended.
    """
    child = Child.start(__name__)
    try:
        child.send(job)  # where it is gone, its answer tells how it ended
        result, error = child.receive(timeout_s, f"{name} was not compiled")
    finally:
        child.kill()
    if error is not None:
        raise error
    answer: T = result
    return answer


def main(parent: Parent) -> None:
    """The life of the process: one job comes, and its answer goes back."""
    # A compiler in the middle of its work hears no signal, and leaves memory and a temporary folder behind.
    parent.on_stop = functools.partial(os._exit, 1)
    message = parent.receive()
    if message is not None:
        try:
            parent.send(message[0](), None)
        except FarmError as error:
            parent.send(None, error)
        except Exception as error:  # noqa: BLE001 - the edge of a process: who waits is told, not this end's stderr
            parent.send(None, InternalError(f"{type(error).__name__}: {error}"))
