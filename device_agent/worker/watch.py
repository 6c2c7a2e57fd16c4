"""The session's side of a worker: wait for its report, death or deadline; give jobs to one that outlives a run.

A kept worker creates the GPU's context once, and receives jobs after its fork. `worker.py` starts workers and
interprets the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import pickle
import select
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from device_agent import processes
from device_agent.worker import limits
from device_agent.worker.plan import Phases

# The limit on a worker's stdout and stderr, and on an exception's text.
OUTPUT_BYTES = 2000
# Without pidfd (before Linux 5.3), a death that leaves the pipes open is noticed this late.
_LOOK_S = 0.1
# How long a crashing worker may take to die after its memory was read.
_DYING_S = 1.0
# The head of a report, sent before foreign code runs: the memory limit in bytes, and the number of threads. The length
# of its frame follows.
BEGUN = struct.Struct("<2Q")
SIZE = struct.Struct("<Q")
# Loading the library, running it, or reading sensors before and after.
Stage = Literal["loading", "running", "sensing"]


class Watched(Protocol):
    """A worker: its pid, and the descriptors of its report, output and fault handler."""

    pid: int
    report: int
    output: int
    distress: int


@dataclasses.dataclass
class End:
    """How a worker ended."""

    report: bytes | None = None  # a complete frame
    status: int | None = None  # wait status; None for a process that does not die
    timed_out: bool = False
    stage: Stage = "running"  # at its deadline
    output: str = ""
    distress: str = ""  # the fault handler's report
    allowed_bytes: int = 0  # its memory limit; 0: it had not begun
    threads: int = 0  # when it began
    crashing: bool = False  # its fault handler called
    peak_bytes: int = 0  # peak memory under its limit at a crash; 0: not seen


class Watch:
    """Waits for a worker's report, death or deadline, whichever is first.

    `read_phases` reads the worker's marks. `begun_s` makes the first deadline that of the worker's preparation,
    followed by one this much later. `run_s` makes that one the deadline of the first call, followed by a last one this
    much later. `look` reads a crashing worker's memory under its limit.
    """

    def __init__(self, worker: Watched, deadline: float, read_phases: Callable[[], Phases]) -> None:
        self.run_s: float | None = None
        self.begun_s: float | None = None
        self.look: Callable[[int], int] = limits.peak_mapped_bytes
        self.alone = False
        self._read_phases = read_phases
        self._pid = worker.pid
        self._report, self._output, self._distress = worker.report, worker.output, worker.distress
        self._deadline = deadline
        self._end = End()
        self._received = {each: bytearray() for each in (self._report, self._output, self._distress)}

    def run(self) -> End:
        """Wait; return what is known then. `alone` is whether no other process of it is left."""
        end = self._end
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            for fd in (self._report, self._output, self._distress):
                poll.register(fd, select.POLLIN)
            look_s = _LOOK_S
            with contextlib.suppress(AttributeError, OSError):
                pidfd = os.pidfd_open(self._pid)
                stack.callback(os.close, pidfd)
                poll.register(pidfd, select.POLLIN)
                look_s = 3600.0
            while end.report is None and not processes.has_ended(self._pid):
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    if self._goes_on():
                        continue
                    end.timed_out = not end.crashing
                    end.stage = _find_stage(self._read_phases())
                    break
                for fd, _ in poll.poll(min(left_s, look_s) * 1000):
                    if fd == self._distress:
                        self._look_at_memory()
                    if fd in (self._report, self._output, self._distress) and not self._read(fd):
                        poll.unregister(fd)
            for fd in (self._report, self._output):
                while self._read(fd):
                    pass
        others = [pid for pid in processes.find_children() if pid not in processes.SPARED | {self._pid}]
        self.alone = not processes.find_children(self._pid) and not others
        return end

    def finish(self) -> End:
        """Kill the worker's process group; return how it ended."""
        end = self._end
        processes.kill_group(self._pid)
        if end.report is not None and self.alone:
            return end  # its memory is freed while the answer travels; `_run` reaps it before the next worker
        end.status = processes.reap(self._pid, time.monotonic() + processes.KILL_TIMEOUT_S)
        processes.kill_children()
        end.output = self._received[self._output].decode(errors="replace").strip()
        end.distress = self._received[self._distress].decode(errors="replace")
        return end

    def _goes_on(self) -> bool:
        """Whether the passed deadline was for preparing or loading, and the worker had met it.

        This process may be late itself: the worker's marks are in the pipe.
        """
        deadline = self._deadline
        if self.begun_s is not None:
            self._read(self._report)
            if self._deadline > deadline:
                return True
        run_s, self.run_s = self.run_s, None
        started_s = self._read_phases().running_s
        if run_s is None or self._end.crashing or not started_s:
            return False
        self._deadline = started_s + run_s
        return True

    def _look_at_memory(self) -> None:
        """Record a crashing worker's memory; it waits until the distress socket is read."""
        if not self._end.crashing:
            self._end.crashing = True
            self._end.peak_bytes = self.look(self._pid)
            self._deadline = min(self._deadline, time.monotonic() + _DYING_S)

    def _read(self, fd: int) -> bool:
        """Read what is available; return False at its end."""
        try:
            data = os.read(fd, 1 << 20)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the process died with unread bytes in the distress socket
            return False
        self._received[fd] += data
        if fd == self._report:
            self._parse_report()
        elif fd == self._output:
            del self._received[fd][:-OUTPUT_BYTES]
        else:
            del self._received[fd][OUTPUT_BYTES:]
        return bool(data)

    def _parse_report(self) -> None:
        received, end, start = self._received[self._report], self._end, BEGUN.size + SIZE.size
        if len(received) >= BEGUN.size:
            end.allowed_bytes, end.threads = BEGUN.unpack_from(received)
            begun_s, self.begun_s = self.begun_s, None
            if begun_s is not None and end.allowed_bytes:
                self._deadline = time.monotonic() + begun_s
        if len(received) >= start:
            (size,) = SIZE.unpack_from(received, BEGUN.size)
            if len(received) >= start + size:
                end.report = bytes(memoryview(received)[start : start + size])


def _find_stage(phases: Phases) -> Stage:
    """The stage of a worker with these marks."""
    if phases.running_s and not phases.cpu_s:
        return "running"
    return "sensing" if phases.loaded_s else "loading"


# The name of a job's file, as sent to the worker.
_NAME_BYTES = 8
# A worker is replaced after so many jobs, which ends what it accumulates (driver code, TVM's workspaces).
MOST_JOBS = 64
# A worker that keeps more than this share of a job's memory, beyond the first job's rest, is replaced.
MOST_GATHERED = 0.5


class Orders:
    """Jobs from a session to a worker forked from it: files in `folder`, named over a pipe.

    Objects that both have from before the fork (`shared`) are not copied.
    """

    def __init__(self, folder: Path, shared: tuple[object, ...]) -> None:
        self._folder, self._shared = folder, shared
        self._numbers = itertools.count(1)
        self._sent: Path | None = None
        self.reading, self.writing = os.pipe()

    def close(self, *ends: int) -> None:
        """Close these ends of the pipe, or both."""
        for end in ends or (self.reading, self.writing):
            with contextlib.suppress(OSError):
                os.close(end)

    def send(self, job: Callable[[], bytes], *more: Any) -> None:
        """Send the worker a job and its parameters. Raises OSError if it is gone, or the disk is full.

        Call `clear` once the job has ended in any way.
        """
        name = f"{next(self._numbers):0{_NAME_BYTES}}"
        buffer = io.BytesIO()
        _Pickler(buffer, self._shared).dump((job, *more))
        self._sent = self._folder / f"job-{name}"
        self._sent.write_bytes(buffer.getvalue())
        os.write(self.writing, name.encode())

    def clear(self) -> None:
        """Remove a job that no worker took."""
        if self._sent is not None:
            self._sent.unlink(missing_ok=True)

    def receive(self) -> tuple[Any, ...] | None:
        """The next job with its parameters; None at the end. Raises OSError."""
        name = os.read(self.reading, _NAME_BYTES).decode()
        if not name:
            return None
        path = self._folder / f"job-{name}"
        data = path.read_bytes()
        path.unlink()
        found: tuple[Any, ...] = _Unpickler(io.BytesIO(data), self._shared).load()
        return found


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = {id(each): at for at, each in enumerate(shared)}

    def persistent_id(self, obj: object) -> int | None:
        return self._places.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: tuple[object, ...]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: int) -> object:
        return self._shared[pid]
