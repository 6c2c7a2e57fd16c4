"""Run one candidate or model in a process of its own, and say how that ended.

The session forks a worker per call, waits with a deadline, kills whatever is left, and turns its end into an
Outcome. What the worker does meanwhile is in `timing.py` and `engines.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from device_agent import arguments, engines, gpu, limits, processes, protocol, timing
from device_agent.errors import AgentError
from device_agent.marks import Phases
from device_agent.plan import OverrunError, Plan
from device_agent.protocol import Limits, Outcome, Status

# Runs in the session while a worker runs: the power sampler.
Beside = Callable[[], contextlib.AbstractContextManager[object]]

# What is kept of a worker's stdout and stderr, and of an exception's text.
_OUTPUT_BYTES = 2000
# Where the kernel has no pidfd (before 5.3), a death that leaves the pipes open is noticed this late.
_LOOK_S = 0.1
# How long a crashing worker may take to die once its memory has been looked at.
_DYING_S = 1.0
# A report starts with the address space allowed, sent before anything foreign runs; the length of its frame follows.
_SIZE = struct.Struct("<Q")
# Loading what it was given, running it, or reading sensors before and after that.
_Stage = Literal["loading", "running", "sensing"]
# A crash this close to the limit (a quarter of what was granted) is blamed on memory: the allocation that failed is
# not counted in the peak.
_NEAR_LIMIT = 0.25


@dataclasses.dataclass
class _End:
    """How a worker ended."""

    report: bytes | None = None  # a complete frame
    status: int | None = None  # wait status; None for a process that does not die
    timed_out: bool = False
    stage: _Stage = "running"  # what it did when its deadline came
    output: str = ""
    distress: str = ""  # what its fault handler wrote
    allowed_bytes: int = 0
    crashing: bool = False  # it called for us from its fault handler
    peak_bytes: int = 0  # the most it had mapped when it crashed; 0: not seen


def measure(spec: protocol.MeasureSpec, library: bytes, folder: Path, plan: Plan, beside: Beside) -> Outcome:
    """Time the candidate in `library` (a linked shared object). Never raises for what the candidate does.

    `beside` is entered once the worker is forked, and left before anything else is.
    """
    path = folder / "candidate.so"

    def job() -> bytes:
        path.write_bytes(library)
        return protocol.pack_frame(timing.time_candidate(spec, path, plan).to_json(), b"")

    try:
        return _run(job, spec.limits, plan, beside)[0]
    finally:
        path.unlink(missing_ok=True)


def run_model(
    spec: protocol.RunSpec, program: bytes, inputs: bytes, folder: Path, plan: Plan, beside: Beside
) -> tuple[Outcome, bytes]:
    """Run `program` on the arrays in the npz `inputs`; return the outcome and an npz of the outputs."""
    path = folder / ("program.onnx" if spec.engine is protocol.Engine.ONNXRUNTIME else "program.so")

    def job() -> bytes:
        path.write_bytes(program)
        return engines.run_program(spec, path, inputs, plan)

    try:
        return _run(job, spec.limits, plan, beside)
    finally:
        path.unlink(missing_ok=True)


def _run(job: Callable[[], bytes], allowed: Limits, plan: Plan, beside: Beside) -> tuple[Outcome, bytes]:
    """Run `job`, which returns a frame of an Outcome and its payload, in a worker."""
    started_at = time.time()
    payload = b""
    processes.kill_children()
    if processes.has_started_threads():
        outcome = Outcome(
            Status.FARM_ERROR,
            "code loaded straight into this session has started threads, so no worker can be forked from it; "
            "measure in a session of its own",
        )
    else:
        try:
            outcome, payload = _judge(_supervise(job, allowed, plan, beside), allowed)
        except OSError as error:
            outcome = Outcome(Status.FARM_ERROR, f"the board cannot start a worker: {error}")
    return dataclasses.replace(outcome, started_at=started_at), payload


def _supervise(job: Callable[[], bytes], allowed: Limits, plan: Plan, beside: Beside) -> _End:
    """Fork a worker for `job`, collect what it says, and leave nothing of it behind."""
    plan.marks.clear()
    first_s = allowed.timeout_s if allowed.load_timeout_s is None else allowed.load_timeout_s
    deadline = time.monotonic() + first_s + plan.extra_s
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as workers:
        report, workers_report = _pipe(ours, workers)
        output, workers_output = _pipe(ours, workers)
        distress, workers_distress = socket.socketpair()
        ours.callback(distress.close)
        workers.callback(workers_distress.close)
        pid = processes.fork(lambda: _work(job, allowed, plan.cpus, workers_report, workers_output, workers_distress))
        workers.close()  # so that the worker's death is an end of file here
        for fd in (report, output, distress.fileno()):
            os.set_blocking(fd, False)
        with beside():
            watch = _Watch(pid, report, output, distress.fileno(), deadline, plan.marks.read)
            if allowed.load_timeout_s is not None:
                watch.run_s = allowed.timeout_s + plan.extra_s
            return watch.run()


def _pipe(ours: contextlib.ExitStack, workers: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe to us from the worker, each end closed with its stack."""
    read, write = os.pipe()
    ours.callback(os.close, read)
    workers.callback(os.close, write)
    return read, write


class _Watch:
    """Waits for a worker's report, death or deadline, whichever comes first.

    `read_phases` gives the worker's notes. With `run_s` the deadline is one for the candidate's first call, and so long
    after that comes the next.
    """

    def __init__(
        self,
        pid: int,
        report: int,
        output: int,
        distress: int,
        deadline: float,
        read_phases: Callable[[], Phases],
    ) -> None:
        self.run_s: float | None = None
        self._read_phases = read_phases
        self._pid = pid
        self._report, self._output, self._distress = report, output, distress
        self._deadline = deadline
        self._end = _End()
        self._received = {report: bytearray(), output: bytearray(), distress: bytearray()}

    def run(self) -> _End:
        """Wait; kill the worker's process group; say how it ended."""
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
        alone = not processes.find_children(self._pid) and processes.find_children() == [self._pid]
        processes.kill_group(self._pid)
        if end.report is not None and alone:
            return end  # its memory is taken down while the answer travels; `_run` reaps it before the next worker
        end.status = processes.reap(self._pid, time.monotonic() + processes.KILL_TIMEOUT_S)
        processes.kill_children()
        end.output = self._received[self._output].decode(errors="replace").strip()
        end.distress = self._received[self._distress].decode(errors="replace")
        return end

    def _goes_on(self) -> bool:
        """Whether it was the deadline for loading that passed, and the worker had kept it."""
        run_s, self.run_s = self.run_s, None
        started_s = self._read_phases().running_s
        if run_s is None or self._end.crashing or not started_s:
            return False
        self._deadline = started_s + run_s
        return True

    def _look_at_memory(self) -> None:
        """Note how much a crashing worker has mapped; it waits for us to read from the distress socket."""
        if not self._end.crashing:
            self._end.crashing = True
            self._end.peak_bytes = limits.peak_mapped_bytes(self._pid)
            self._deadline = min(self._deadline, time.monotonic() + _DYING_S)

    def _read(self, fd: int) -> bool:
        """Read what there is; return False when there is no more for now or for good."""
        try:
            data = os.read(fd, 1 << 20)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the distress socket of a process that died with our bytes unread
            return False
        self._received[fd] += data
        if fd == self._report:
            self._parse_report()
        elif fd == self._output:
            del self._received[fd][:-_OUTPUT_BYTES]
        else:
            del self._received[fd][_OUTPUT_BYTES:]
        return bool(data)

    def _parse_report(self) -> None:
        received = self._received[self._report]
        if len(received) >= _SIZE.size:
            (self._end.allowed_bytes,) = _SIZE.unpack_from(received)
        if len(received) >= 2 * _SIZE.size:
            (size,) = _SIZE.unpack_from(received, _SIZE.size)
            if len(received) >= 2 * _SIZE.size + size:
                self._end.report = bytes(memoryview(received)[2 * _SIZE.size : 2 * _SIZE.size + size])


def _work(
    job: Callable[[], bytes], allowed: Limits, cpus: tuple[int, ...], report: int, output: int, distress: socket.socket
) -> None:
    """The life of a worker process, from the fork to its report."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    _close_all_but({0, 1, 2, report, distress.fileno()})  # above all the client's connection
    try:
        os.write(report, _SIZE.pack(limits.apply(allowed, cpus)))
        limits.hold_when_crashing(distress)
        frame = job()
    except Exception as error:  # noqa: BLE001  the edge of a process: what the candidate raises is its outcome
        frame = protocol.pack_frame(_judge_exception(error).to_json(), b"")
    left = memoryview(_SIZE.pack(len(frame)) + frame)
    while left:
        left = left[os.write(report, left) :]


def _close_all_but(kept: set[int]) -> None:
    """Close what was inherited. Its numbers stay taken: an inherited object that is closed later must not hit a file
    that has its number by then.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {*kept, nothing}:
            os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


def _find_stage(phases: Phases) -> _Stage:
    """What a worker with these notes is doing."""
    if phases.running_s and not phases.cpu_s:
        return "running"
    return "sensing" if phases.loaded_s else "loading"


def _judge_exception(error: Exception) -> Outcome:
    """The outcome of a job that raised."""
    text = str(error)[:_OUTPUT_BYTES]
    if status := gpu.find_status(text):
        return Outcome(status, text + gpu.find_consequence(text))
    if isinstance(error, timing.LoadError):
        return Outcome(Status.LOAD_FAILED, text)
    if isinstance(error, OverrunError):
        return Outcome(Status.RUN_TIMEOUT, text)
    if isinstance(error, MemoryError) or "bad_alloc" in text:
        return Outcome(Status.OUT_OF_MEMORY, f"an allocation failed at the worker's limit: {text}")
    if isinstance(error, arguments.UnknownDtypeError | protocol.ProtocolError | AgentError | OSError):
        return Outcome(Status.FARM_ERROR, f"{type(error).__name__}: {text}")
    return Outcome(Status.CRASHED, f"the candidate raised {type(error).__name__}: {text}")


def _judge(end: _End, allowed: Limits) -> tuple[Outcome, bytes]:
    """The outcome of a worker's end, and the payload of its report."""
    if end.report is not None:
        try:
            text, payload = protocol.unpack_frame(end.report)
            return Outcome.from_json(text), payload
        except protocol.ProtocolError as error:
            return Outcome(Status.CRASHED, f"the worker's report was overwritten: {error}"), b""
    said = f"; it last wrote: {end.output}" if end.output else ""
    if end.timed_out or end.status is None:
        stuck = "" if end.status is not None else "; its process does not die (a driver may be stuck)"
        if end.stage == "sensing" and end.status is not None:
            return Outcome(Status.FARM_ERROR, "the board's own sensors could not be read in time"), b""
        if end.stage == "loading" and allowed.load_timeout_s is not None:
            return Outcome(Status.LOAD_FAILED, f"not loaded within {allowed.load_timeout_s:g} s{stuck}{said}"), b""
        while_loading = "; nothing of it had been called yet" if end.stage == "loading" else ""
        message = f"not finished after {allowed.timeout_s:g} s{while_loading}{stuck}{said}"
        return Outcome(Status.RUN_TIMEOUT, message), b""
    if not os.WIFSIGNALED(end.status):
        code = os.waitstatus_to_exitcode(end.status)
        return Outcome(Status.CRASHED, f"the candidate ended its process itself, exit code {code}{said}"), b""
    name: str | None = processes.signal_name(os.WTERMSIG(end.status))
    if name == "SIGKILL" and end.crashing:  # our own: it hung in its fault handler
        name = limits.find_reported_signal(end.distress)
    elif name == "SIGKILL":
        message = f"killed by the kernel: the board ran out of memory{said}"
        return Outcome(Status.OUT_OF_MEMORY, message, signal=name), b""
    at_limit = end.peak_bytes > end.allowed_bytes - _NEAR_LIMIT * allowed.memory_bytes > 0
    if at_limit or "bad_alloc" in end.output:
        message = f"crashed ({name}) at its limit of {allowed.memory_bytes} bytes{said}"
        return Outcome(Status.OUT_OF_MEMORY, message, signal=name), b""
    return Outcome(Status.CRASHED, f"killed by {name}{said}", signal=name), b""
