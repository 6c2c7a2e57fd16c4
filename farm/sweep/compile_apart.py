"""Compile what a sweep needs in a process of its own: the compiler takes seconds and hundreds of megabytes, holds up
signals, and cannot be loaded beside the runtime that talks to boards.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from farm.errors import DeadlineError, FarmError, InternalError

# The biggest models take a minute to import and some to build; the linker's first use half a minute.
TIMEOUT_S = 900.0
_LOOK_S = 0.1
_END_TIMEOUT_S = 5.0


T = TypeVar("T")


def compile_apart(job: Callable[[], T], name: str) -> T:
    """What `job` returns and raises, which must be fit to be pickled; the process is gone afterwards.

    `name` is of what is compiled, for people. Raises DeadlineError, too.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_compile, args=(theirs, job), daemon=True)
    child.start()
    theirs.close()
    try:
        # In pieces, so that signals are heard.
        for _ in range(round(TIMEOUT_S / _LOOK_S)):
            if ours.poll(_LOOK_S):
                break
        else:
            raise DeadlineError(f"{name} was not compiled within {TIMEOUT_S:g} s")
        try:
            answer = ours.recv()
        except EOFError:
            child.join(_END_TIMEOUT_S)
            raise InternalError(f"the compiler's process ended by itself ({child.exitcode})") from None
    finally:
        ours.close()
        child.kill()
        child.join(_END_TIMEOUT_S)
    if isinstance(answer, FarmError):
        raise answer
    result: T = answer
    return result


def _compile(answers: Connection, job: Callable[[], object]) -> None:
    """The life of the process."""
    # Ctrl-C in a terminal reaches the whole group; who started us decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answers.send(job())
    except FarmError as error:
        answers.send(error)


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
