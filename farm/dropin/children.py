"""Processes that a script keeps while it tunes: started apart, spoken to over a socket pair, ended with the script.

A child ends when its connection does, so also with a script that was killed. What children do is their modules'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from farm.processes import children

# A board's child may be within a call on the board, which the cut ends at once, or write to a store that is busy.
STOP_TIMEOUT_S = 10.0
# How often a child looks whether its parent is still there: a copy of the connection in some other child of the script
# would keep it open.
_PARENT_LOOK_S = 1.0


class StoppedError(BaseException):
    """The script is gone or wants us gone. No `Exception`: nothing on the way may take it for a fault."""


@dataclasses.dataclass(eq=False)
class Child:
    """A child process and the connection to it; messages are pickled tuples whose first item names them."""

    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    @classmethod
    def start(cls, module: str, log: Path, environment: Mapping[str, str]) -> Child:
        """Run `python -m module`; what it prints goes to `log`."""
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                # A script's own folder may hold modules called like Python's.
                cwd="/",
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is the script's; it then ends its children in order.
                start_new_session=True,
            )
        return cls(process, Connection(ours.detach()), log)

    def send(self, *message: Any) -> bool:
        """Hand over a message. Returns False where the child is gone."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def hang_up(self) -> None:
        """Ask it to end; waits for nothing. Safe to call twice."""
        if not self.connection.closed:
            self.connection.close()

    def kill(self) -> None:
        """End it and whatever it started, now."""
        self.hang_up()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

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
        said = children.tail(self.log)
        return f"exit code {self.process.returncode}" + (f": {said}" if said else "")


class Parent:
    """A child's side of the connection. Make it on the main thread, whose work `StoppedError` then ends."""

    def __init__(self, arguments: list[str], on_stop: Callable[[], None] = lambda: None) -> None:
        """`arguments` are those that `Child.start` gave; `on_stop` is called once, on another thread."""
        self._connection = Connection(int(arguments[0]))
        self._pid = int(arguments[1])
        self._on_stop = on_stop
        self._arrived = threading.Condition()
        self._inbox: list[tuple[Any, ...]] = []
        self._stopping = self._leaving = False
        signal.signal(signal.SIGTERM, self._interrupt)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._read, name="farm-parent", daemon=True).start()

    def receive(self, timeout_s: float) -> tuple[Any, ...] | None:
        """The next message, or None after `timeout_s`. Raises StoppedError."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._inbox or self._stopping, timeout_s)
            if self._stopping:
                self._leaving = True
                raise StoppedError
            return self._inbox.pop(0) if self._inbox else None

    def send(self, *message: Any) -> None:
        """Tell the script. A script that is gone is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def leave(self) -> None:
        """From now on nothing interrupts the main thread: it is putting things back."""
        self._leaving = True

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while os.getppid() == self._pid:
                if self._connection.poll(_PARENT_LOOK_S):
                    message = self._connection.recv()
                    with self._arrived:
                        self._inbox.append(message)
                        self._arrived.notify_all()
        with self._arrived:
            self._stopping = True
            self._arrived.notify_all()
        self._on_stop()
        if not self._leaving:
            os.kill(os.getpid(), signal.SIGTERM)

    def _interrupt(self, *_: Any) -> None:
        if not self._leaving:
            self._leaving = True
            raise StoppedError
