"""Child processes with a message pipe: separate Pythons, pickled messages, ended with their parent.

A child ends with its connection or its parent, even a killed one. Children without a pipe are in `children`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from device_agent.protocol.interpreters import python_command
from farm import folders
from farm.errors import DeadlineError, InternalError
from farm.processes import children
from farm.settings import find_folders

# A child may be in a compiler's call, which its end cuts.
STOP_TIMEOUT_S = 10.0
# How often a child checks its parent: a copy of the connection in another child would keep the connection open.
_PARENT_LOOK_S = 1.0
# How often a waiting call handles signals, which a thread of TVM's may have taken from the main thread.
_LOOK_S = 0.1
_CODE = "import sys; from farm.processes.worker_processes import run; run(*sys.argv[1:])"


def run(module: str, connection: str, pid: str) -> None:
    """A child's main function, run by `Child.start`."""
    with contextlib.suppress(StoppedError):
        importlib.import_module(module).main(Parent(int(connection), int(pid)))


class StoppedError(BaseException):
    """The parent is gone or wants this child to end. Not an `Exception`, so that no handler takes it for a fault."""


@dataclasses.dataclass(eq=False)
class Child:
    """A child process and its connection; its output goes to `log`, else to this process's stderr."""

    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path | None = None

    @classmethod
    def start(cls, module: str, log: Path | None = None, environment: Mapping[str, str] | None = None) -> Child:
        """Run `main(Parent)` of a module.

        Not a multiprocessing process, which would run the caller's program again up to this point. Raises
        TransientError if the machine lacks resources.
        """
        with children.room_for_process(), contextlib.ExitStack() as stack:
            ours, theirs = Pipe()
            stack.enter_context(theirs)
            output: Any = 2  # our stdout is for the command's own words
            if log is not None:
                folders.make_private(log.parent)
                output = stack.enter_context(log.open("ab"))
            process = subprocess.Popen(
                python_command("-c", _CODE, module, str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**(os.environ if environment is None else environment), **find_folders()},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                # Isolated from a terminal's Ctrl-C from its first moment: the parent decides.
                start_new_session=True,
            )
        return cls(process, ours, log)

    def send(self, *message: Any) -> bool:
        """Send a message. Returns False if the child is gone."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float, what: str) -> tuple[Any, ...]:
        """The next message. Raises DeadlineError beginning with `what`, InternalError if the child has ended."""
        deadline = time.monotonic() + timeout_s
        while not self.connection.poll(_LOOK_S):
            if time.monotonic() > deadline:
                raise DeadlineError(f"{what} within {timeout_s:g} s")
        try:
            message: tuple[Any, ...] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise InternalError(f"{what}: its process ended by itself ({self.describe_end()})") from None
        return message

    def hang_up(self) -> None:
        """Ask it to end, without waiting. Idempotent."""
        if not self.connection.closed:
            self.connection.close()

    def kill(self) -> None:
        """Kill it and its children."""
        self.hang_up()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Wait for its end after `hang_up`; kill it at the timeout."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.kill()

    def describe_end(self) -> str:
        """How the process ended, for a message."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        return children.explain_end(self.log, self.process.returncode)


class Parent:
    """A child's side of the connection. Made on the main thread, whose work `StoppedError` then ends."""

    def __init__(self, connection: int, pid: int) -> None:
        """`connection` is a descriptor, `pid` the parent's."""
        self._connection = Connection(connection)
        self._pid = pid
        # Called once, on another thread, at the end: for work that signals do not reach.
        self.on_stop: Callable[[], None] = lambda: None
        self._arrived = threading.Condition()
        self._inbox: list[bytes] = []
        self._stopping = self._leaving = False
        signal.signal(signal.SIGTERM, self._interrupt)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._read, name="farm-parent", daemon=True).start()

    def receive(self, timeout_s: float | None = None) -> tuple[Any, ...] | None:
        """The next message; None after `timeout_s`, if given. Raises StoppedError."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._inbox or self._stopping, timeout_s)
            if self._stopping:
                self._leaving = True
                raise StoppedError
            message = self._inbox.pop(0) if self._inbox else None
        # On the main thread, because it may import modules and fail.
        return None if message is None else pickle.loads(message)  # noqa: S301 - our own parent's

    def send(self, *message: Any) -> None:
        """Send a message to the parent. `receive` notices a dead one."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while os.getppid() == self._pid:
                if self._connection.poll(_PARENT_LOOK_S):
                    message = self._connection.recv_bytes()
                    with self._arrived:
                        self._inbox.append(message)
                        self._arrived.notify_all()
        with self._arrived:
            self._stopping = True
            self._arrived.notify_all()
        self.on_stop()
        if not self._leaving:
            os.kill(os.getpid(), signal.SIGTERM)

    def _interrupt(self, *_: Any) -> None:
        if not self._leaving:
            self._leaving = True
            raise StoppedError
