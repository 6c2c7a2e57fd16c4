"""Logs of boards on the terminal, as others wrote them: the last lines of a file of this machine, and what comes."""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from pathlib import Path

from farm.cli import output
from farm.errors import UnavailableError
from farm.processes.home_log import Follower

_LOOK_S = 0.25


def print_log(path: Path, lines: int, follow: bool) -> None:
    """Print the last lines of a log, and with `follow` what comes until Ctrl-C. Raises UnavailableError without one."""
    # Before the end is read: what is written in between comes twice rather than never.
    follower = Follower(path) if follow else None
    try:
        with path.open("rb") as file:
            tail = collections.deque(file, lines)
    except FileNotFoundError:
        raise UnavailableError(
            f"there is no log yet: {path}", "The agent has not been started; see `farm up`."
        ) from None
    pass_on(b"".join(tail), b"")
    if follower is None:
        return
    with contextlib.closing(follower), contextlib.suppress(KeyboardInterrupt):
        pause = threading.Event()
        while not pause.wait(_LOOK_S):
            pass_on(b"".join(follower.read()), b"")


def pass_on(out: bytes, err: bytes) -> None:
    """Print what others wrote, both streams; to a terminal as text that it does not obey."""
    for stream, data in ((sys.stdout, out), (sys.stderr, err)):
        if data:
            output.to_stream(stream, data)
