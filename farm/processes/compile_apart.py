"""Work with TVM's compiler in a process of its own: it takes seconds and hundreds of megabytes, holds up signals, and
cannot be loaded beside the runtime that talks to boards.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from farm.errors import DeadlineError, FarmError, InternalError

# The biggest models take a minute to import and some to build; the linker's first use half a minute.
TIMEOUT_S = 900.0
_LOOK_S = 0.1
_END_TIMEOUT_S = 5.0
_CHILD = "import sys; from farm.processes.compile_apart import main; main(int(sys.argv[1]), int(sys.argv[2]))"


T = TypeVar("T")


def compile_apart(job: Callable[[], T], name: str) -> T:
    """What `job` returns and raises, which must be fit to be pickled, as `job` itself; the process is gone afterwards.

    `name` is of what is compiled, for people. Raises DeadlineError, too.
    """
    child, ours = start_child(_CHILD)
    try:
        with contextlib.suppress(BrokenPipeError):  # told with its exit code below
            ours.send(job)
        answer = receive(ours, child, TIMEOUT_S, f"{name} was not compiled")
    finally:
        end_child(child, ours)
    if isinstance(answer, FarmError):
        raise answer
    result: T = answer
    return result


def start_child(code: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """A Python process that runs `code` with two arguments, its end of a pipe and our process number; and our end.

    Not a process of multiprocessing's own: that would run the caller's program once more, up to here.
    """
    ours, theirs = multiprocessing.Pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        # Out of the reach of a terminal's Ctrl-C from its first moment on: who started us decides.
        start_new_session=True,
        # Python looks for modules where it starts: nothing of the user's may stand in the way of ours.
        cwd="/",
    )
    theirs.close()
    return child, ours


def receive(ours: Connection, child: subprocess.Popen[bytes], timeout_s: float, what: str) -> Any:
    """The child's next answer. Raises DeadlineError beginning with `what`, InternalError where the child has ended."""
    # In pieces, so that signals are heard.
    for _ in range(round(timeout_s / _LOOK_S)):
        if ours.poll(_LOOK_S):
            break
    else:
        raise DeadlineError(f"{what} within {timeout_s:g} s")
    try:
        return ours.recv()
    except (EOFError, ConnectionResetError):
        code = child.wait(_END_TIMEOUT_S)
        raise InternalError(f"the compiler's process ended by itself ({code})") from None


def end_child(child: subprocess.Popen[bytes], ours: Connection) -> None:
    """Leave no child behind, nor a linker of its."""
    ours.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait(_END_TIMEOUT_S)


@contextlib.contextmanager
def live_as_child(connection: int, parent: int) -> Iterator[Connection]:
    """For the child: its end of the pipe, for a block. It ends with its parent, whoever is interrupted."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # Who asked may have gone.
    with contextlib.suppress(BrokenPipeError, EOFError), Connection(connection) as answers:
        yield answers


def main(connection: int, parent: int) -> None:
    """The life of the process: one job comes through the pipe `connection`, and its answer goes back."""
    with live_as_child(connection, parent) as answers:
        job = answers.recv()
        try:
            answers.send(job())
        except FarmError as error:
            answers.send(error)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
