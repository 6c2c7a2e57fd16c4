"""Run one candidate or model in a process of its own, and turn its end into an Outcome.

The session forks a worker per call, waits with a deadline and kills what is left. A worker for GPU code is reused while
its outcomes are ok. `timing.py` and `engines.py` run inside the worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from device_agent import processes, protocol
from device_agent.errors import AgentError
from device_agent.platforms import gpu
from device_agent.protocol import Limits, Outcome, Status
from device_agent.worker import arguments, engines, limits, program, timing
from device_agent.worker.plan import LoadError, Marks, OverrunError, Plan
from device_agent.worker.watch import BEGUN, MOST_GATHERED, MOST_JOBS, OUTPUT_BYTES, SIZE, End, Orders, Watch

# Runs in the session while a worker runs: the power sampler.
Beside = Callable[[], contextlib.AbstractContextManager[object]]
_Spec = protocol.MeasureSpec | protocol.RunSpec
# Limits a new worker; returns its memory limit in bytes.
_Begin = Callable[[Limits, tuple[int, ...]], int]

# A crash this close to the limit (a quarter of it, and at least malloc's minimal request) is blamed on memory: the
# failed allocation is not in the peak.
_NEAR_LIMIT, _NEAR_BYTES = 0.25, 1 << 20


class Workers:
    """The workers of one session, one at a time, with their files in `folder`.

    A worker for GPU code is reused after an ok outcome, to save the driver's start, and killed after any other.
    `shared` are objects that a plan refers to, and that workers inherit at the fork.
    """

    def __init__(self, folder: Path, shared: tuple[object, ...]) -> None:
        self._folder, self._shared = folder, shared
        self._numbers = itertools.count(1)
        self._kept: _Worker | None = None

    def measure(self, spec: protocol.MeasureSpec, library: bytes, plan: Plan, beside: Beside) -> Outcome:
        """Time the candidate in `library` (a linked shared object). Never raises for the candidate's behaviour.

        `beside` is entered after the fork, and left first.
        """
        with self._file("candidate", "so") as path:
            return self._run(functools.partial(_time_candidate, spec, library, path, plan), spec, plan, beside)[0]

    def run_model(
        self, spec: protocol.RunSpec, program: bytes, inputs: bytes, plan: Plan, beside: Beside
    ) -> tuple[Outcome, bytes]:
        """Run `program` on the arrays in the npz `inputs`; return the outcome and an npz of the outputs."""
        with self._file("program", "onnx" if spec.engine is protocol.Engine.ONNXRUNTIME else "so") as path:
            if spec.instances == 1:
                return self._run(functools.partial(_run_program, spec, program, path, inputs, plan), spec, plan, beside)
            # Once: a library that a process has loaded must not be written again.
            path.write_bytes(program)
            job = functools.partial(engines.run_program, spec, path, inputs, plan)
            with self._others(spec, path, inputs, plan) as others:
                outcome, payload = self._run(job, spec, plan, beside)
                for other in others:
                    if outcome.status is not Status.OK and not processes.has_ended(other.pid):
                        continue
                    end = Watch(other, time.monotonic() + spec.limits.timeout_s, plan.marks.read).run()
                    found, _ = _judge(end, spec.limits)
                    if found.status is not Status.OK or outcome.details is None:
                        return dataclasses.replace(found, message=f"in another instance: {found.message}"), b""
                    medians = (*outcome.details.others_s, *found.latency_s)
                    outcome = dataclasses.replace(
                        outcome, details=dataclasses.replace(outcome.details, others_s=medians)
                    )
        return outcome, payload

    def run_program(
        self, spec: protocol.RunSpec, prefix: Sequence[str], files: Mapping[str, Path], plan: Plan, beside: Beside
    ) -> tuple[Outcome, bytes]:
        """Run `spec.command`, `prefix` before it; return the outcome and an npz of what each run wrote."""
        try:
            return self._run(functools.partial(_run_command, spec, prefix, files, plan), spec, plan, beside)
        finally:
            for left in self._folder.glob(f"{program.FOLDERS}*"):
                processes.remove_folder(left)

    @contextlib.contextmanager
    def _others(self, spec: protocol.RunSpec, path: Path, inputs: bytes, plan: Plan) -> Iterator[list[_Worker]]:
        """Start the instances beside the first one, each on its share of the cores, which `plan` then has, too."""
        cores = sorted(plan.cpus or os.sched_getaffinity(0))
        share = max(1, len(cores) // spec.instances)
        workers: list[_Worker] = []
        plan.others = tuple(Marks() for _ in range(spec.instances - 1))
        plan.marks.clear()
        try:
            for number, marks in enumerate(plan.others, 1):
                own = tuple(cores[number * share % len(cores) :][:share])
                beside = dataclasses.replace(plan, marks=marks, cpus=own, others=())
                job = functools.partial(engines.run_beside, spec, path, inputs, beside, plan.marks)
                workers.append(self._fork(job, spec.limits, own))
                processes.SPARED.add(workers[-1].pid)
            plan.cpus = tuple(cores[:share])
            yield workers
        finally:
            for worker in workers:
                processes.kill_group(worker.pid)
                worker.leave()
            processes.kill_children()

    @contextlib.contextmanager
    def _file(self, name: str, kind: str) -> Iterator[Path]:
        """A new path for what a worker loads: a process must not load two files of one name."""
        path = self._folder / f"{name}-{next(self._numbers)}.{kind}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _run(self, job: Callable[[], bytes], spec: _Spec, plan: Plan, beside: Beside) -> tuple[Outcome, bytes]:
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
                end = self._supervise(job, spec, plan, beside)
                outcome, payload = _judge(end, spec.limits, on_gpu=spec.device == protocol.GPU)
            except OSError as error:
                outcome = Outcome(Status.FARM_ERROR, f"the board cannot start a worker: {error}")
        return dataclasses.replace(outcome, started_at=started_at), payload

    def _supervise(self, job: Callable[[], bytes], spec: _Spec, plan: Plan, beside: Beside) -> End:
        """Let a worker run `job`, collect its report, and kill the worker unless it is reusable."""
        plan.marks.clear()
        allowed = spec.limits
        first_s = (allowed.load_timeout_s or allowed.timeout_s) + plan.extra_s
        if isinstance(spec, protocol.RunSpec) and spec.command is not None:
            worker = self._fork(job, allowed, plan.cpus, limits.prepare_program)
        else:
            worker = self._take(plan.cpus) if spec.device == protocol.GPU else self._fork(job, allowed, plan.cpus)
        goes_on = False
        try:
            with beside():
                prepare_s = first_s if worker.orders is None else protocol.PREPARE_S
                watch = Watch(worker, time.monotonic() + prepare_s, plan.marks.read)
                if worker.orders is not None:
                    watch.begun_s, watch.look = first_s, limits.data_bytes
                    worker.orders.send(job, spec)
                if allowed.load_timeout_s is not None:
                    watch.run_s = allowed.timeout_s + plan.extra_s
                end = watch.run()
                is_ok = _judge(end, allowed)[0].status is Status.OK
                goes_on = worker.orders is not None and watch.alone and is_ok and worker.may_go_on(allowed, end)
                return end if goes_on else watch.finish()
        finally:
            if goes_on:
                self._kept = worker
            else:
                worker.leave()
            if worker.orders is not None:
                worker.orders.clear()

    def _fork(
        self, job: Callable[[], bytes], allowed: Limits, cpus: tuple[int, ...], begin: _Begin = limits.apply
    ) -> _Worker:
        return _Worker(lambda ends: _work(job, lambda: begin(allowed, cpus), ends), cpus)

    def _take(self, cpus: tuple[int, ...]) -> _Worker:
        """Take the reusable worker for GPU jobs, or fork one."""
        worker, self._kept = self._kept, None
        if worker is not None:
            if worker.cpus == cpus and not processes.has_ended(worker.pid):
                return worker
            worker.end()
        orders = Orders(self._folder, self._shared)
        try:
            return _Worker(lambda ends: _serve(orders, cpus, ends), cpus, orders)
        except OSError:
            orders.close()
            raise


class _Worker:
    """A forked process, and this session's ends of its channels. `orders` sends jobs to a reusable one."""

    def __init__(self, body: Callable[[_Ends], None], cpus: tuple[int, ...], orders: Orders | None = None) -> None:
        """Fork it. Raises OSError."""
        self.cpus, self.orders = cpus, orders
        self.jobs, self._kept_bytes = 0, 0
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as workers:
            self.report, workers_report = _pipe(ours, workers)
            self.output, workers_output = _pipe(ours, workers)
            distress, workers_distress = socket.socketpair()
            ours.callback(distress.close)
            workers.callback(workers_distress.close)
            self.distress = distress.fileno()
            for fd in (self.report, self.output, self.distress):
                os.set_blocking(fd, False)
            ends = _Ends(workers_report, workers_output, workers_distress)
            self.pid = processes.fork(lambda: body(ends))
            if orders is not None:
                orders.close(orders.reading)
                ours.callback(orders.close, orders.writing)
                processes.SPARED.add(self.pid)
            # `workers` is closed now, so the worker's death is an end of file here.
            self._ours = ours.pop_all()

    def may_go_on(self, allowed: Limits, end: End) -> bool:
        """Whether it may run another job: the last left no thread and little memory.

        The first job's threads and memory are the driver's, from its start and its first code.
        """
        self.jobs += 1
        if self.jobs > 1 and processes.has_more_threads(self.pid, end.threads):
            return False
        has = limits.data_bytes(self.pid)
        self._kept_bytes = self._kept_bytes or has
        gathered = has - self._kept_bytes
        return self.jobs < MOST_JOBS and gathered < MOST_GATHERED * allowed.memory_bytes

    def leave(self) -> None:
        """Release it after its death or its one job."""
        processes.SPARED.discard(self.pid)
        self._ours.close()

    def end(self) -> None:
        processes.kill_group(self.pid)
        self.leave()
        processes.kill_children()


@dataclasses.dataclass(frozen=True)
class _Ends:
    """A worker's descriptors: its report and output, and the fault handler's socket."""

    report: int
    output: int
    distress: socket.socket

    def enter(self, *others: int) -> None:
        """In the worker: close every inherited descriptor except these and `others`."""
        os.dup2(self.output, 1)
        os.dup2(self.output, 2)
        processes.close_all_but(
            {0, 1, 2, self.report, self.distress.fileno(), *others}
        )  # above all the client's connection


def _time_candidate(spec: protocol.MeasureSpec, library: bytes, path: Path, plan: Plan) -> bytes:
    """Time a candidate, written to the file `path`; a worker's job."""
    path.write_bytes(library)
    return protocol.pack_frame(timing.time_candidate(spec, path, plan).to_json(), b"")


def _run_program(spec: protocol.RunSpec, program: bytes, path: Path, inputs: bytes, plan: Plan) -> bytes:
    """Run a program, written to the file `path`; a worker's job."""
    path.write_bytes(program)
    return engines.run_program(spec, path, inputs, plan)


def _run_command(spec: protocol.RunSpec, prefix: Sequence[str], files: Mapping[str, Path], plan: Plan) -> bytes:
    """Run any program; a worker's job."""
    outcome, outputs = program.run(spec, prefix, files, plan)
    return protocol.pack_frame(outcome.to_json(), engines.write_arrays(outputs) if outputs else b"")


def _pipe(ours: contextlib.ExitStack, workers: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe from the worker, each end closed with its stack."""
    read, write = os.pipe()
    ours.callback(os.close, read)
    workers.callback(os.close, write)
    return read, write


def _work(job: Callable[[], bytes], begin: Callable[[], int], ends: _Ends) -> None:
    """The life of a single-use worker, from the fork to its report."""
    ends.enter()
    _report(ends, job, begin)


def _serve(orders: Orders, cpus: tuple[int, ...], ends: _Ends) -> None:
    """The life of a reusable worker: job after job, until one fails and the session kills it."""
    ends.enter(orders.reading)
    begun: Limits | None = None

    def begin(spec: _Spec) -> int:
        nonlocal begun
        allowed = spec.limits
        if begun is None:
            # The threads and the driver's memory are not charged to the candidate.
            limits.prepare(allowed, cpus)
            gpu.open_device()
        elif begun.threads != allowed.threads:
            limits.start_threads(limits.thread_count(allowed, cpus), cpus)
        begun = allowed
        if isinstance(spec, protocol.MeasureSpec):
            # As before a fork: small inputs are charged to the candidate neither in memory nor in time.
            arguments.prepare(spec.arguments, spec.seed)
        gpu.allow_memory(allowed.memory_bytes)
        return limits.allow_data(allowed.memory_bytes)

    while found := orders.receive():
        job, spec = found
        _report(ends, job, functools.partial(begin, spec))
        limits.lift()
        del job, found
        gpu.forget_memory()
        gc.collect()


def _report(ends: _Ends, job: Callable[[], bytes], begin: Callable[[], int]) -> None:
    """Run a job within the limits that `begin` sets and returns, and send its result."""
    granted = 0
    try:
        granted = begin()
        os.write(ends.report, BEGUN.pack(granted, processes.count_threads()))
        limits.hold_when_crashing(ends.distress)
        frame = job()
    except Exception as error:  # noqa: BLE001  the edge of a process: what the candidate raises is its outcome
        frame = protocol.pack_frame(_judge_exception(error).to_json(), b"")
    left = memoryview((b"" if granted else bytes(BEGUN.size)) + SIZE.pack(len(frame)) + frame)
    while left:
        left = left[os.write(ends.report, left) :]


def _judge_exception(error: Exception) -> Outcome:
    text = str(error)[:OUTPUT_BYTES]
    if status := gpu.find_status(text):
        return Outcome(status, text + gpu.find_consequence(text))
    if isinstance(error, LoadError):
        return Outcome(Status.LOAD_FAILED, text)
    if isinstance(error, OverrunError):
        return Outcome(Status.RUN_TIMEOUT, text)
    if isinstance(error, MemoryError) or "bad_alloc" in text:
        return Outcome(Status.OUT_OF_MEMORY, f"an allocation failed at the worker's limit: {text}")
    if isinstance(error, arguments.UnknownDtypeError | protocol.ProtocolError | AgentError | OSError):
        return Outcome(Status.FARM_ERROR, f"{type(error).__name__}: {text}")
    return Outcome(Status.CRASHED, f"the candidate raised {type(error).__name__}: {text}")


def _judge(end: End, allowed: Limits, *, on_gpu: bool = False) -> tuple[Outcome, bytes]:
    """The outcome of a worker's end, with the payload of its report."""
    if end.report is not None:
        try:
            text, payload = protocol.unpack_frame(end.report)
            return Outcome.from_json(text), payload
        except protocol.ProtocolError as error:
            return Outcome(Status.CRASHED, f"the worker's report was overwritten: {error}"), b""
    said = f"; it last wrote: {end.output}" if end.output else ""
    if end.timed_out or end.status is None:
        stuck = "" if end.status is not None else "; its process does not die (a driver may be stuck)"
        if on_gpu and not end.allowed_bytes:
            message = (
                f"the worker could load nothing for {protocol.PREPARE_S:g} s: the GPU's driver does not answer{stuck}"
            )
            return Outcome(Status.FARM_ERROR, message), b""
        if end.stage == "sensing" and end.status is not None:
            return Outcome(Status.FARM_ERROR, "the board's own sensors could not be read in time"), b""
        if end.stage == "loading" and allowed.load_timeout_s is not None:
            return Outcome(Status.LOAD_FAILED, f"not loaded within {allowed.load_timeout_s:g} s{stuck}{said}"), b""
        while_loading = "; nothing of it had been called yet" if end.stage == "loading" else ""
        message = f"not finished after {allowed.timeout_s:g} s{while_loading}{stuck}{said}"
        return Outcome(Status.RUN_TIMEOUT, message), b""
    if not end.allowed_bytes and not (os.WIFSIGNALED(end.status) and os.WTERMSIG(end.status) == signal.SIGKILL):
        how = processes.describe_end(end.status)
        return Outcome(Status.FARM_ERROR, f"the worker ended before it had loaded anything: {how}{said}"), b""
    if not os.WIFSIGNALED(end.status):
        code = os.waitstatus_to_exitcode(end.status)
        return Outcome(Status.CRASHED, f"the candidate ended its process itself, exit code {code}{said}"), b""
    name: str | None = processes.signal_name(os.WTERMSIG(end.status))
    if name == "SIGKILL" and end.crashing:  # our own: it hung in its fault handler
        name = limits.find_reported_signal(end.distress)
    elif name == "SIGKILL":
        message = f"killed by the kernel: the board ran out of memory{said}"
        return Outcome(Status.OUT_OF_MEMORY, message, signal=name), b""
    near_bytes = max(_NEAR_BYTES, _NEAR_LIMIT * allowed.memory_bytes)
    at_limit = end.peak_bytes > end.allowed_bytes - near_bytes > 0
    # Compiled code cannot pass an exception on: it ends the process, and says which.
    if at_limit or "bad_alloc" in end.output or gpu.find_status(end.output) is Status.OUT_OF_MEMORY:
        message = f"crashed ({name}) at its limit of {allowed.memory_bytes} bytes{said}"
        return Outcome(Status.OUT_OF_MEMORY, message, signal=name), b""
    return Outcome(Status.CRASHED, f"killed by {name}{said}", signal=name), b""
