"""Run jobs in a child process: start it, give it jobs, take their results by a deadline, end it.

The child is a Python of its own, which ends with its connection or its parent, even a killed one. So TVM's compiler
runs: it takes seconds and hundreds of megabytes, blocks signals, and cannot be loaded beside the runtime that talks to
boards. Children that run commands are in `children`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from device_agent.protocol.interpreters import python_command
from farm import folders
from farm.closing import Closing
from farm.errors import DeadlineError, FarmError, InternalError
from farm.processes import children
from farm.settings import find_folders

# The largest models take a minute to import and some to build; the linker's first use half a minute.
TIMEOUT_S = 900.0
# For a killed process to end.
_STOP_TIMEOUT_S = 10.0
# How often a child checks its parent: a copy of the connection in another child would keep the connection open.
_PARENT_LOOK_S = 1.0
# How often a waiting call handles signals, which a thread of TVM's may have taken from the main thread.
_LOOK_S = 0.1
# How often to report progress to the user.
_TELL_S = 5.0
_CODE = "import sys; from farm.processes.jobs import main; main(*map(int, sys.argv[1:]))"

T = TypeVar("T")


class ProcessEndedError(Exception):
    """The process ended before the job; the message says how."""


class JobProcess(Closing):
    """A child process that runs jobs in sequence; it starts at once. `close` kills it and its children."""

    def __init__(self, log: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        """Its output goes to `log`, else to this process's stderr.

        Not a multiprocessing process, which would run the caller's program again up to this point. Raises
        TransientError if the machine lacks resources.
        """
        self._log = log
        self._given: collections.deque[Future[Any]] = collections.deque()
        self._lock = threading.Lock()
        self._end = ""
        with children.room_for_process(), contextlib.ExitStack() as stack:
            self._connection, theirs = Pipe()
            stack.enter_context(theirs)
            output: Any = 2  # our stdout is for the command's own words
            if log is not None:
                folders.make_private(log.parent)
                output = stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                python_command("-c", _CODE, str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**(os.environ if environment is None else environment), **find_folders()},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                # Isolated from a terminal's Ctrl-C from its first moment: the parent decides.
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="farm-jobs", daemon=True)
        self._reader.start()

    def give(self, job: Callable[[], T]) -> Future[T]:
        """Add a job after the others; see `take`. The job, its result and its errors must be picklable."""
        order, call = pickle.dumps(job), Future[T]()
        with self._lock:
            if self._end:
                call.set_exception(ProcessEndedError(self._end))
                return call
            self._given.append(call)
        with contextlib.suppress(OSError):  # where it is gone, `_read` tells how it ended
            self._connection.send_bytes(order)
        return call

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_STOP_TIMEOUT_S)
        self._reader.join(_STOP_TIMEOUT_S)

    def _read(self) -> None:
        """Settle jobs as their answers come, and the rest when the process has ended."""
        with self._connection, contextlib.suppress(EOFError, OSError):
            while True:
                answer = self._connection.recv_bytes()
                call = self._given.popleft()
                try:
                    result, error = pickle.loads(answer)  # noqa: S301 - our own child's
                except Exception as cause:  # noqa: BLE001 - an error of its import is the job's error
                    result, error = None, _to_error(cause)
                if error is None:
                    call.set_result(result)
                else:
                    call.set_exception(error)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        with self._lock:
            self._end = children.explain_end(self._log, self._process.returncode)
        for call in self._given:
            call.set_exception(ProcessEndedError(self._end))


def take(job: Future[T], timeout_s: float, what: str, say: Callable[[str], None] | None = None, doing: str = "") -> T:
    """The result of a job that was given; `say` gets a line with what it is `doing` from time to time.

    Raises its error, DeadlineError beginning with `what`, and InternalError if the process ended.
    """
    began_s = said_s = time.monotonic()
    while not wait([job], _LOOK_S).done:
        now = time.monotonic()
        if now > began_s + timeout_s:
            raise DeadlineError(f"{what} within {timeout_s:g} s")
        if say is not None and now > said_s + _TELL_S:
            said_s = now
            say(f"{doing}, {now - began_s:.0f} s so far")
    try:
        return job.result()
    except ProcessEndedError as error:
        raise InternalError(f"{what}: its process ended by itself ({error})") from None


def take_compiled(
    job: Future[T], name: str, timeout_s: float = TIMEOUT_S, say: Callable[[str], None] | None = None
) -> T:
    """The result of a job that compiles `name`. Raises as `take`."""
    return take(job, timeout_s, f"{name} was not compiled", say, f"{name}: still compiling")


def compile_in_subprocess(
    job: Callable[[], T], name: str, timeout_s: float = TIMEOUT_S, say: Callable[[str], None] | None = None
) -> T:
    """The result of a single job that compiles `name`. Raises as `take`."""
    with JobProcess() as process:
        return take_compiled(process.give(job), name, timeout_s, say)


def _to_error(error: Exception) -> FarmError:
    return error if isinstance(error, FarmError) else InternalError(f"{type(error).__name__}: {error}")


def main(descriptor: int, parent: int) -> None:
    """The child's main function: run jobs, send answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    connection, inbox = Connection(descriptor), queue.SimpleQueue[bytes]()
    threading.Thread(target=_listen, args=(connection, parent, inbox), name="farm-parent", daemon=True).start()
    while True:
        job = inbox.get()
        try:
            answer = pickle.dumps((pickle.loads(job)(), None))  # noqa: S301 - our own parent's
        except Exception as error:  # noqa: BLE001 - the edge of a process: the error is sent to the caller
            answer = pickle.dumps((None, _to_error(error)))
        with contextlib.suppress(OSError):  # `_listen` notices a dead parent
            connection.send_bytes(answer)


def _listen(connection: Connection, parent: int, inbox: queue.SimpleQueue[bytes]) -> None:
    """Take in jobs until the parent hangs up or is gone; then end at once, also in a compiler's call."""
    with contextlib.suppress(OSError, EOFError):
        while os.getppid() == parent:
            if connection.poll(_PARENT_LOOK_S):
                inbox.put(connection.recv_bytes())
    os._exit(1)
