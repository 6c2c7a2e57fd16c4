"""TVM's tracker: start it as a child, query it for boards and its summary, with deadlines that TVM's client lacks.

The messages are TVM's own (a magic number, then length-prefixed JSON), so any TVM client shares the tracker.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from device_agent.protocol.interpreters import python_command
from farm.connectivity.wire import ENDED, explain_end
from farm.errors import DeadlineError, TransientError, UnavailableError
from farm.processes import children

# From tvm/rpc/base.py of 0.27.
_MAGIC = 0x2F271
_REQUEST, _SUMMARY = 4, 6
_SUCCESS = 0

# What `python -m tvm.exec.rpc_tracker` runs in a second process, which would survive a kill of the first.
_PROGRAM = """
import sys
from tvm.rpc.tracker import PopenTrackerServerState
host, port = sys.argv[1], int(sys.argv[2])
PopenTrackerServerState(host, port, port + 1, silent=True).thread.join()
"""

# The tracker starts in 2 s on an idle machine.
START_TIMEOUT_S = 30.0
# A tracker on loopback or behind a tunnel answers in milliseconds; a stopped one never does.
HANDSHAKE_TIMEOUT_S = 5.0
# Far above a summary of a thousand boards: foreign bytes must not pass for a length.
_MAX_MESSAGE_BYTES = 64 << 20
LAST_PORT_OFFSET = 9


class Tracker:
    """A running tracker on loopback."""

    def __init__(self, host: str, port: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.host = host
        self.port = port
        self._process = process
        self._is_stopped = False

    @classmethod
    def start(cls, first_port: int, log: Path, tries: int = LAST_PORT_OFFSET + 1) -> Tracker:
        """Start TVM's tracker on the first free port of `tries` from `first_port` on.

        Raises UnavailableError if all are busy or the tracker ends at once, DeadlineError if it is silent,
        TransientError if no process can start.
        """
        port = _free_port(first_port, tries)
        process = children.start(
            python_command("-c", _PROGRAM, "127.0.0.1", str(port)),
            log,
            # Without the compiler library, which the tracker does not need, it starts in half the time.
            {**os.environ, "TVM_USE_RUNTIME_LIB": "1"},
        )
        tracker = cls("127.0.0.1", port, process)
        try:
            tracker._wait_until_up(log)
        except BaseException:
            tracker.stop()
            raise
        return tracker

    def stop(self) -> None:
        """End the process, if started here."""
        if self._process is not None:
            children.stop(self._process)
            self._process = None
            self._is_stopped = True

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs; True for a tracker of another process."""
        return not self._is_stopped and (self._process is None or self._process.poll() is None)

    async def fetch_summary(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The tracker's summary: `server_info` and `queue_info`. Raises TransientError, UnavailableError."""
        async with self._asking([_SUMMARY], timeout_s) as answer:
            with anyio.fail_after(timeout_s):
                code, summary = await _receive(answer)
        if code != _SUCCESS:
            raise TransientError(f"the tracker {self.host}:{self.port} refused to tell its state")
        return dict(summary)

    async def fetch_keys(self, timeout_s: float = 5.0) -> set[str]:
        """The keys of registered agents. Raises as `fetch_summary`."""
        infos = (await self.fetch_summary(timeout_s)).get("server_info", ())
        return {str(info.get("key", "")).removeprefix("server:") for info in infos}

    async def request(self, key: str, timeout_s: float) -> tuple[str, int, str]:
        """Wait for a free board with `key`; return its host, port and the key to connect with.

        Raises DeadlineError after `timeout_s`, TransientError if the tracker is gone, UnavailableError if another
        program listens there.
        """
        async with self._asking([_REQUEST, key, "", 1], timeout_s) as answer:
            try:
                with anyio.fail_after(timeout_s):
                    code, value = await _receive(answer)
            except TimeoutError:
                raise DeadlineError(f"no board {key!r} became free within {timeout_s:g} s") from None
        if code != _SUCCESS:
            raise TransientError(f"the tracker refused to hand out {key!r}: {value}")
        host, port, match_key = value
        return str(host), int(port), str(match_key)

    @contextlib.asynccontextmanager
    async def _asking(self, message: Any, timeout_s: float) -> AsyncIterator[BufferedByteReceiveStream]:
        """Send a message; yield what the answer is read from."""
        where = f"{self.host}:{self.port}"
        try:
            with anyio.fail_after(min(HANDSHAKE_TIMEOUT_S, timeout_s)):
                stream = await anyio.connect_tcp(self.host, self.port)
            async with stream:
                answer = BufferedByteReceiveStream(stream)
                with anyio.fail_after(min(HANDSHAKE_TIMEOUT_S, timeout_s)):
                    await stream.send(struct.pack("<i", _MAGIC))
                    if struct.unpack("<i", await answer.receive_exactly(4))[0] != _MAGIC:
                        raise UnavailableError(f"{where} is not a TVM tracker", "Give the tracker's host and port.")
                    data = json.dumps(message).encode()
                    await stream.send(struct.pack("<i", len(data)) + data)
                yield answer
        except (OSError, *ENDED) as error:
            raise TransientError(f"the tracker at {where} does not answer: {explain_end(error)}") from error
        except ValueError as error:
            raise TransientError(f"the tracker at {where} answers nonsense: {error}") from error

    def _wait_until_up(self, log: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise UnavailableError(f"the tracker ended at once: {children.explain_end(log)}")
            with contextlib.suppress(TransientError):
                anyio.run(self.fetch_summary, 1.0)
                return
            time.sleep(0.05)
        raise DeadlineError(f"the tracker did not answer within {START_TIMEOUT_S:g} s: {children.explain_end(log)}")


def _free_port(first: int, tries: int) -> int:
    for port in range(first, min(first + tries - 1, 65535) + 1):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            return port
    ports = f"port {first} is" if tries == 1 else f"ports {first} to {first + tries - 1} are all"
    raise UnavailableError(
        f"{ports} in use, so the tracker cannot start", "Set FARM_TRACKER_PORT to the first of ten free ports."
    )


async def _receive(answer: BufferedByteReceiveStream) -> Any:
    (size,) = struct.unpack("<i", await answer.receive_exactly(4))
    if not 0 <= size <= _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(await answer.receive_exactly(size))
