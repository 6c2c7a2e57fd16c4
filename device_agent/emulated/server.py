"""The emulator's process: for each connection a child that holds one library and calls its functions when told to.

`python -m device_agent.emulated --socket PATH --natives FOLDER`. Messages are a line of JSON each (`client.py`);
tensors lie in memory that the client shares. A child that is left alone in a call ends.
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
from device_agent.emulated.elf import ElfError
from device_agent.emulated.machine import CapError, FaultError, Machine, MissingError, Tensor
from device_agent.emulated.pipeline import Pipeline
from device_agent.emulated.price import LINE_BYTES, Misses, Pricer
from device_agent.worker import limits

_MOST_MESSAGE = 1 << 20
# Of each call so many instructions are followed through the caches; the others are taken to be alike.
_WATCHED = 3_000_000
# What the emulator keeps of translated code, and counts.
_EMULATOR_BYTES = 3 << 30
_ENDED_BY = {CapError: "cap", FaultError: "fault", MissingError: "missing", ElfError: "missing", MemoryError: "memory"}


def main() -> None:
    """Serve until a signal ends it, or the parent's end."""
    parser = argparse.ArgumentParser(prog="device_agent.emulated", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--socket", required=True)
    parser.add_argument("--natives", type=Path, required=True)
    parser.add_argument("--exit-with-parent", action="store_true")
    options = parser.parse_args()
    if options.exit_with_parent:
        processes.die_with_parent(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are nobody's business once they have ended
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
    """A child's life; leaves by os._exit."""
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
    """End this process as soon as the client is gone, also in the middle of a call."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


class _Held:
    """A library in two machines, and what its core is.

    One runs it for its outputs and counts; the other one follows memory, in a copy, for a part of each call, at the
    same time: it takes as long.
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
        self._pricer = Pricer(Pipeline(core["pipeline"]), *waits, core["math_cycles"])

    def call(self, order: dict[str, Any]) -> dict[str, Any]:
        """One call, and what it came to."""
        tensors = [Tensor(each[0], tuple(each[1]), each[2], each[3]) for each in order["tensors"]]
        watching = threading.Thread(target=self._watch, args=(order, tensors))
        watching.start()
        try:
            instructions = self.machine.call(order["entry"], tensors, order["cap"], first_only=order["first_only"])
        except tuple(_ENDED_BY) as error:
            return {"status": _ENDED_BY[type(error)], "message": str(error)}
        finally:
            watching.join()
        misses = self._extrapolate()
        most_lines = self._count_lines(tensors, order["warm"])
        segments = self._pricer.price(
            self.machine.blocks(), misses, self.machine.tasks, most_lines, first_only=order["first_only"]
        )
        return {
            "status": "ok",
            "instructions": instructions,
            "segments": [[each.cycles, each.lines, each.all_cycles, each.all_lines] for each in segments],
            "heap_bytes": self.machine.heap_peak_bytes,
        }

    def _watch(self, order: dict[str, Any], tensors: list[Tensor]) -> None:
        """Follow the first instructions of each region's first task. What goes wrong will go wrong once more.

        It sees inputs, which nobody changes, and of outputs what it wrote itself, whatever is written beside it.
        """
        for index in order["warm"]:
            self._watched.warm(tensors[index])
        with contextlib.suppress(*_ENDED_BY):
            self._watched.call(order["entry"], tensors, min(order["cap"], _WATCHED), first_only=True)
        self._copy.madvise(mmap.MADV_DONTNEED)  # what it wrote
        for each in tensors[-1:]:  # all of the output is there, not only the first task's
            self._watched.warm(each)

    def _extrapolate(self) -> list[Misses]:
        """What each lane lacked, if its instructions lack as much as those of its region that were followed."""
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
        """Lines of all that a call reads and writes, but for what the second cache holds at first."""
        sizes = [each.size_bytes for each in tensors]
        held = min(self._second_bytes, sum(sizes[index] for index in set(warm)))
        return (sum(sizes) + self.machine.heap_peak_bytes - held) // LINE_BYTES
