"""One farm command at a time on this machine, and what becomes of the campaigns of those that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from farm.errors import UnavailableError
from farm.store import Store


def process_identity() -> dict[str, Any]:
    """Which process this is, in a form that no later process shares."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "created": psutil.Process().create_time()}


def close_abandoned_campaigns(store: Store) -> None:
    """Note as `interrupted` what killed processes of this machine left as `running`."""
    for campaign in store.fetch_campaigns():
        process = (campaign["settings"] or {}).get("process")
        if campaign["state"] == "running" and process and process["host"] == socket.gethostname():
            try:
                alive = psutil.Process(process["pid"]).create_time() == process["created"]
            except psutil.NoSuchProcess:
                alive = False
            if not alive:
                store.finish_campaign(campaign["id"], "interrupted")


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """Keep a second farm from measuring on this machine at the same time: each would be the other's noise.

    Raises UnavailableError naming the process that does. The kernel frees the lock of a process that is killed.
    """
    path = Path(tempfile.gettempdir()) / f"tvm-farm-{os.getuid()}.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UnavailableError(
                f"another farm command is measuring on this machine (pid {holder})",
                "Two at once would spoil each other's results; wait for it to end.",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
