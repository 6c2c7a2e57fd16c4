"""Child processes that are spoken to: Python of ours, started apart, pickled messages over a pipe, ended with us.

A child ends when its connection does or its parent is gone, so also with a program that was killed. What children do is
their modules'; children that are not spoken to are in `children`.
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

# A board's child may be within a call on the board, which the cut ends at once, or write to a store that is busy.
STOP_TIMEOUT_S = 10.0
# How often a child looks whether its parent is still there: a copy of the connection in some other child of the parent
# would keep it open.
_PARENT_LOOK_S = 1.0
# How often who waits for an answer hears signals, which a thread of TVM's may have taken from the main one.
_LOOK_S = 0.1
# No pickle begins with it.
_URGENT = b"!"
_CODE = "import sys; from farm.processes.worker_processes import run; run(*sys.argv[1:])"


def run(module: str, connection: str, pid: str) -> None:
    """A child's life: what `Child.start` runs."""
    with contextlib.suppress(StoppedError):
        importlib.import_module(module).main(Parent(int(connection), int(pid)))


class StoppedError(BaseException):
    """The parent is gone or wants us gone. No `Exception`: nothing on the way may take it for a fault."""


@dataclasses.dataclass(eq=False)
class Child:
    """A child process and the connection to it; `log` takes what it prints, else our stderr does."""

    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path | None = None

    @classmethod
    def start(cls, module: str, log: Path | None = None, environment: Mapping[str, str] | None = None) -> Child:
        """Run `main(Parent)` of a module.

        Not a process of multiprocessing's own: that would run the caller's program once more, up to here. Raises
        TransientError where the machine has no room for it.
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
                # Out of the reach of a terminal's Ctrl-C from its first moment on: who started us decides.
                start_new_session=True,
            )
        return cls(process, ours, log)

    def send(self, *message: Any) -> bool:
        """Hand over a message. Returns False where the child is gone."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def send_urgent(self, text: str) -> None:
        """Say something past the messages that wait (`Parent.on_urgent`). A child that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(_URGENT + text.encode())

    def receive(self, timeout_s: float, what: str) -> tuple[Any, ...]:
        """The next message. Raises DeadlineError beginning with `what`, InternalError where the child has ended."""
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
        """Ask it to end; waits for nothing. Safe to call twice."""
        if not self.connection.closed:
            self.connection.close()

    def kill(self) -> None:
        """End it and whatever it started, now."""
        self.hang_up()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Wait until it has ended after `hang_up`; what does not end is killed."""
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
        """`connection` is a descriptor, `pid` whose child we are."""
        self._connection = Connection(connection)
        self._pid = pid
        # Called once, on another thread, when it is time to end: for work that no signal reaches.
        self.on_stop: Callable[[], None] = lambda: None
        self._hear: Callable[[str], None] | None = None
        # What was said urgently before anybody heard it: a child that begins is spoken to already.
        self._unheard: list[str] = []
        self._arrived = threading.Condition()
        self._inbox: list[bytes] = []
        self._stopping = self._leaving = False
        signal.signal(signal.SIGTERM, self._interrupt)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._read, name="farm-parent", daemon=True).start()

    def on_urgent(self, hear: Callable[[str], None]) -> None:
        """Have `hear` called with what `Child.send_urgent` said, also before now: on the thread that reads, or here."""
        with self._arrived:
            self._hear = hear
            unheard, self._unheard = self._unheard, []
        for said in unheard:
            hear(said)

    def receive(self, timeout_s: float | None = None) -> tuple[Any, ...] | None:
        """The next message, or None after `timeout_s`, where given. Raises StoppedError."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._inbox or self._stopping, timeout_s)
            if self._stopping:
                self._leaving = True
                raise StoppedError
            message = self._inbox.pop(0) if self._inbox else None
        # Here, on the main thread: it may import modules, and fail.
        return None if message is None else pickle.loads(message)  # noqa: S301 - our own parent's

    def send(self, *message: Any) -> None:
        """Tell the parent. One that is gone is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def leave(self) -> None:
        """From now on nothing interrupts the main thread: it is putting things back."""
        self._leaving = True

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while os.getppid() == self._pid:
                if self._connection.poll(_PARENT_LOOK_S):
                    message = self._connection.recv_bytes()
                    if message.startswith(_URGENT):
                        self._say(message.removeprefix(_URGENT).decode())
                        continue
                    with self._arrived:
                        self._inbox.append(message)
                        self._arrived.notify_all()
        with self._arrived:
            self._stopping = True
            self._arrived.notify_all()
        self.on_stop()
        if not self._leaving:
            os.kill(os.getpid(), signal.SIGTERM)

    def _say(self, said: str) -> None:
        with self._arrived:
            hear = self._hear
            if hear is None:
                self._unheard.append(said)
        if hear is not None:
            hear(said)

    def _interrupt(self, *_: Any) -> None:
        if not self._leaving:
            self._leaving = True
            raise StoppedError
