"""Ports for the servers that tests start: loopback only, and none that the kernel gives to a connection going out.

A port is looked up here and bound by a process that has yet to start. Were it one of those that any `connect` or
`bind(0)` is given, another process would have it by then once in a few thousand times.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import socket
from collections.abc import Iterator

_FIRST = 10000  # below are the ports of well-known services
_PER_PROCESS = 97  # where the next process of a run begins; prime, so that two runs rarely go in step
_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")


def find_free_port() -> int:
    """A port of the loopback interface that nothing listens on now, and that this process has not given out lately."""
    for port in _candidates():
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("every port is taken")


def _candidates() -> Iterator[int]:
    ports, count = _ports(os.getpid())
    return itertools.islice(ports, count)


@functools.cache
def _ports(process: int) -> tuple[Iterator[int], int]:
    """The ports in the order in which this process gives them out, for ever, and how many there are."""
    low = int(_RANGE.read_text().split()[0])
    last = low if low > _FIRST + 1000 else 65536  # where nearly all are given to connections, any of them
    count = last - _FIRST
    start = process * _PER_PROCESS % count
    return (_FIRST + (start + step) % count for step in itertools.count()), count
