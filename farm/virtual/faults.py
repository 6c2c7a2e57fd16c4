"""Injected faults of a virtual board: their names, and their effects on files and model.

`KIND[:ARG][@SECONDS]`: SECONDS delays the fault. A PATTERN is a glob over the requested or the resolved path; without
wildcards it matches anywhere in the path. `slow_read` needs the server: in-process trees never wait.
"""

from __future__ import annotations

import errno
import fnmatch
import math
from collections.abc import Callable

from farm.virtual.board import VirtualBoard
from farm.virtual.clocks import LimitedClock, MemoryClock, refuse
from farm.virtual.sensors import Chip

# kind -> its argument; "" for none, in brackets if optional
KINDS = {
    "sensor_vanish": "[RAIL]",
    "sensor_garbage": "[RAIL]",
    "sensor_stale": "[RAIL]",
    "sensor_error": "[RAIL]",
    "sensor_unsupported": "[RAIL]",
    "sensor_zero": "[RAIL]",
    "write_refused": "PATTERN",
    "file_vanish": "PATTERN",
    "clock_stuck": "DOMAIN",
    "clock_cap": "HZ",
    "throttle": "[SECONDS]",
    "overcurrent": "[SECONDS]",
    "slow_read": "SECONDS",
    "slow": "FACTOR",
    "timing": "SECONDS",
    "reboot": "",
    "hang": "",
    "clear": "",
}
_OVER_CURRENT_S = 1.0
# The values of a broken sensor.
_GARBAGE = ("", "garbage", "-1", "4294967295")


class Faults:
    """The faults of one board. Files consult them before they answer."""

    def __init__(self, board: VirtualBoard, chips: Callable[[], list[Chip]]) -> None:
        self._board = board
        self._chips = chips
        self._active: list[tuple[str, str]] = []
        # Each sensor's faults with their start times: past values are read too.
        self._log: list[tuple[float, list[tuple[str, str]]]] = []
        self._answers = 0

    @property
    def active(self) -> tuple[str, ...]:
        """The active faults as given."""
        return tuple(f"{kind}:{argument}" if argument else kind for kind, argument in self._active)

    @property
    def hangs(self) -> bool:
        return any(kind == "hang" for kind, _ in self._active)

    @property
    def delay_s(self) -> float:
        """The added duration of every read."""
        return sum(float(argument) for kind, argument in self._active if kind == "slow_read")

    @property
    def slowness(self) -> float:
        """How many times slower the board is, visible in no clock, sensor or alarm."""
        return math.prod(float(argument) for kind, argument in self._active if kind == "slow")

    @property
    def timing_s(self) -> float:
        """The minimal time for timing a candidate, with as little host computation as possible; 0: unset.

        Not a harm: it lets one machine simulate many boards that measure for long, each with a processor of its own.
        """
        return max((float(argument) for kind, argument in self._active if kind == "timing"), default=0.0)

    def inject(self, text: str) -> None:
        """Begin a fault, or end all with `clear`. Raises ValueError."""
        kind, argument, delay_s = parse_fault(text)
        if kind == "clock_stuck" and argument not in self._domains():
            raise ValueError(f"clock_stuck: no domain {argument!r}; there are {', '.join(self._domains())}")
        if delay_s:
            self._board.schedule(delay_s, lambda: self._begin(kind, argument))
            return
        with self._board.change():
            self._begin(kind, argument)

    def check_read(self, paths: tuple[str, ...]) -> None:
        """Raise OSError for a vanished file or a failing sensor."""
        for kind, argument in self._at_the_moment():
            if kind == "file_vanish" and _matches(argument, paths):
                raise refuse(errno.ENOENT, paths[0])
            if kind == "sensor_vanish" and self._is_sensor(argument, paths):
                raise refuse(errno.ENOENT, paths[0])
            if kind == "sensor_error" and self._is_sensor(argument, paths) and _is_value(paths):
                raise refuse(errno.EIO, paths[0])
            if kind == "sensor_unsupported" and self._is_sensor(argument, paths) and _is_value(paths):
                raise refuse(errno.EOPNOTSUPP, paths[0])

    def check_write(self, paths: tuple[str, ...]) -> None:
        """Raise OSError (EBUSY) for a refused write."""
        if any(kind == "write_refused" and _matches(argument, paths) for kind, argument in self._active):
            raise refuse(errno.EBUSY, paths[0])
        self.check_read(paths)

    def hides(self, path: str) -> bool:
        """Whether a folder no longer lists this; a vanished file is still listed."""
        return any(kind == "sensor_vanish" and self._is_sensor(arg, (path,)) for kind, arg in self._active)

    def distort(self, paths: tuple[str, ...], text: str) -> str:
        """Distort a text as the faults demand."""
        faults = self._at_the_moment()
        if any(kind == "sensor_garbage" and self._is_sensor(arg, paths) for kind, arg in faults) and _is_value(paths):
            self._answers += 1
            self._board.holds_until(0.0)
            return _GARBAGE[self._answers % len(_GARBAGE)]
        if any(kind == "sensor_zero" and self._is_sensor(arg, paths) for kind, arg in faults) and _is_value(paths):
            return "0"
        return text

    def begin_anew(self) -> None:
        """Follow a restart of the board's clock; faults go on."""
        self._log.clear()

    def _at_the_moment(self) -> list[tuple[str, str]]:
        """The faults active at the time that sensors show."""
        moment_s = self._board.moment_s()
        if later := [at_s for at_s, _ in self._log if at_s > moment_s]:
            self._board.holds_until(later[0])
            return next(active for at_s, active in self._log if at_s == later[0])
        return self._active

    def _begin(self, kind: str, argument: str) -> None:
        board = self._board
        self._log.append((board.history.pieces[-1].end_s, list(self._active)))
        if kind == "clear":
            self._end_all()
            return
        if kind == "reboot":
            self._active = [(kind, argument) for kind, argument in self._active if kind != "hang"]
            board.reboot()
            return
        if kind == "throttle":
            board.throttle(float(argument) if argument else math.inf)
        elif kind == "overcurrent":
            board.raise_over_current(float(argument) if argument else _OVER_CURRENT_S)
        elif kind == "clock_stuck":
            self._stick(argument)
        elif kind == "clock_cap":
            for cluster in board.clusters.values():
                cluster.clock.cap_hz = min(cluster.clock.cap_hz, float(argument))
        elif kind == "sensor_stale":
            for chip in self._chips():
                if self._is_sensor(argument, (f"/sys/bus/i2c/devices/{chip.address}",)):
                    chip.stale_since_s = board.history.pieces[-1].end_s
        self._active.append((kind, argument))

    def _end_all(self) -> None:
        self._active.clear()
        self._board.throttle(0)
        for clock in self._domains().values():
            clock.stuck_hz = None
            if isinstance(clock, LimitedClock):
                clock.cap_hz = math.inf
        for chip in self._chips():
            chip.stale_since_s = None

    def _domains(self) -> dict[str, LimitedClock | MemoryClock]:
        board = self._board
        found: dict[str, LimitedClock | MemoryClock] = {
            cluster.name: cluster.clock for cluster in board.clusters.values()
        }
        if board.gpu:
            found["gpu"] = board.gpu.clock
        if board.memory:
            found["memory"] = board.memory
        return found

    def _stick(self, domain: str) -> None:
        board = self._board
        now = {cluster.name: cluster.hz for cluster in board.clusters.values()} | {"memory": board.memory_hz}
        if board.gpu:
            now["gpu"] = board.gpu.hz
        self._domains()[domain].stuck_hz = now[domain]

    def _is_sensor(self, rail: str, paths: tuple[str, ...]) -> bool:
        addresses = [
            chip.address
            for chip in self._chips()
            if not rail or any(model and model.name == rail for model in chip.rails)
        ]
        return any(f"/{address}" in path for address in addresses for path in paths)


def parse_fault(text: str) -> tuple[str, str, float]:
    """Parse into (kind, argument, delay in s). Raises ValueError."""
    body, mark, after = text.strip().rpartition("@")
    delay_s = 0.0
    try:
        delay_s = float(after) if mark else 0.0
    except ValueError:  # the at sign is part of a path
        body = ""
    kind, _, argument = (body if mark and body else text.strip()).partition(":")
    if kind not in KINDS:
        raise ValueError(f"no fault {kind!r}; there are {', '.join(KINDS)}")
    wanted = KINDS[kind]
    if wanted and not wanted.startswith("[") and not argument:
        raise ValueError(f"{kind} needs {wanted}, as in {kind}:{wanted}")
    if not wanted and argument:
        raise ValueError(f"{kind} takes no argument")
    if "SECONDS" in wanted and argument and not 0 <= float(argument) < math.inf:
        raise ValueError(f"{kind}:{argument}: seconds must be >= 0")
    if wanted == "HZ" and not 0 < float(argument) < math.inf:
        raise ValueError(f"{kind}:{argument}: a clock in Hz must be > 0")
    if wanted == "FACTOR" and not 0 < float(argument) < math.inf:
        raise ValueError(f"{kind}:{argument}: a factor must be > 0")
    if delay_s < 0 or not math.isfinite(delay_s):
        raise ValueError(f"{text}: seconds must be >= 0")
    return kind, argument, delay_s


def _matches(pattern: str, paths: tuple[str, ...]) -> bool:
    if not any(character in pattern for character in "*?["):
        return any(pattern in path for path in paths)
    return any(fnmatch.fnmatchcase(path, pattern) for path in paths)


def _is_value(paths: tuple[str, ...]) -> bool:
    return paths[-1].endswith("_input")
