"""The serving half of the clock helper: many clients, at most one holder, and a watchdog over the holder.

One thread, one loop. It sends beats to its guardian (`helper.py`); without a guardian it restores and ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from device_agent.clocks import access
from device_agent.clocks.access import AccessStatus
from device_agent.clocks.transaction import Transaction
from device_agent.errors import AgentError, BusyError, HelperUnavailableError, RefusedError, UnsafeError
from device_agent.sysfs import Tree

# The guardian waits GUARD_TIMEOUT_S for a beat (helper.py): it acts after five missed beats.
BEAT_S = 0.2
BEAT, READY = b"b", b"r"
# A worn SD card may need seconds to write; nvpmodel has 4 s.
_ASIDE_LIMIT_S = 8.0
# One client's requests must not delay the others.
_REQUESTS_AT_ONCE = 16
_MAX_CLIENTS = 64
_CREDENTIALS = struct.Struct("3i")

_T = TypeVar("_T")
_log = logging.getLogger("clock-helper")


class Heart:
    """Beats for the guardian. Work that blocks for longer than a beat runs `aside`, in a thread."""

    def __init__(self, guardian: socket.socket) -> None:
        self._guardian = guardian
        self._beaten_s = 0.0

    def beat(self) -> None:
        """Send a beat if one is due; cheap enough for every file access."""
        now_s = time.monotonic()
        if now_s - self._beaten_s > BEAT_S / 2:
            self._beaten_s = now_s
            self.send(BEAT)

    def send(self, message: bytes) -> None:
        """Send to the guardian. A stopped one reads it later; its death is detected elsewhere."""
        with contextlib.suppress(OSError):
            self._guardian.send(message, socket.MSG_DONTWAIT)

    def aside(self, work: Callable[[], _T]) -> _T:
        """Run `work` (a tool, a disk) and beat meanwhile, for up to _ASIDE_LIMIT_S. Raises what `work` raises."""
        results: list[_T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(work())
            except (OSError, AgentError) as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        limit_s = time.monotonic() + _ASIDE_LIMIT_S
        while thread.is_alive():
            if time.monotonic() < limit_s:
                self.beat()
            thread.join(BEAT_S / 2)
        if errors:
            raise errors[0]
        return results[0]


class BeatingTree:
    """A tree that sends a beat at every access."""

    def __init__(self, tree: Tree, heart: Heart) -> None:
        self.simulated = tree.simulated
        self.root = getattr(tree, "root", None)
        self._tree = tree
        self._heart = heart

    def read(self, path: str) -> str:
        self._heart.beat()
        return self._tree.read(path)

    def write(self, path: str, text: str) -> None:
        self._heart.beat()
        self._tree.write(path, text)

    def names(self, folder: str) -> list[str]:
        self._heart.beat()
        return self._tree.names(folder)

    def exists(self, path: str) -> bool:
        self._heart.beat()
        return self._tree.exists(path)

    def run(self, command: list[str]) -> str:
        return self._heart.aside(lambda: self._tree.run(command))


@dataclasses.dataclass(eq=False)
class _Client:
    """A connection and its peer."""

    sock: socket.socket
    uid: int
    pid: int


class Server:
    """Serves a listening socket until `stopped` or the guardian's socket closes."""

    def __init__(self, listener: socket.socket, transaction: Transaction, heart: Heart) -> None:
        self._listener = listener
        self._transaction = transaction
        self._heart = heart
        self._clients: dict[int, _Client] = {}
        self._holder: _Client | None = None
        self._token = ""
        self._heard_s = 0.0
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def serve(self, guardian: socket.socket, wakeup: socket.socket) -> str:
        """Serve until stopped; return why. The transaction is then restored, or the board is unsafe."""
        self._poll.register(guardian, 0)  # hang-ups are reported anyway
        self._poll.register(wakeup, select.POLLIN)
        why = ""
        while not why:
            ready = dict(self._poll.poll(BEAT_S * 1000))
            self._heart.beat()
            if guardian.fileno() in ready:
                why = "its guardian is gone"
            elif wakeup.fileno() in ready:
                why = "told to end"
            for client in [self._clients[fd] for fd in ready if fd in self._clients]:
                self._serve_client(client)
            if self._listener.fileno() in ready:
                self._accept()
            # Judge only after reading everything that arrived: this process may have been stopped itself.
            if self._holder is not None and time.monotonic() - self._heard_s > access.HOLDER_TIMEOUT_S:
                self._end_transaction(f"no heartbeat for {access.HOLDER_TIMEOUT_S:g} s")
        self._end_transaction(f"the clock helper ends: {why}")
        return why

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # gone again, or no file descriptors left
            return
        sock.setblocking(False)
        if len(self._clients) >= _MAX_CLIENTS:
            with contextlib.suppress(OSError), sock:
                sock.send(access.pack({"ended": "too many clients"}))
            return
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        self._clients[sock.fileno()] = _Client(sock, uid, pid)
        self._poll.register(sock, select.POLLIN)

    def _serve_client(self, client: _Client) -> None:
        """Read what has come; drop a client that breaks the protocol or has gone."""
        try:
            for _ in range(_REQUESTS_AT_ONCE):
                packet = access.receive(client.sock, access.MAX_REQUEST_BYTES)
                if not packet:
                    break
                self._handle(client, access.unpack(packet))
            else:
                return
            problem = "" if packet is not None else "request too long"
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"bad request: {error}"[:200]
        if problem:
            _log.warning("client of uid %d, pid %d: %s", client.uid, client.pid, problem)
            with contextlib.suppress(OSError):
                client.sock.send(access.pack({"error": "refused", "message": problem}))
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        if client is self._holder:
            self._end_transaction("its connection closed")  # calls `_drop` again
        if self._clients.pop(client.sock.fileno(), None) is not None:
            self._poll.unregister(client.sock)
            client.sock.close()

    def _handle(self, client: _Client, message: dict[str, Any]) -> None:
        """Answer one request. Raises ValueError, KeyError, TypeError for an invalid one, OSError to drop the client."""
        if client is self._holder:
            self._heard_s = time.monotonic()
        if message["op"] == "beat":
            return
        try:
            answer = {"value": self._answer(client, message)}
        except (AgentError, OSError) as error:
            answer = access.describe_error(error)
        packet = access.pack({"id": message["id"]} | answer)
        if len(packet) > access.MAX_ANSWER_BYTES:
            packet = access.pack({"id": message["id"], "error": "clock", "message": "too long to be a clock file"})
        client.sock.send(packet)
        if client is self._holder:  # the delay was the helper's own work
            self._heard_s = time.monotonic()

    def _answer(self, client: _Client, message: dict[str, Any]) -> Any:
        match message["op"]:
            case "status":
                return dataclasses.asdict(AccessStatus(self._transaction.holder, self._transaction.unsafe))
            case "read":
                return self._transaction.read(_text(message["path"]))
            case "begin":
                return self._begin(client, _text(message["holder"]))
            case "write":
                self._require(client, message)
                return self._transaction.write(_text(message["path"]), _text(message["text"]))
            case "power_mode":
                self._require(client, message)
                return self._transaction.set_power_mode(message["mode"])
            case "restore":
                self._require(client, message)
                self._holder = None
                notes = self._transaction.restore()
                _log.info("restored: %s", "; ".join(notes) or "nothing had changed")
                return notes
            case "clear":
                return self._clear(client, bool(message["force"]))
        raise ValueError(f"no operation {str(message['op'])[:40]!r}")

    def _begin(self, client: _Client, holder: str) -> str:
        if client is self._holder:
            return self._token
        if self._holder is not None:
            raise BusyError(f"{self._transaction.holder} holds the clocks")
        name = "".join(filter(str.isprintable, holder[:80])) or "unknown"
        self._transaction.begin(f"{name} (pid {client.pid}, uid {client.uid})")
        self._holder, self._token, self._heard_s = client, secrets.token_hex(8), time.monotonic()
        _log.info("held by %s", self._transaction.holder)
        return self._token

    def _require(self, client: _Client, message: dict[str, Any]) -> None:
        """Require the client's transaction to be the open one."""
        if client is not self._holder or message["token"] != self._token:
            raise HelperUnavailableError("this transaction is over: the clocks have been restored")

    def _clear(self, client: _Client, force: bool) -> tuple[str, ...]:
        # The socket's group runs foreign clients' code: taking clocks away and clearing `unsafe` are for an operator.
        if force and client.uid not in (0, os.geteuid()):
            raise RefusedError(f"force is for root, not for uid {client.uid}")
        notes: tuple[str, ...] = ()
        if self._holder is not None:
            if not force:
                raise BusyError(f"{self._transaction.holder} holds the clocks")
            notes = (f"taken from {self._transaction.holder}",)
            self._end_transaction(f"taken by force (pid {client.pid}, uid {client.uid})")
        return notes + self._transaction.clear_unsafe(force)

    def _end_transaction(self, why: str) -> None:
        """Restore on behalf of a holder; notify it if it still listens, and drop it."""
        client, self._holder, self._token = self._holder, None, ""
        if client is None:
            return
        holder = self._transaction.holder
        try:
            notes = self._transaction.restore()
            _log.warning("restored for %s: %s: %s", holder, why, "; ".join(notes) or "nothing had changed")
        except UnsafeError as error:
            _log.error("UNSAFE: %s: %s", holder, error)
        with contextlib.suppress(OSError):
            client.sock.send(access.pack({"ended": f"{why}; the clocks have been restored"}))
        self._drop(client)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value
