"""A virtual board as a separate process: "the hardware", which survives the crashes of its users.

`python -m farm.virtual.server TYPE --socket PATH` serves every user at PATH, and root at PATH.root. One thread,
one loop; `client.py` describes the messages.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from device_agent import processes
from device_agent.board_types import load_board_types
from device_agent.protocol import ProtocolError
from farm.virtual.board import VirtualBoard
from farm.virtual.client import MAX_BYTES, SIZE
from farm.virtual.faults import KINDS
from farm.virtual.history import OwnClock
from farm.virtual.tree import FAULT, Hardware, VirtualTree

ROOT_SUFFIX = ".root"
_BACKLOG = 64
_USAGE_ERROR = 2

_ARGUMENTS: dict[str, list[type]] = {
    "read": [str],
    "read_many": [list],
    "past": [str, float],
    "past_many": [list, float],
    "let_pass": [float],
    "write": [str, str],
    "names": [str],
    "exists": [str],
    "run": [list],
}


class _User:
    """One connection, with its partial request and its unsent answers."""

    def __init__(self, connection: socket.socket, tree: VirtualTree) -> None:
        self.connection = connection
        self.tree = tree
        self.received = bytearray()
        self.unsent = bytearray()
        self.closed = False


class Server:
    """Serves one board at two sockets. Raises OSError if they cannot be made."""

    def __init__(self, board: VirtualBoard, path: str) -> None:
        self.board = board
        self._hardware = Hardware.of(board)
        self._boots = board.boots
        self._selector = selectors.DefaultSelector()
        self._users: set[_User] = set()
        self._late: list[tuple[float, int, _User, bytes]] = []
        self._order = itertools.count()
        self._paths = (path + ROOT_SUFFIX, path)
        for name, mode, privileged in ((path + ROOT_SUFFIX, 0o600, True), (path, 0o666, False)):
            self._selector.register(_listen(name, mode), selectors.EVENT_READ, privileged)

    def serve(self) -> None:
        """Answer for ever."""
        while True:
            for key, events in self._selector.select(self._find_timeout()):
                if isinstance(key.data, _User):
                    self._attend(key.data, events)
                else:
                    self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
            self.board.advance()
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, user, frame = heapq.heappop(self._late)
                self._send(user, frame)
            if self._boots != self.board.boots:
                self._boots = self.board.boots
                for user in list(self._users):
                    self._close(user)

    def close(self) -> None:
        """Close all connections and remove the sockets."""
        for user in list(self._users):
            self._close(user)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        for path in self._paths:
            with contextlib.suppress(OSError):
                Path(path).unlink()

    def _find_timeout(self) -> float | None:
        """Until the board's next event, or the next due answer."""
        due = [self._late[0][0] - time.monotonic()] if self._late else []
        event_s = self.board.find_next_event_s()
        if event_s is not None and self.board.is_live:
            due.append(event_s - time.monotonic())
        return max(0.0, min(due)) if due else None

    def _accept(self, listener: socket.socket, privileged: bool) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # gone again, or out of descriptors: the next one may succeed
            return
        connection.setblocking(False)
        user = _User(connection, VirtualTree(self.board, privileged))
        self._users.add(user)
        self._selector.register(connection, selectors.EVENT_READ, user)

    def _attend(self, user: _User, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(user, b"")
        if not events & selectors.EVENT_READ or user.closed:
            return
        try:
            data = user.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(user)
            return
        user.received += data
        while not user.closed and len(user.received) >= SIZE.size:
            (size,) = SIZE.unpack_from(user.received)
            if size > MAX_BYTES:
                self._close(user)
                return
            if len(user.received) < SIZE.size + size:
                return
            message = bytes(user.received[SIZE.size : SIZE.size + size])
            del user.received[: SIZE.size + size]
            self._answer(user, message)

    def _answer(self, user: _User, message: bytes) -> None:
        try:
            operation, *arguments = json.loads(message)
            _check(operation, arguments)
        except (ValueError, TypeError):
            self._close(user)
            return
        faults = self._hardware.faults
        if faults.hangs and not (user.tree.privileged and operation == "write" and arguments[0] == FAULT):
            return
        try:
            answer: list[Any] = [0, getattr(user.tree, operation)(*arguments)]
        except OSError as error:
            answer = [error.errno or 5, error.strerror or str(error)]
            if error.filename:
                answer.append(error.filename)
        text = json.dumps(answer).encode()
        frame = SIZE.pack(len(text)) + text
        reads = len(arguments[0]) if operation == "read_many" else int(operation == "read")
        delay_s = faults.delay_s * reads
        if delay_s:
            heapq.heappush(self._late, (time.monotonic() + delay_s, next(self._order), user, frame))
        else:
            self._send(user, frame)

    def _send(self, user: _User, frame: bytes) -> None:
        """Send what the user's socket accepts; buffer the rest, so that a stopped user blocks no other."""
        if user.closed:
            return
        user.unsent += frame
        try:
            del user.unsent[: user.connection.send(user.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._close(user)
            return
        if len(user.unsent) > MAX_BYTES:
            self._close(user)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if user.unsent else 0)
        if self._selector.get_key(user.connection).events != events:
            self._selector.modify(user.connection, events, user)

    def _close(self, user: _User) -> None:
        if not user.closed:
            user.closed = True
            self._users.discard(user)
            self._selector.unregister(user.connection)
            user.connection.close()
            user.tree.close()


def _check(operation: object, arguments: list[Any]) -> None:
    """Raise ValueError for an invalid request."""
    kinds = _ARGUMENTS.get(str(operation))
    if kinds is None or len(kinds) != len(arguments):
        raise ValueError(operation)
    if not all(isinstance(argument, kind) for argument, kind in zip(arguments, kinds, strict=True)):
        raise ValueError(operation)
    if kinds[0] is list and not all(isinstance(word, str) for word in arguments[0]):
        raise ValueError(operation)


def _listen(path: str, mode: int) -> socket.socket:
    """Create a listening socket that appears at `path` only once it accepts connections."""
    new = f"{path}~"
    with contextlib.suppress(FileNotFoundError):
        Path(new).unlink()
    listener = socket.socket(socket.AF_UNIX)
    old_mask = os.umask(0o777 & ~mode)
    try:
        listener.bind(new)
    finally:
        os.umask(old_mask)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    Path(new).rename(path)
    return listener


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m farm.virtual.server", description=__doc__)
    parser.add_argument("type", metavar="TYPE", help="board type, e.g. jetson-nano")
    parser.add_argument("--socket", required=True, metavar="PATH", help="where to serve; root's socket is PATH.root")
    parser.add_argument("--seed", type=int, default=0, help="which of the boards of this type (default: 0)")
    kinds = ", ".join(f"{kind}:{argument}" if argument else kind for kind, argument in KINDS.items())
    parser.add_argument("--fault", action="append", default=[], metavar="KIND[:ARG][@SECONDS]", help=f"one of {kinds}")
    parser.add_argument("--live", action="store_true", help="time passes by itself (default: when it is let pass)")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when the process that started this ends")
    parser.add_argument("--ready-fd", type=int, metavar="N", help="write a line to this descriptor once it serves")
    chosen = parser.parse_args(arguments)
    if chosen.exit_with_parent:
        processes.die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, _end)
    try:
        types = load_board_types()
        if chosen.type not in types:
            known = ", ".join(name for name, board_type in types.items() if board_type.simulation)
            raise ProtocolError(f"no board type {chosen.type!r}; there are {known}")
        clock = time.monotonic if chosen.live else OwnClock()
        board = VirtualBoard(types[chosen.type], chosen.seed, clock)
        if not board.is_live:
            board.begin_anew()
        server = Server(board, chosen.socket)
    except (ProtocolError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    try:
        for fault in chosen.fault:
            Hardware.of(server.board).faults.inject(fault)
        if chosen.ready_fd is not None:
            os.write(chosen.ready_fd, b"ready\n")
            os.close(chosen.ready_fd)
        server.serve()
    except ValueError as error:
        print(f"error: --fault: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
