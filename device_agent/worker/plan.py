"""A worker's plan beside timing: its evidence, its energy measurement, and its board's time.

The session makes it before the fork; `timing.py` and `engines.py` carry it out.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from device_agent.platforms.board_time import BoardTime, HostTime
from device_agent.platforms.evidence import Sensors
from device_agent.protocol import EMULATING_S, MeasureSpec, RunSpec

# Enough for the fields of `Phases`, one double each.
_BYTES = 4096


# An energy window is filled in pieces about this long, to end on time.
_PIECE_S = 0.05
# Share of the margin before the idle baseline. Only values wholly inside the baseline count, so this covers sensors
# that lag more than they report. Loading the library is a small load compared with what follows.
_SETTLING = 1 / 3
# How to run a program once, and how to copy the outputs of a run.
Runner = Callable[[], Any]
Collector = Callable[[Any], list[Any]]
# By function in the order of first calls: calls in one inference, and their total time, in any unit.
Profile = Mapping[str, tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Phases:
    """Times on the board's clock in s, 0 for a phase that did not occur; the worker's CPU time and calls."""

    idle_start_s: float = 0.0
    idle_end_s: float = 0.0
    timing_start_s: float = 0.0
    timing_end_s: float = 0.0
    busy_start_s: float = 0.0
    busy_end_s: float = 0.0
    busy_calls: float = 0.0
    cpu_s: float = 0.0  # CPU time of the worker from `timing_start_s` to the last phase's end
    loaded_s: float = 0.0  # from then on the worker reads sensors and calls the candidate
    running_s: float = 0.0  # as `timing_start_s`, on this machine's clock, for deadlines


_FIELDS = tuple(field.name for field in dataclasses.fields(Phases))


class Marks:
    """Memory shared with forked workers. One worker at a time; `clear` before each."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BYTES)

    def clear(self) -> None:
        self._memory[: 8 * len(_FIELDS)] = bytes(8 * len(_FIELDS))

    def set(self, name: str, value: float) -> None:
        struct.pack_into("<d", self._memory, 8 * _FIELDS.index(name), value)

    def read(self) -> Phases:
        return Phases(*struct.unpack_from(f"<{len(_FIELDS)}d", self._memory))


class LoadError(Exception):
    """The library cannot be loaded, or has no such entry."""


class OverrunError(Exception):
    """The simulated board would not have finished within the worker's time limit."""


class Pace(Protocol):
    """How fast this board is. A real board's time is the host's; a virtual board's is scaled by its clocks."""

    def begin(self) -> float:
        """Start computing. Returns how long timing a candidate shall take (s); 0: as long as it needs."""

    def end(self) -> None:
        """Stop computing."""

    def take(self, run: Callable[[int], float], calls: int, calls_beside: int = 0) -> float:
        """Make `calls` calls; return the board's seconds per call. `run(n)` makes n, and `calls_beside` more.

        Raises OverrunError.
        """

    def settle(self) -> None:
        """Let all remaining board time pass, before a window begins or ends."""


class HostPace:
    """The pace of a real board, whose time is this machine's."""

    def begin(self) -> float:
        return 0.0

    def end(self) -> None:
        """Do nothing."""

    def take(self, run: Callable[[int], float], calls: int, calls_beside: int = 0) -> float:
        del calls_beside
        return run(calls)

    def settle(self) -> None:
        """Do nothing."""


class Candidate(Protocol):
    """A candidate with its arguments, ready to be called."""

    @property
    def beside_s(self) -> float:
        """Untimed duration of one call in a sample."""

    def warm_up(self, calls: int) -> None: ...

    def evaluate(self, number: int, repeat: int) -> list[float]:
        """Seconds per call of `repeat` samples of `number` calls."""

    def run(self, calls: int) -> float: ...


class Emulator(Protocol):
    """Runs code of another processor than this machine's, on a virtual board, whose `pace` learns its cost."""

    def load_candidate(self, spec: MeasureSpec, library: bytes, pace: Pace) -> Candidate:
        """Raises LoadError."""

    def load_program(
        self, spec: RunSpec, program: bytes, inputs: Sequence[Mapping[str, Any]], pace: Pace
    ) -> tuple[Runner, Collector, Callable[[], Profile]]:
        """`inputs`: the arrays of each inference. Raises LoadError."""


@dataclasses.dataclass
class Plan:
    """`idle_s` and `busy_s` are the energy measurement's windows; `busy_s` 0 means no energy."""

    sensors: Sensors
    marks: Marks = dataclasses.field(default_factory=Marks)
    pace: Pace = dataclasses.field(default_factory=HostPace)
    time: BoardTime = dataclasses.field(default_factory=HostTime)
    idle_s: float = 0.0
    busy_s: float = 0.0
    margin_s: float = 0.0  # sensors lag: how long the kernel must run before its window begins
    emulator: Emulator | None = None  # runs a program that is the board's own code, not this machine's
    cpus: tuple[int, ...] = ()  # cores for the worker's threads; empty: any
    others: tuple[Marks, ...] = ()  # of the instances that run beside this one

    @property
    def extra_s(self) -> float:
        """Time that the energy measurement and emulation add to a worker's limit."""
        from_energy_s = self.idle_s + self.busy_s * 1.2 + 5 * self.margin_s + 1.0 if self.busy_s else 0.0
        return from_energy_s + (EMULATING_S if self.emulator else 0.0)

    def rest(self) -> None:
        """Take the idle baseline at the clocks in force."""
        if self.busy_s and self.idle_s:
            self.time.sleep(_SETTLING * self.margin_s)
            self.mark("idle_start_s")
            self.time.sleep(self.idle_s)
            self.mark("idle_end_s")

    def mark(self, phase: str) -> float:
        """Mark the start or end of a phase; return the board's time."""
        now_s = self.time.now_s()
        self.marks.set(phase, now_s)
        return now_s

    def fill_window(self, run: Callable[[int], float], call_s: float, calls_beside: int = 0) -> None:
        """Repeat a kernel for `busy_s`. `run(n)` makes n calls, and `calls_beside` more, and returns seconds per call.

        `call_s` is the measured time of one call.
        """
        if not self.busy_s:
            return
        number = max(1, round(_PIECE_S / max(call_s, 1e-9)))

        def repeat(seconds: float) -> int:
            calls, started = 0, self.time.now_s()
            while self.time.now_s() - started < seconds:
                self.pace.take(run, number, calls_beside)
                calls += number + calls_beside
            self.pace.settle()
            return calls

        # The kernel must already run when the window begins, because sensors lag; timing usually covers that. After the
        # window nothing matters, since only values wholly inside it count.
        ran_s = self.time.now_s() - self.marks.read().timing_start_s
        repeat(self.margin_s - ran_s)
        self.mark("busy_start_s")
        calls = repeat(self.busy_s)
        self.mark("busy_end_s")
        self.marks.set("busy_calls", calls)
