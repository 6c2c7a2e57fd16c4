"""A board that runs TVM's own RPC server instead of our agent."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

from tests.ports import find_free_port


@contextlib.contextmanager
def stock_board(folder: pathlib.Path, *options: str) -> Iterator[int]:
    """`python -m tvm.exec.rpc_server`, which writes to `folder` alone; yields its port, on which it may not listen yet.

    It serves from a helper process, which outlives it: both are ended.
    """
    port = find_free_port()
    command = [sys.executable, "-m", "tvm.exec.rpc_server", "--host", "127.0.0.1", "--silent"]
    command += ["--port", str(port), "--port-end", str(port + 1), *options]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(folder)}, start_new_session=True
        )
    try:
        yield port
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def listens(port: int) -> bool:
    """Whether a server does."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
