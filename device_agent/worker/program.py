"""Run any program in place of a model, inside a worker process: each run in a folder and a session of its own.

The worker ends a run that takes too much memory, processes, output or disk, and what a run leaves behind; the session
ends the worker at its deadline (`watch.py`). Metrics are read by the farm, from the output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import resource
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from device_agent import processes
from device_agent.platforms.board_time import BoardTime
from device_agent.protocol import Command, Outcome, RunDetails, RunSpec, Status
from device_agent.worker import limits
from device_agent.worker.plan import HostPace, LoadError, Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The names of the runs' folders begin so; the session removes what a killed worker leaves.
FOLDERS = "run-"
# More output ends a run. Of each stream the two halves of so many bytes are kept, for metrics.
MOST_OUTPUT_BYTES, _KEPT_BYTES = 64 << 20, 1 << 20
# No more runs than needed once the kept output of all is this large.
_MOST_KEPT_BYTES = 32 << 20
# The output of so many runs is sent: the farm takes 1024 arrays.
_MOST_SENT = 500
# More on the disk, or half of what was free, ends a run.
_MOST_DISK_BYTES = 4 << 30
# How often processes, memory and disk are looked at: a run writes little and forks few times within.
_LOOK_S = 0.05
# A virtual board's programs go first on this machine, whose other work is none of the board's.
_VIRTUAL_NICENESS = -10
# More runs of a virtual board's program, for what it prints: in number, and together in s.
_LIVE_RUNS, _LIVE_S = 5, 1.0
# Of the output that outcomes keep, the start and the end.
_SHOWN = 1024


class RunError(Exception):
    """A run that ended badly."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def find_program(command: Command, files: Mapping[str, Path]) -> Path:
    """Return the file that a command runs. Raises LoadError where there is none, or it cannot be executed."""
    name = command.arguments[0]
    found = files.get(name.removeprefix("./"))
    if found is None and "/" in name and not name.startswith("/"):
        raise LoadError(f"{name!r} is not among the files sent ({', '.join(files) or 'none'}), and no absolute path")
    if found is None:
        if (path := shutil.which(name)) is None:
            raise LoadError(f"there is no program {name!r} on this board, or it is not executable")
        found = Path(path)
    with found.open("rb") as file:
        if not file.read(1):
            raise LoadError(f"the program {name!r} is empty")
    return found


def run(
    spec: RunSpec, prefix: Sequence[str], files: Mapping[str, Path], plan: Plan
) -> tuple[Outcome, list[NDArray[Any]]]:
    """Run `spec.command` for `spec.runs` times, and until the energy window is full; return the outputs of each run.

    `prefix` stands before the program: an emulator. Raises LoadError, OverrunError.
    """
    assert spec.command is not None
    processes.become_subreaper()
    processes.forgo_privileges()
    plan.marks.set("loaded_s", time.monotonic())
    plan.rest()
    before = plan.sensors.read()
    plan.marks.set("running_s", time.monotonic())
    started_s = plan.mark("timing_start_s")
    runs = _Runs(spec, prefix, files, plan)
    plan.pace.begin()
    try:
        runs.take_all()
    except RunError as error:
        plan.pace.end()
        details = RunDetails(None, output=runs.latest.shown)
        return Outcome(error.status, error.message, details=details, before=before), []
    timing_s = plan.mark("timing_end_s") - started_s
    plan.pace.end()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    plan.marks.set("cpu_s", used.ru_utime + used.ru_stime)
    plan.time.sleep(plan.margin_s)  # sensors lag: the value of the last edge comes later
    watched = spec.command.begin or spec.command.end
    details = RunDetails(
        runs.first_s,
        max(runs.peak_bytes, used.ru_maxrss * 1024),
        output=runs.latest.shown,
        stretch=runs.stretch,
        # Without lines to look for, one window from the first run's start: sensors may be slower than a run.
        windows=tuple(runs.windows) if watched else ((runs.windows[0][0], runs.windows[-1][1]),),
    )
    outcome = Outcome(
        Status.OK, latency_s=tuple(end_s - start_s for start_s, end_s in runs.windows), calls_per_sample=1,
        timing_s=timing_s, before=before, after=plan.sensors.read(), details=details,
    )  # fmt: skip
    return outcome, runs.outputs if spec.return_outputs else []


@dataclasses.dataclass
class _Output:
    """A stream of a run: the bytes kept, all that came, and the line that has not ended."""

    head: bytearray = dataclasses.field(default_factory=bytearray)
    tail: bytearray = dataclasses.field(default_factory=bytearray)
    size: int = 0
    line: bytes = b""

    def add(self, data: bytes) -> None:
        """Keep what was read."""
        self.size += len(data)
        room = _KEPT_BYTES // 2 - len(self.head)
        self.head += data[:room] if room > 0 else b""
        self.tail += data[max(room, 0) :]
        del self.tail[: -_KEPT_BYTES // 2]

    def split(self, data: bytes) -> list[str]:
        """Return the lines that ended with what was read; at its end, where nothing was, the last one."""
        *whole, rest = (self.line + data).split(b"\n")
        self.line = rest[-_KEPT_BYTES:] if data else b""
        whole += [rest] if rest and not data else []
        return [line.decode(errors="replace") for line in whole]

    def to_array(self) -> NDArray[Any]:
        return np.frombuffer(bytes(self.head + self.tail), np.uint8)

    @property
    def shown(self) -> str:
        """Its first and its last kilobyte."""
        data = bytes(self.head + self.tail)
        cut = data[:_SHOWN] + b"\n...\n" + data[-_SHOWN:] if self.size > 2 * _SHOWN else data
        return cut.decode(errors="replace").strip()


class _Run:
    """One run of a program. Times in s of this machine, but for `board_s`: its start in the board's own time."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self.board_s = self.started_s = 0.0
        self.streams = (_Output(), _Output())
        self.began_s = self.ended_s = self.exited_s = 0.0
        self.peak_bytes = 0

    @property
    def shown(self) -> str:
        """What it wrote: the first and the last kilobyte of each stream."""
        return "\n".join(filter(None, (each.shown for each in self.streams)))

    def carry_out(
        self,
        argv: Sequence[str],
        folder: Path,
        memory_bytes: int,
        board_time: BoardTime,
        guard: Callable[[int], object],
    ) -> float:
        """Run it in `folder` to its end; return its wall time in s. Raises RunError, LoadError.

        `guard` receives the run's process group, 0 at its end.
        """
        room = _count_free(folder)
        try:
            process = subprocess.Popen(
                argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)},
            )  # fmt: skip
        except OSError as error:
            other = error.errno == 8  # ENOEXEC
            why = "it is for another processor, or a script without its first line" if other else str(error.strerror)
            raise LoadError(f"{self._command.arguments[0]!r} cannot be started: {why}") from error
        # The program has just begun: forking is not its time.
        self.board_s, self.started_s = board_time.now_s(), time.perf_counter()
        guard(process.pid)
        with contextlib.suppress(ProcessLookupError):
            limits.allow_program(process.pid, memory_bytes)
        self.began_s = 0.0 if self._command.begin else self.started_s
        try:
            self._follow(process, folder, room, memory_bytes)
        finally:
            _end_all(process)
            guard(0)
        self.exited_s = self.exited_s or time.perf_counter()
        self._judge(process.returncode)
        self.ended_s = self.ended_s or self.exited_s
        return self.exited_s - self.started_s

    def _follow(self, process: subprocess.Popen[bytes], folder: Path, room: int, memory_bytes: int) -> None:
        """Read what it writes until it has ended, and look what it takes."""
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            streams: dict[IO[bytes], _Output] = dict(zip((process.stdout, process.stderr), self.streams, strict=True))
            for stream in streams:
                os.set_blocking(stack.enter_context(stream).fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            with contextlib.suppress(AttributeError, OSError):  # without it an exit is seen at the next look
                pidfd = os.pidfd_open(process.pid)
                stack.callback(os.close, pidfd)
                selector.register(pidfd, selectors.EVENT_READ)
            look_s = time.perf_counter() + _LOOK_S
            while process.poll() is None:
                for key, _ in selector.select(max(0.0, look_s - time.perf_counter())):
                    if key.fileobj in streams and not self._read(key.fileobj, streams[key.fileobj]):
                        selector.unregister(key.fileobj)
                if time.perf_counter() >= look_s:
                    self._look(folder, room, memory_bytes)
                    look_s = time.perf_counter() + _LOOK_S
            self.exited_s = time.perf_counter()
            for stream, output in streams.items():
                while self._read(stream, output):
                    pass

    def _read(self, stream: IO[bytes], output: _Output) -> bool:
        """Read what is there; return False where nothing is, for now or for ever. Raises RunError for too much."""
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        output.add(data)
        if self._command.begin or self._command.end:
            now_s = time.perf_counter()
            for line in output.split(data):
                self._note(line, now_s)
        if output.size > MOST_OUTPUT_BYTES:
            raise RunError(Status.CRASHED, f"it wrote more than {MOST_OUTPUT_BYTES >> 20} MiB of output, and was ended")
        return bool(data)

    def _note(self, line: str, now_s: float) -> None:
        command = self._command
        if not self.began_s:
            if re.search(command.begin, line):
                self.began_s = now_s
        elif command.end and not self.ended_s and re.search(command.end, line):
            self.ended_s = now_s

    def _look(self, folder: Path, room: int, memory_bytes: int) -> None:
        """End a run that takes too much. Raises RunError."""
        found = _find_all(self._command.processes)
        if len(found) > self._command.processes:
            raise RunError(Status.CRASHED, f"it had more than {self._command.processes} processes, and was ended")
        self.peak_bytes = max(self.peak_bytes, limits.resident_bytes(found))
        if self.peak_bytes > memory_bytes:
            raise RunError(
                Status.OUT_OF_MEMORY, f"its processes took more than {memory_bytes >> 20} MiB, and were ended"
            )
        taken = room - _count_free(folder)
        if taken > min(_MOST_DISK_BYTES, room // 2):
            raise RunError(Status.CRASHED, f"it filled the disk: {taken >> 20} of {room >> 20} free MiB, and was ended")

    def _judge(self, code: int) -> None:
        """Raise RunError for a bad end."""
        said = f"; it last wrote: {self.shown[-_SHOWN:]}" if self.shown else "; it wrote nothing"
        if code:
            how = f"killed by {processes.signal_name(-code)}" if code < 0 else f"exit code {code}"
            raise RunError(Status.CRASHED, f"the program failed with {how}{said}")
        for pattern, found in ((self._command.begin, self.began_s), (self._command.end, self.ended_s)):
            if pattern and not found:
                raise RunError(Status.CRASHED, f"no line of the output has {pattern!r}{said}")
        if self.ended_s and self.ended_s == self.began_s:
            raise RunError(Status.CRASHED, f"both lines came at once: they must be flushed as they are written{said}")


class _Runs:
    """All runs of a call. `windows`, on the board's clock, are of those after the warm-up."""

    def __init__(self, spec: RunSpec, prefix: Sequence[str], files: Mapping[str, Path], plan: Plan) -> None:
        assert spec.command is not None
        self._spec, self._command, self._files, self._plan = spec, spec.command, files, plan
        self._argv = [*prefix, *spec.command.arguments]
        if (name := spec.command.arguments[0].removeprefix("./")) in files:
            self._argv[len(prefix)] = f"./{name}"
        self._is_real = isinstance(plan.pace, HostPace)
        self._folder: Path | None = None
        self._guard = processes.guard_group()
        self.latest = _Run(spec.command)
        self.windows: list[tuple[float, float]] = []
        self.outputs: list[NDArray[Any]] = []
        self.first_s = 0.0
        self.stretch = 1.0
        self.peak_bytes = 0

    def take_all(self) -> None:
        """Make all runs. Raises what `_Run.carry_out` raises, and OverrunError."""
        plan, spec = self._plan, self._spec
        if not self._is_real:
            with contextlib.suppress(OSError):  # only root may
                os.nice(_VIRTUAL_NICENESS)
        for _ in range(spec.warmup):
            self._take()
        kept = 0
        begun_s = plan.time.now_s()
        while len(self.windows) < spec.runs or (plan.time.now_s() - begun_s < plan.busy_s and kept < _MOST_KEPT_BYTES):
            self.windows.append(self._take())
            found = [each.to_array() for each in self.latest.streams]
            kept += sum(map(len, found))
            self.outputs += found if len(self.windows) <= _MOST_SENT else []

    def _take(self) -> tuple[float, float]:
        """Make a run; return when it began and ended on the board's clock, by the lines that are looked for if any."""
        now_s, before = self._plan.time.now_s(), self.latest
        wall_s = self._plan.pace.take(self._call, 1)
        self._plan.pace.settle()
        self.first_s = self.first_s or wall_s
        ran = self.latest
        if ran is not before and self._spec.return_outputs and not self._is_real:
            ran = self._run_undisturbed(ran)
        # A virtual board lets the time of most runs pass without running them, and of all at a rate of its own.
        start_s = ran.board_s if self._is_real else now_s
        self.stretch = wall_s / (ran.exited_s - ran.started_s)
        began_s, ended_s = (start_s + (at_s - ran.started_s) * self.stretch for at_s in (ran.began_s, ran.ended_s))
        return began_s, max(ended_s, began_s + 1e-9)

    def _run_undisturbed(self, ran: _Run) -> _Run:
        """Return the quickest of a few runs: what a virtual board's program prints was disturbed by this machine."""
        for _ in range(min(_LIVE_RUNS, int(_LIVE_S / (ran.exited_s - ran.started_s)))):
            self._call(1)
            ran = min(ran, self.latest, key=lambda each: each.exited_s - each.started_s)
        self.latest = ran
        return ran

    def _call(self, calls: int) -> float:
        """Run the program `calls` times; return the mean of their wall times in s."""
        total_s = 0.0
        for _ in range(calls):
            self.latest = _Run(self._command)
            about = self._prepare_folder(), self._spec.limits.memory_bytes, self._plan.time, self._guard
            total_s += self.latest.carry_out(self._argv, *about)
            self.peak_bytes = max(self.peak_bytes, self.latest.peak_bytes)
        return total_s / calls

    def _prepare_folder(self) -> Path:
        """Return a folder with the files alone: the last run's if that left nothing, as energy is lost in between."""
        if self._folder is not None:
            if set(os.listdir(self._folder)) == self._files.keys():
                return self._folder
            processes.remove_folder(self._folder)
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDERS, dir=Path.cwd()))
        for name, path in self._files.items():
            os.link(path, self._folder / name)
        return self._folder


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End every process of the run that is left, in any session."""
    processes.kill_group(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(processes.KILL_TIMEOUT_S)
    processes.kill_children()


def _find_all(most: int) -> list[int]:
    """Return the run's processes; more than `most` are not looked for."""
    found = [pid for pid in processes.find_children() if pid not in processes.SPARED]
    for child in found:
        if len(found) > most:
            break
        found += processes.find_children(child)
    return found


def _count_free(folder: Path) -> int:
    """Return the free bytes of the disk that holds a folder."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize
