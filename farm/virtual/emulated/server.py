"""The emulator's process: a child per connection holds one library and calls its functions on request.

`python -m farm.virtual.emulated --socket PATH --natives FOLDER`. Messages are lines of JSON (`client.py`); tensors are
in memory that the client shares. A child ends with its connection, also during a call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import select
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from device_agent import processes
from device_agent.worker import limits
from farm.virtual.emulated.elf import ElfError
from farm.virtual.emulated.estimate import LINE_BYTES, Estimator, Misses
from farm.virtual.emulated.machine import CapError, FaultError, Machine, MissingError, Tensor
from farm.virtual.emulated.pipeline import Pipeline

_MOST_MESSAGE = 1 << 20
# So many instructions of each call go through the cache simulation; the rest is extrapolated.
_WATCHED = 3_000_000
# Memory for translated code and counters.
_EMULATOR_BYTES = 3 << 30
_ENDED_BY = {CapError: "cap", FaultError: "fault", MissingError: "missing", ElfError: "missing", MemoryError: "memory"}


def main() -> None:
    """Serve until a signal or the parent's end."""
    parser = argparse.ArgumentParser(prog="farm.virtual.emulated", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--socket", required=True)
    parser.add_argument("--natives", type=Path, required=True)
    parser.add_argument("--exit-with-parent", action="store_true")
    options = parser.parse_args()
    if options.exit_with_parent:
        processes.die_with_parent(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(options.socket)
        Path(options.socket).chmod(0o600)
        listener.listen(16)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _live(connection, options.natives)
            connection.close()


def _live(connection: socket.socket, natives: Path) -> None:
    """Run a child; leaves by os._exit."""
    code = 1
    with contextlib.suppress(BaseException):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        processes.die_with_parent(os.getppid())
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        _serve(connection, natives)
        code = 0
    os._exit(code)


def _serve(connection: socket.socket, natives: Path) -> None:
    stream = connection.makefile("rb")
    message, descriptors, _, _ = socket.recv_fds(connection, 1, 1)  # the shared memory comes with the first byte
    order = json.loads(message + stream.readline(_MOST_MESSAGE))
    limits.allow(order["library_bytes"] + 2 * (order["shared_bytes"] + order["heap_bytes"]) + _EMULATOR_BYTES)
    try:
        held = _Held(order, stream.read(order["library_bytes"]), descriptors[0], natives)
    except (ElfError, MissingError, OSError, KeyError) as error:
        _answer(connection, {"status": "missing", "message": str(error)})
        return
    _answer(connection, {"status": "ok", "functions": held.machine.functions})
    while line := stream.readline(_MOST_MESSAGE):
        _answer(connection, held.call(json.loads(line)))


def _end_with(connection: socket.socket) -> None:
    """End this process when the client is gone, also during a call."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


class _Held:
    """A library in two machines, and its core.

    One machine runs it for outputs and counts. The other simulates the caches for a part of each call, on a copy of the
    memory; both take about as long and run in parallel.
    """

    def __init__(self, order: dict[str, Any], library: bytes, descriptor: int, natives: Path) -> None:
        core, size = order["core"], order["shared_bytes"]
        shared = mmap.mmap(descriptor, size)
        self._copy = mmap.mmap(descriptor, size, mmap.MAP_PRIVATE)
        os.close(descriptor)
        rest = (order["tasks"], order["heap_bytes"], core["architecture"])
        self.machine = Machine(library, natives, shared, *rest)
        self._watched = Machine(library, natives, self._copy, *rest, core["caches"])
        self._second_bytes = int(core["caches"][2])
        waits = (core["wait_cycles"], core["crowding"])
        self._estimator = Estimator(Pipeline(core["pipeline"]), *waits, core["math_cycles"])

    def call(self, order: dict[str, Any]) -> dict[str, Any]:
        """Call a function; return its outcome, and its cost if that is `counted`."""
        tensors = [Tensor(each[0], tuple(each[1]), each[2], each[3]) for each in order["tensors"]]
        watching = threading.Thread(target=self._watch, args=(order, tensors))
        if order["counted"]:
            watching.start()
        try:
            instructions = self.machine.call(order["entry"], tensors, order["cap"], first_only=order["first_only"])
        except tuple(_ENDED_BY) as error:
            return {"status": _ENDED_BY[type(error)], "message": str(error)}
        finally:
            if order["counted"]:
                watching.join()
        if not order["counted"]:
            return {"status": "ok", "instructions": instructions, "segments": []}
        misses = self._extrapolate()
        most_lines = self._count_lines(tensors, order["warm"])
        segments = self._estimator.estimate(
            self.machine.blocks(), misses, self.machine.tasks, most_lines, first_only=order["first_only"]
        )
        return {
            "status": "ok",
            "instructions": instructions,
            "segments": [[each.cycles, each.lines, each.all_cycles, each.all_lines] for each in segments],
            "heap_bytes": self.machine.heap_peak_bytes,
        }

    def _watch(self, order: dict[str, Any], tensors: list[Tensor]) -> None:
        """Simulate the caches over the first instructions of each region's first task. The other machine reports
        errors.

        It reads the inputs, which stay constant, and its own private outputs.
        """
        for index in order["warm"]:
            self._watched.warm(tensors[index])
        with contextlib.suppress(*_ENDED_BY):
            self._watched.call(order["entry"], tensors, min(order["cap"], _WATCHED), first_only=True)
        self._copy.madvise(mmap.MADV_DONTNEED)  # drop its writes
        for each in tensors[-1:]:  # the whole output is in L2, not only the first task's part
            self._watched.warm(each)

    def _extrapolate(self) -> list[Misses]:
        """Extrapolate each lane's misses from those of the simulated lane of its region."""
        tasks = self.machine.tasks
        counted, seen = self.machine.count_by_lane().astype(float), self._watched.count_by_lane().astype(float)
        missed = self._watched.missed.astype(float)
        overall = missed.sum(axis=0) / max(1.0, seen.sum())
        found = []
        for lane, calls in enumerate(self.machine.math_calls):
            first = lane and lane - (lane - 1) % tasks
            rate = missed[first] / seen[first] if seen[first] else overall
            first_lines, second_lines = (round(each * counted[lane]) for each in rate)
            found.append(Misses(first_lines, second_lines, int(calls)))
        return found

    def _count_lines(self, tensors: list[Tensor], warm: list[int]) -> int:
        """Count the lines that a call reads and writes, without those in L2 at the start."""
        sizes = [each.size_bytes for each in tensors]
        held = min(self._second_bytes, sum(sizes[index] for index in set(warm)))
        return (sum(sizes) + self.machine.heap_peak_bytes - held) // LINE_BYTES
