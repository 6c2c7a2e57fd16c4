"""Simulated time without waiting: a board's clock jumps, and its sensors are read afterwards as of the past.

The clock is the model's (`board.py`); any user may advance it through its file (`tree.py`).
"""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from device_agent.errors import SensorError
from device_agent.platforms.board_time import BoardTime, HostTime, Ticker, Watch
from device_agent.power.sampler import Trace, collect
from device_agent.power.sensors import PowerSensors
from device_agent.sysfs import Tree
from farm.virtual.tree import TIME


class SimulatedFiles(Tree, Protocol):
    """A virtual board's files, in-process or behind a socket."""

    def past(self, path: str, at_s: float) -> list[list[Any]]:
        """The values of a sensor's file from `at_s` on, each with its end time. Raises OSError."""

    def past_many(self, paths: Sequence[str], at_s: float) -> list[list[list[Any]] | None]:
        """As `past`, for several files; None for each that was unreadable then. Raises OSError."""

    def let_pass(self, seconds: float) -> list[Any]:
        """Let time pass; return the time, the clocks' file, and how long that holds. Raises OSError."""


class LookBack:
    """A virtual board's files; within `review`, sensors' files as of the past."""

    simulated = True

    def __init__(self, tree: SimulatedFiles) -> None:
        self._tree = tree
        self._ticker: _PastTicker | None = None
        self._known: dict[str, collections.deque[list[Any]]] = {}
        # When each file was first read within a review; and the files read together with it in the last one.
        self._first_s: dict[str, float] = {}
        self._together: dict[str, list[str]] = {}

    def read(self, path: str) -> str:
        if self._ticker is None:
            return self._tree.read(path)
        now_s = self._ticker()
        known = self._known.get(path)
        while known and known[0][1] <= now_s:
            known.popleft()
        if not known:
            known = self._fetch(path, now_s)
        return str(known[0][0])

    def _fetch(self, path: str, now_s: float) -> collections.deque[list[Any]]:
        """Fetch a file's past, together with that of the files likely to be read next."""
        if path not in self._first_s:
            likely = [name for name in self._together.get(path, (path,)) if name not in self._first_s]
            for name, past in zip(likely, self._tree.past_many(likely, now_s), strict=True):
                if past is not None:
                    self._known[name] = collections.deque(past)
                    self._first_s[name] = now_s
            if path in self._first_s:
                return self._known[path]
        self._first_s[path] = now_s
        known = self._known[path] = collections.deque(self._tree.past(path, now_s))
        return known

    def write(self, path: str, text: str) -> None:
        self._tree.write(path, text)

    def names(self, folder: str) -> list[str]:
        return self._tree.names(folder)

    def exists(self, path: str) -> bool:
        return self._tree.exists(path)

    def run(self, command: list[str]) -> str:
        return self._tree.run(command)

    @contextlib.contextmanager
    def review(self, since_s: float) -> Iterator[Ticker]:
        """Read files as of the past; the reader advances by sleeping."""
        self._known.clear()
        groups: dict[float, list[str]] = {}
        for path, first_s in self._first_s.items():
            groups.setdefault(first_s, []).append(path)
        self._together = {path: group for group in groups.values() for path in group}
        self._first_s = {}
        self._ticker = _PastTicker(since_s)
        try:
            yield self._ticker
        finally:
            self._ticker = None


class _PastTicker:
    def __init__(self, now_s: float) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


class LapsedTime:
    """A simulated board's time, which jumps. Its power sensors are read through `files`.

    Every method raises OSError when the simulator is gone.
    """

    def __init__(self, tree: SimulatedFiles, files: LookBack) -> None:
        self._tree, self._files = tree, files

    def now_s(self) -> float:
        return float(json.loads(self._tree.read(TIME))["now_s"])

    def sleep(self, seconds: float) -> float:
        if seconds <= 0:
            return 0.0
        self._tree.write(TIME, json.dumps({"pass_s": seconds}))
        return seconds

    def begin(self) -> None:
        """Restart the clock as if the board had been idle for long, without any history."""
        self._tree.write(TIME, json.dumps({"begin": True}))

    @contextlib.contextmanager
    def look(self, seconds: float) -> Iterator[Ticker]:
        """Let all of the time pass first, then look back at it."""
        since_s = self.now_s()
        self.sleep(seconds)
        with self._files.review(since_s) as ticker:
            yield ticker

    def make_watch(self, sensors: PowerSensors, rate_hz: float) -> Watch:
        """Make a watch that looks back when stopped."""
        return _Review(self, self._files, sensors, rate_hz)

    def own(self) -> BoardTime:
        """For a worker: the same time with fewer requests."""
        return WorkersTime(self._tree, self._files)


class WorkersTime(LapsedTime):
    """The time in the only process that advances it: its last answer stays valid.

    `clocks` is the clocks' file as of then; None: unknown or changed since.
    """

    def __init__(self, tree: SimulatedFiles, files: LookBack) -> None:
        super().__init__(tree, files)
        self._now_s: float | None = None
        self.clocks: str | None = None

    def now_s(self) -> float:
        if self._now_s is None:
            self._now_s = super().now_s()
        return self._now_s

    def sleep(self, seconds: float) -> float:
        if seconds <= 0:
            return 0.0
        now_s, clocks, _ = self._tree.let_pass(seconds)
        self._now_s, self.clocks = float(now_s), str(clocks)
        return seconds


class _Review:
    def __init__(self, time: LapsedTime, files: LookBack, sensors: PowerSensors, rate_hz: float) -> None:
        self._time, self._files, self._sensors, self._rate_hz = time, files, sensors, rate_hz
        self._since_s: float | None = None
        self._trace = Trace(())

    def start(self) -> None:
        self._trace = Trace(())
        with contextlib.suppress(OSError):
            self._since_s = self._time.now_s()

    def stop(self) -> None:
        since_s, self._since_s = self._since_s, None
        if since_s is None:
            return
        try:
            seconds = self._time.now_s() - since_s
        except OSError as error:
            raise SensorError(f"the board's time cannot be read: {error.strerror or error}") from error
        with self._files.review(since_s) as ticker:
            self._trace = collect(self._sensors, seconds, self._rate_hz, ticker, ticker.sleep)

    def trace(self) -> Trace:
        return self._trace


def find_time(tree: SimulatedFiles, files: LookBack) -> BoardTime:
    """The time of the simulated board behind `tree`: its own, or this machine's if it is live."""
    live = True
    with contextlib.suppress(OSError, ValueError):
        live = bool(json.loads(tree.read(TIME))["live"])
    return HostTime() if live else LapsedTime(tree, files)
