"""What a worker does beside timing: which evidence it takes, how long it measures energy, whose time it keeps.

Made by the session before the fork, carried out in the worker by `timing.py` and `engines.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from device_agent.platforms.board_time import BoardTime, HostTime
from device_agent.platforms.evidence import Sensors
from device_agent.protocol import EMULATING_S, Segment

if TYPE_CHECKING:
    from device_agent.emulated.runs import Emulator
import mmap
import struct

# Enough for every field of `Phases`, one double each.
_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Phases:
    """Moments on the board's clock in s, 0 where a phase did not happen; CPU time and calls of the worker."""

    idle_start_s: float = 0.0
    idle_end_s: float = 0.0
    timing_start_s: float = 0.0
    timing_end_s: float = 0.0
    busy_start_s: float = 0.0
    busy_end_s: float = 0.0
    busy_calls: float = 0.0
    cpu_s: float = 0.0  # CPU time of the worker from `timing_start_s` to the last phase's end
    loaded_s: float = 0.0  # from then on the worker reads sensors, and calls the candidate
    running_s: float = 0.0  # as `timing_start_s`, but on this machine's clock, as deadlines are


_FIELDS = tuple(field.name for field in dataclasses.fields(Phases))


class Marks:
    """Memory shared with workers forked from here. One worker at a time; `clear` before each."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BYTES)

    def clear(self) -> None:
        """Forget the last worker's notes."""
        self._memory[: 8 * len(_FIELDS)] = bytes(8 * len(_FIELDS))

    def set(self, name: str, value: float) -> None:
        """Note `value`."""
        struct.pack_into("<d", self._memory, 8 * _FIELDS.index(name), value)

    def read(self) -> Phases:
        """The notes so far."""
        return Phases(*struct.unpack_from(f"<{len(_FIELDS)}d", self._memory))


# An energy window is filled in pieces about this long, so that it ends on time.
_PIECE_S = 0.05
# Of the margin, before the idle baseline: only values that belong to it as a whole are used, so this is for sensors
# that are later than they say. Loading the library is a small load beside what follows.
_SETTLING = 1 / 3


class OverrunError(Exception):
    """A simulated board would not have finished in the time that the worker was given."""


class Pace(Protocol):
    """How fast this board is. A real board's time is the host's; a virtual board's is stretched by its clocks."""

    def begin(self) -> float:
        """The board starts to compute. How long timing a candidate is made to take (s); 0: as long as it takes."""
        ...

    def end(self) -> None:
        """The board stops computing."""
        ...

    def take(self, run: Callable[[int], float], calls: int, calls_beside: int = 0) -> float:
        """Make so many calls; return the board's seconds per call. `run(n)` makes n, and `calls_beside` more.

        Raises OverrunError.
        """
        ...

    def emulate(self, price: Callable[[], Sequence[Segment]], *, again: bool) -> None:
        """What runs is emulated: `price` says what the last call cost its core. `again`: also where that is known."""
        ...

    def settle(self) -> None:
        """Let all of the board's time pass that is left: before a window begins or ends."""
        ...


class HostPace:
    """The pace of a real board."""

    def begin(self) -> float:
        """Nothing to tell anybody."""
        return 0.0

    def end(self) -> None:
        """Nothing to tell anybody."""

    def take(self, run: Callable[[int], float], calls: int, calls_beside: int = 0) -> float:
        """Run them."""
        del calls_beside
        return run(calls)

    def emulate(self, price: Callable[[], Sequence[Segment]], *, again: bool) -> None:
        """A real board emulates nothing."""

    def settle(self) -> None:
        """All of the time has passed already."""


@dataclasses.dataclass
class Plan:
    """`idle_s` and `busy_s` are the energy measurement's windows; no energy is measured where `busy_s` is 0."""

    sensors: Sensors
    marks: Marks = dataclasses.field(default_factory=Marks)
    pace: Pace = dataclasses.field(default_factory=HostPace)
    time: BoardTime = dataclasses.field(default_factory=HostTime)
    idle_s: float = 0.0
    busy_s: float = 0.0
    margin_s: float = 0.0  # sensors answer late: how long the kernel is to have run when its window begins
    emulator: Emulator | None = None  # runs the program, which is the board's own code and not this machine's
    cpus: tuple[int, ...] = ()  # cores the worker's threads are placed on; empty: not placed

    @property
    def extra_s(self) -> float:
        """What the energy measurement, and emulating, add to a worker's time."""
        from_energy_s = self.idle_s + self.busy_s * 1.2 + 5 * self.margin_s + 1.0 if self.busy_s else 0.0
        return from_energy_s + (EMULATING_S if self.emulator else 0.0)

    def rest(self) -> None:
        """Take the idle baseline: do nothing, at the clocks in force."""
        if self.busy_s and self.idle_s:
            self.time.sleep(_SETTLING * self.margin_s)
            self.mark("idle_start_s")
            self.time.sleep(self.idle_s)
            self.mark("idle_end_s")

    def mark(self, phase: str) -> float:
        """Note that a phase begins or ends now; returns the board's time."""
        now_s = self.time.now_s()
        self.marks.set(phase, now_s)
        return now_s

    def fill_window(self, run: Callable[[int], float], call_s: float, calls_beside: int = 0) -> None:
        """Repeat a kernel for `busy_s`. `run(n)` makes n calls, and `calls_beside` more, and returns seconds per call.

        `call_s` is how long one call takes, as it was timed.
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

        # The kernel already runs when the window begins, so that late values are of it: while it was timed, mostly.
        # What comes after the window does not matter, since only values are used that belong to it as a whole.
        ran_s = self.time.now_s() - self.marks.read().timing_start_s
        repeat(self.margin_s - ran_s)
        self.mark("busy_start_s")
        calls = repeat(self.busy_s)
        self.mark("busy_end_s")
        self.marks.set("busy_calls", calls)
