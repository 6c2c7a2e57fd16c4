"""`ClockAccess` over the clock helper's socket, for an unprivileged agent.

A connection lasts for one transaction; requests outside one use a connection each. A forked process closes its copy:
the heartbeat stays with the process that began.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from device_agent.clocks import access
from device_agent.clocks.access import AccessStatus
from device_agent.clocks.transaction import NO_TRANSACTION
from device_agent.errors import HelperUnavailableError, RefusedError, UnsafeError

# The helper answers within milliseconds; restoring and nvpmodel get more time.
CALL_TIMEOUT_S = 5.0
# Slow operations: restoring has 2 s, nvpmodel 4 s.
_WORK_S = 6.0
_RESTART_S = 1.0
_QUEUE_PAUSE_S = 0.005


class HelperClient:
    """The clock helper at a socket, connected on demand. Safe to fork, not to share.

    The heartbeat's thread calls `is_wanted` before each beat; when it returns False the clocks are released, even while
    this process is busy. Default: wanted for this process's lifetime.
    """

    def __init__(self, socket_path: str | Path, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.socket_path = str(socket_path)
        self.timeout_s = timeout_s
        self.is_wanted: Callable[[], bool] | None = None
        self._sock: socket.socket | None = None
        self._forget()
        _clients.add(self)

    def status(self) -> AccessStatus:
        return AccessStatus(**self._ask({"op": "status"}))

    def begin(self, holder: str) -> None:
        """See `ClockAccess`. Changes nothing while a transaction of this client is open."""
        with contextlib.suppress(HelperUnavailableError):
            if self._sock is not None:
                self._call({"op": "begin", "holder": holder}, _WORK_S)
                return
        self._ended = ""
        restarted_s = time.monotonic() + _RESTART_S
        while self._sock is None:
            try:
                self._begin(holder)
            except HelperUnavailableError as error:
                # A killed helper is back in a moment; a missing one, or one that refuses this user, is not.
                missing = isinstance(error.__cause__, FileNotFoundError | PermissionError)
                if missing or time.monotonic() > restarted_s:
                    raise
                time.sleep(_QUEUE_PAUSE_S)
        self._stop = threading.Event()
        beat = (self._sock, self._send_lock, self._stop, self.is_wanted or (lambda: True))
        threading.Thread(target=_beat, args=beat, name="clock-heartbeat", daemon=True).start()

    def _begin(self, holder: str) -> None:
        sock = self._connect(_WORK_S)
        try:
            self._token = str(self._exchange(sock, {"op": "begin", "holder": holder}))
        except BaseException:
            sock.close()
            raise
        self._sock = sock

    def read(self, path: str) -> str:
        return str(self._ask({"op": "read", "path": path}))

    def write(self, path: str, text: str) -> None:
        self._call({"op": "write", "path": path, "text": text})

    def set_power_mode(self, mode_id: int) -> str:
        return str(self._call({"op": "power_mode", "mode": mode_id}, _WORK_S))

    def restore(self) -> tuple[str, ...]:
        """See `ClockAccess`. If the helper has ended the transaction itself, a note says why."""
        if self._sock is None and not self._ended:
            return ()
        try:
            return tuple(self._call({"op": "restore"}, _WORK_S))
        except HelperUnavailableError as error:
            # A helper that answers now has restored already: at its end, or at its start.
            status = self.status()
            if status.unsafe:
                raise UnsafeError(status.unsafe) from error
            return (str(error),)
        finally:
            self._disconnect("")

    def clear_unsafe(self, force: bool = False) -> tuple[str, ...]:
        return tuple(self._ask({"op": "clear", "force": force}, _WORK_S))

    def close(self) -> None:
        self._disconnect("")

    def _ask(self, request: dict[str, Any], extra_s: float = 0.0) -> Any:
        """Send a request outside any transaction."""
        with self._connect(extra_s) as sock:
            return self._exchange(sock, request)

    def _call(self, request: dict[str, Any], extra_s: float = 0.0) -> Any:
        """Send a request within the transaction. Raises RefusedError without one, HelperUnavailableError once over."""
        if self._sock is None:
            if self._ended:
                raise HelperUnavailableError(self._ended)
            raise RefusedError(NO_TRANSACTION)
        self._sock.settimeout(self.timeout_s + extra_s)
        try:
            return self._exchange(self._sock, request | {"token": self._token})
        except HelperUnavailableError as error:
            self._disconnect(str(error))
            raise

    def _connect(self, extra_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(self.timeout_s + extra_s)
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try:
                sock.connect(self.socket_path)
                return sock
            except OSError as error:
                # A Unix socket's full queue refuses at once; TCP's would block.
                if not isinstance(error, BlockingIOError) or time.monotonic() > deadline_s:
                    sock.close()
                    raise HelperUnavailableError(_explain(self.socket_path, error)) from error
                time.sleep(_QUEUE_PAUSE_S)

    def _exchange(self, sock: socket.socket, request: dict[str, Any]) -> Any:
        """Send a request and wait for its answer. Raises the error in it, HelperUnavailableError without one."""
        self._last_id += 1
        broken: OSError | None = None
        try:
            with self._send_lock:
                sock.send(access.pack({"id": self._last_id} | request))
        except OSError as error:
            broken = error  # the reason for the hang-up may still be readable
        answer: dict[str, Any] = {}
        try:
            while answer.get("id") != self._last_id:
                packet = access.receive(sock, access.MAX_ANSWER_BYTES)
                if not packet:
                    raise HelperUnavailableError("the clock helper hung up; it restores what was held")
                answer = access.unpack(packet)
                if "ended" in answer:
                    raise HelperUnavailableError(f"the clock helper has ended this transaction: {answer['ended']}")
                if "error" in answer:
                    break
        except TimeoutError as error:
            raise HelperUnavailableError(f"the clock helper at {self.socket_path} does not answer") from error
        except (OSError, ValueError) as error:
            raise HelperUnavailableError(_explain(self.socket_path, broken or error)) from error
        if "error" in answer:
            raise access.make_error(answer)
        return answer["value"]

    def _disconnect(self, ended: str) -> None:
        """Close the transaction's connection; later calls report `ended`."""
        self._ended = ended
        self._stop.set()
        sock, self._sock, self._token = self._sock, None, ""
        if sock is not None:
            with self._send_lock:  # the heartbeat must not send into a reused descriptor
                sock.close()

    def _forget(self) -> None:
        """Drop all state, also in a forked process, whose locks may be in any state."""
        self._sock = None
        self._token = ""
        self._ended = ""
        self._last_id = 0
        self._send_lock = threading.Lock()
        self._stop = threading.Event()

    def after_fork(self) -> None:
        """In a forked process: close its copy of the connection, which then ends with the holder."""
        sock = self._sock
        self._forget()
        if sock is not None:
            sock.close()


def _beat(sock: socket.socket, send_lock: threading.Lock, stop: threading.Event, is_wanted: Callable[[], bool]) -> None:
    """Send heartbeats until the transaction ends. A full queue already holds beats."""
    packet = access.pack({"op": "beat"})
    while not stop.wait(access.HEARTBEAT_S):
        with send_lock:
            if stop.is_set():
                return
            try:
                if not is_wanted():
                    sock.shutdown(socket.SHUT_RDWR)
                    return
                sock.send(packet, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError:
                return


def _explain(path: str, error: Exception) -> str:
    match error:
        case FileNotFoundError():
            return f"no clock helper: there is no socket {path}"
        case PermissionError():
            return f"the clock helper's socket {path} refuses this user; is it in the socket's group?"
        case ConnectionRefusedError():
            return f"no clock helper serves {path}"
    return f"the clock helper at {path}: {error}"


_clients: weakref.WeakSet[HelperClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client.after_fork()


os.register_at_fork(after_in_child=_after_fork)
