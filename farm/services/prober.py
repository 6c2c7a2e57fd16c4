"""`python -m farm.services.prober`: the child process that probes boards. It talks TVM's RPC, so that a client that
blocks or crashes takes nobody with it, and loads TVM's runtime alone.

Requests come as JSON lines on stdin, `{"id": 7, "board": "nano-01"}`; for each there is one answer on stdout, a
`ProbeReport` with the same id, in whatever order they finish. What a probe does is in `probe`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from farm.connectivity.tracker import Tracker
from farm.crew import golden_runs
from farm.errors import FarmError
from farm.inventory.board_types import load_board_types
from farm.processes import log_lines
from farm.search.build.golden import GoldenKernels
from farm.services.probe import Prober, ProbeReport
from farm.services.probe_plan import MOST_AT_ONCE
from farm.settings import StoreLocation, parse_store
from farm.store import Store

# Under FARM_HOME.
# What is under way when we are told to end may do so first; then its lease is given back without it.
END_TIMEOUT_S = 4.0
_MAX_LINE_BYTES = 1 << 16
_LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)
Request = tuple[Any, str]


class Worker:
    """Answers requests from a queue on a thread of its own, with a store of its own, one after the other."""

    def __init__(
        self, prober: Prober, store: StoreLocation, requests: queue.SimpleQueue[Request | None], output: Answers
    ) -> None:
        """`store` is where the farm's store is; None in `requests` is the end."""
        self._prober, self._location, self._requests, self._output = prober, store, requests, output
        self._store: Store | None = None
        self.thread = threading.Thread(target=self._work, name="farm-probe", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            while (request := self._requests.get()) is not None:
                number, name = request
                try:
                    if self._store is None:
                        self._store = stack.enter_context(Store(self._location))
                    report = self._prober.probe(self._store, name)
                except FarmError as error:  # the store cannot be opened, or not be read
                    report = ProbeReport(name, skipped=True, reason=str(error))
                except Exception as error:  # noqa: BLE001 - the process's edge: a bad probe must not end the others
                    _log.exception("probing %s", name, extra={"board": name})
                    report = ProbeReport(name, skipped=True, reason=f"a bug of the farm's: {error!r}")
                _log.info(
                    "%s: %s in %.2f s %s",
                    name,
                    report.kind or "skipped",
                    report.seconds,
                    report.reason or report.health,
                    extra={"board": name},
                )
                self._output.say({"id": number, **report.to_dict()})


class Answers:
    """Writes JSON lines from any thread."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def say(self, document: dict[str, Any]) -> None:
        """One line. That nobody reads any more is noticed elsewhere."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._file.write(json.dumps(document).encode() + b"\n")
            self._file.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Probe until stdin ends, the parent dies or SIGTERM comes. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m farm.services.prober")
    parser.add_argument("--home", type=Path, required=True, help="FARM_HOME")
    parser.add_argument("--store", type=parse_store, required=True, help="path or URL of the store")
    parser.add_argument("--tracker", type=_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--threads", type=int, default=MOST_AT_ONCE)
    options = parser.parse_args(argv)
    log_lines.start_log("prober", None)
    # Descriptor 1 is for answers alone, whatever TVM or a child prints.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        prober = Prober(
            tracker=Tracker(*options.tracker),
            kernels=GoldenKernels(options.home / golden_runs.KERNEL_FOLDER),
            board_types=load_board_types(),
            owner=f"probe@{socket.gethostname()}:{os.getpid()}",
        )
    except FarmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    answers = Answers(output)
    workers = [Worker(prober, options.store, requests, answers) for _ in range(max(1, min(options.threads, 16)))]
    with _told_to_end() as end:
        for line in _read_lines(sys.stdin.fileno(), end):
            if (request := _parse(line)) is not None:
                requests.put(request)
    if not _finish(workers, requests):
        _give_back(prober, options.store)
        # A thread that waits in TVM's client would keep the interpreter from ending.
        logging.shutdown()
        os._exit(0)
    return 0


def _finish(workers: Sequence[Worker], requests: queue.SimpleQueue[Request | None]) -> bool:
    """Drop what has not begun, and let what has end for a moment; returns whether all of it did."""
    with contextlib.suppress(queue.Empty):
        while True:
            requests.get_nowait()
    for _ in workers:
        requests.put(None)
    deadline = time.monotonic() + END_TIMEOUT_S
    for worker in workers:
        worker.thread.join(max(0.0, deadline - time.monotonic()))
    return not any(worker.thread.is_alive() for worker in workers)


def _give_back(prober: Prober, store_location: StoreLocation) -> None:
    """Give back the leases of probes that do not end; our own end hangs up on their boards."""
    try:
        with Store(store_location) as store:
            for lease in list(prober.leases.values()):
                store.release_lease(lease)
    except FarmError as error:
        _log.warning("leases are left to expire: %s", error)


@contextlib.contextmanager
def _told_to_end() -> Iterator[int]:
    """A descriptor that can be read once SIGTERM or SIGINT has come; the first also comes when the parent dies."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def tell(*_: object) -> None:
        with contextlib.suppress(OSError):
            os.write(writer, b"x")

    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before that
        tell()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def _read_lines(stdin: int, end: int) -> Iterator[bytes]:
    """Lines of `stdin` until it ends or `end` can be read."""
    poll = select.poll()
    for fd in (stdin, end):
        poll.register(fd, select.POLLIN)
    kept = b""
    while True:
        ready = {fd for fd, _ in poll.poll(_LOOK_S * 1000)}
        if end in ready:
            return
        if not ready:
            continue
        data = os.read(stdin, 1 << 16)
        if not data:
            return
        *lines, kept = (kept + data).split(b"\n")
        yield from lines
        if len(kept) > _MAX_LINE_BYTES:
            _log.error("a request of more than %d bytes: this is no parent of ours", _MAX_LINE_BYTES)
            return


def _parse(line: bytes) -> Request | None:
    try:
        document = json.loads(line)
        return document["id"], str(document["board"])
    except (ValueError, LookupError, TypeError):
        _log.warning("not a request: %r", line[:200])
        return None


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


if __name__ == "__main__":
    sys.exit(main())
