"""A coordinator as a process of its own, to be stopped and killed: `coordinator.py STORE HOST PORT KEY TTL NAME`.

It leases the board, keeps the lease, opens a session, and says so. Then it does what lines on its input say, each
answered by one JSON line: `pin HZ`, `measure LIBRARY`, `leave`.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

from device_agent.protocol import Limits, MeasureSpec, OperatingPoint, TensorSpec
from farm.connectivity.tracker import Tracker
from farm.crew.leased_board import LeaseKeeper
from farm.errors import FarmError, TransientError
from farm.measure.blocking import BlockingSession
from farm.store import Store
from farm.values import Lease

SPEC = MeasureSpec((TensorSpec((64, 64), "float32"),) * 3, limits=Limits(timeout_s=20.0, threads=1))


def acquire(store: Store, board: str, owner: str, ttl_s: float, within_s: float = 30.0) -> Lease:
    deadline = time.monotonic() + within_s
    while True:
        try:
            return store.leases.acquire(board, owner, "tuning", ttl_s=ttl_s)
        except TransientError:
            if time.monotonic() > deadline:
                raise
            select.select([], [], [], 0.02)


def say(**word: Any) -> None:
    os.write(1, (json.dumps(word) + "\n").encode())


def main() -> None:
    path, host, port, key, ttl, name = sys.argv[1:]
    board = key.partition("/")[2]
    with Store(Path(path)) as store:
        lease = acquire(store, board, name, float(ttl))
        keeper = LeaseKeeper(Path(path), lease)
        session = BlockingSession(Tracker(host, int(port)), key, lease=lease)
        say(token=lease.token)
        for line in sys.stdin:
            verb, _, argument = line.strip().partition(" ")
            try:
                if verb == "pin":
                    report = session.pin(OperatingPoint(cpu_freq_hz={"*": int(argument)}))
                    say(status=report.status, message=report.message)
                elif verb == "measure":
                    outcome = session.measure(SPEC, Path(argument).read_bytes())
                    say(status=outcome.status, message=outcome.message)
                else:
                    session.close()
                    keeper.close()
                    say(status="left")
            except FarmError as error:
                say(status=type(error).__name__, message=str(error), lost=keeper.lost.wait(10))


if __name__ == "__main__":
    main()
