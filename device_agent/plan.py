"""What a worker does beside timing: which evidence it takes, how long it measures energy, whose time it keeps.

Made by the session before the fork, carried out in the worker by `timing.py` and `engines.py`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Protocol

from device_agent.evidence import Sensors
from device_agent.marks import Marks

# An energy window is filled in pieces about this long, so that it ends on time.
_PIECE_S = 0.05
# Of the margin, before the idle baseline: only values that belong to it as a whole are used, so this is for sensors
# that are later than they say. Loading the library is a small load beside what follows.
_SETTLING = 1 / 3


class Pace(Protocol):
    """How fast this board is. A real board's time is the host's; a virtual board's is stretched by its clocks."""

    def begin(self) -> float:
        """The board starts to compute. How long timing a candidate is made to take (s); 0: as long as it takes."""
        ...

    def end(self) -> None:
        """The board stops computing."""
        ...

    def board_seconds(self, host_s: float, cpu_s: float) -> float:
        """How long this board takes for what took the host `host_s`, with `cpu_s` of CPU time."""
        ...

    def sleep_out(self, board_s: float, host_s: float) -> None:
        """Let the rest of the board's time pass, at once or, where it is little, later together with more of it."""
        ...

    def settle(self) -> None:
        """Let all of it pass that is left: before a window begins or ends."""
        ...


class HostPace:
    """The pace of a real board."""

    def begin(self) -> float:
        """Nothing to tell anybody."""
        return 0.0

    def end(self) -> None:
        """Nothing to tell anybody."""

    def board_seconds(self, host_s: float, cpu_s: float) -> float:
        del cpu_s
        return host_s

    def sleep_out(self, board_s: float, host_s: float) -> None:
        """All of the time has passed already."""

    def settle(self) -> None:
        """All of the time has passed already."""


@dataclasses.dataclass
class Plan:
    """`idle_s` and `busy_s` are the energy measurement's windows; no energy is measured where `busy_s` is 0."""

    sensors: Sensors
    marks: Marks = dataclasses.field(default_factory=Marks)
    pace: Pace = dataclasses.field(default_factory=HostPace)
    idle_s: float = 0.0
    busy_s: float = 0.0
    margin_s: float = 0.0  # sensors answer late: how long the kernel is to have run when its window begins
    cpus: tuple[int, ...] = ()  # cores the worker's threads are placed on; empty: not placed
    # Calls that were timed on a virtual board: seconds that each took the host, and of the host's CPU.
    _timed: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def extra_s(self) -> float:
        """What the energy measurement adds to a worker's time."""
        return self.idle_s + self.busy_s * 1.2 + 5 * self.margin_s + 1.0 if self.busy_s else 0.0

    def rest(self) -> None:
        """Take the idle baseline: do nothing, at the clocks in force."""
        if self.busy_s and self.idle_s:
            time.sleep(_SETTLING * self.margin_s)
            self.marks.set("idle_start_s")
            time.sleep(self.idle_s)
            self.marks.set("idle_end_s")

    def fill_window(self, run: Callable[[int], float], call_s: float, calls_beside: int = 0) -> None:
        """Repeat a kernel for `busy_s`. `run(n)` makes n calls, and `calls_beside` more, and returns seconds per call.

        `call_s` is how long one call takes, as it was timed.
        """
        if not self.busy_s:
            return
        number = max(1, round(_PIECE_S / max(call_s, 1e-9)))
        real = isinstance(self.pace, HostPace)
        repeat = _repeater(run, number, calls_beside) if real else self._player(run, number)
        # The kernel already runs when the window begins, so that late values are of it: while it was timed, mostly.
        # What comes after the window does not matter, since only values are used that belong to it as a whole.
        ran_s = time.monotonic() - self.marks.read().timing_start_s
        repeat(self.margin_s - ran_s)
        self.marks.set("busy_start_s")
        calls = repeat(self.busy_s)
        self.marks.set("busy_end_s")
        self.marks.set("busy_calls", calls)

    def paced(self, run: Callable[[], float], calls: int, calls_beside: int = 0) -> float:
        """Run on the board's time; `run` returns the host's seconds per call, this the board's."""
        cpu_s, wall_s = time.process_time(), time.monotonic()
        host_s = run()
        passed_s = max(time.monotonic() - wall_s, 1e-9)
        # CPU time of all calls, not the cores in use over the whole run: a wait for the host's other work may have been
        # beside the calls that were timed, as well as among them.
        used_s = (time.process_time() - cpu_s) / (calls + calls_beside)
        board_s = self.pace.board_seconds(host_s, used_s)
        self._timed.append((host_s, used_s))
        self.pace.sleep_out(board_s * (calls + calls_beside), passed_s)
        return board_s

    def paced_each(self, run: Callable[[], float], count: int) -> list[float]:
        """As `paced` for `count` single calls, one right after the other: as they are repeated in a window."""
        wall_s = time.monotonic()
        host: list[tuple[float, float]] = []
        for _ in range(count):
            # Of each call for itself: one that waited for the host's other work must not lend its wait to the others.
            cpu_s = time.process_time()
            host.append((run(), time.process_time() - cpu_s))
        passed_s = time.monotonic() - wall_s
        board_s = [self.pace.board_seconds(*each) for each in host]
        self._timed += host
        self.pace.sleep_out(sum(board_s), passed_s)
        return board_s

    def _player(self, run: Callable[[int], float], number: int) -> Callable[[float], int]:
        """What repeats a kernel on a virtual board, `number` calls at a time, and returns how many there were.

        One call of them really computes, and each takes what calls took that were timed, at the clocks of now: the host
        may have more to do beside it than it had then, but the board has the same work.
        """
        host_s, cpu_s = (statistics.median(each) for each in zip(*self._timed, strict=True))

        def play(seconds: float) -> int:
            calls, started = 0, time.monotonic()
            ended = started
            while ended - started < seconds:
                run(1)
                board_s = self.pace.board_seconds(host_s, cpu_s)
                # Calls are whole and fill the window: while the host took longer than that, the board made more.
                made = max(number, math.ceil((time.monotonic() - ended) / board_s))
                calls += made
                ended += made * board_s
                time.sleep(max(0.0, ended - time.monotonic()))
            return calls

        return play


def _repeater(run: Callable[[int], float], number: int, calls_beside: int) -> Callable[[float], int]:
    """What repeats a kernel on a real board, `number` calls at a time, and returns how many there were."""

    def repeat(seconds: float) -> int:
        calls, started = 0, time.monotonic()
        while time.monotonic() - started < seconds:
            run(number)
            calls += number + calls_beside
        return calls

    return repeat
