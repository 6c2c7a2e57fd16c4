"""The logs of all processes of the farm on this machine, and events of the store, as one stream in order of time."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from device_agent.protocol import is_name
from farm.processes.log_files import Follower, list_pieces, read_ends
from farm.processes.log_lines import LogLine, name_process, read_line
from farm.store import Store
from farm.store.happenings import Happening, Mark

STORE = "store"
# Of each log, while nothing has to be looked for; and while something has.
_BYTES, _SEARCHED_BYTES = 1 << 19, 64 << 20
_EVENTS, _SEARCHED_EVENTS = 2000, 100_000
_LOOK_S = 0.25
# How often it is looked whether there are new logs.
_NEW_S = 2.0


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which lines: about a campaign, a board, since when (seconds since the epoch); "" and None: any."""

    campaign: str = ""
    board: str = ""
    since: float | None = None

    @property
    def is_search(self) -> bool:
        """Whether something is looked for that may be far back."""
        return bool(self.campaign or self.board or self.since is not None)

    def takes(self, line: LogLine) -> bool:
        """Whether a line is one of these."""
        is_new = self.since is None or line.at is None or line.at >= self.since
        return is_new and line.is_about(self.campaign, self.board)


def read_last(logs: Path, store: Store | None, wanted: Wanted, most: int) -> list[LogLine]:
    """The last `most` lines of all together, the oldest first. A line that says no time has that of the one before it
    in its log.
    """
    found: list[LogLine] = []
    for path in _list_logs(logs):
        lines = [read_line(raw, *_describe(path, logs)) for raw in read_ends(path, _find_bytes(wanted))]
        found += [line for line in _date(lines, _find_start(path)) if wanted.takes(line)]
    if store is not None:
        happened = store.fetch_last_happenings(_SEARCHED_EVENTS if wanted.is_search else _EVENTS)
        found += [line for line in map(to_line, happened) if wanted.takes(line)]
    found.sort(key=lambda line: line.at or 0.0)
    return found[-most:] if most else []


class Following:
    """What is written from when this is made on, as it comes. Raises what the store does."""

    def __init__(self, logs: Path, store: Store | None, wanted: Wanted) -> None:
        self._logs, self._store, self._wanted = logs, store, wanted
        self._followers = {path: Follower(path) for path in _list_logs(logs)}
        self._mark = Mark() if store is None else store.fetch_mark_of_events()
        self._new_at = time.monotonic() + _NEW_S

    def close(self) -> None:
        """Let go of all files."""
        for follower in self._followers.values():
            follower.close()

    def listen(self, known: Collection[LogLine] = (), ended: threading.Event | None = None) -> Iterator[LogLine]:
        """Lines until `ended`; what comes together is in order of time. What is `known` is left out at first."""
        ended = ended or threading.Event()
        seen = set(known)
        while True:
            yield from (line for line in self.take() if line not in seen)
            seen.clear()
            if ended.wait(_LOOK_S):
                return

    def take(self) -> list[LogLine]:
        """What has come since the last time, in order of time."""
        if time.monotonic() >= self._new_at:
            self._new_at = time.monotonic() + _NEW_S
            for path in _list_logs(self._logs):
                if path not in self._followers:
                    self._followers[path] = Follower(path, from_start=True)
        found: list[LogLine] = []
        for path, follower in self._followers.items():
            lines = [read_line(raw, *_describe(path, self._logs)) for raw in follower.read()]
            found += [line for line in _date(lines, time.time()) if self._wanted.takes(line)]
        if self._store is not None:
            happened = self._store.fetch_happenings(self._mark, _EVENTS)
            self._mark = happened[-1].mark if happened else self._mark
            found += [line for line in map(to_line, happened) if self._wanted.takes(line)]
        return sorted(found, key=lambda line: line.at or 0.0)


def to_line(event: Happening) -> LogLine:
    """An event of the store as a line."""
    text = event.text
    if event.before != event.after and event.after:
        text = f"{event.before or 'new'} -> {event.after}: {text}"
    if event.by:
        text += f" ({event.by})"
    if event.of_board:
        return LogLine(event.at, STORE, text, kind=event.kind, board=event.subject)
    # Boards by their key at the tracker; what else there is (an actor, a workload) is named in the text.
    board_type, slash, board = event.subject.partition("/")
    if slash and is_name(board_type) and is_name(board):
        return LogLine(event.at, STORE, text, kind=event.kind, board=board)
    if is_name(event.subject):
        return LogLine(event.at, STORE, text, kind=event.kind, campaign=event.subject)
    return LogLine(event.at, STORE, f"{event.subject}: {text}", kind=event.kind)


def _list_logs(logs: Path) -> list[Path]:
    return sorted({*logs.glob("*.log"), *logs.glob("*.out"), *logs.glob("boards/*.log")})


def _describe(path: Path, logs: Path) -> tuple[str, str]:
    """Who writes a log, and the board that it is of."""
    return ("agent", path.name.removesuffix(".log")) if path.parent != logs else (name_process(path), "")


def _find_bytes(wanted: Wanted) -> int:
    return _SEARCHED_BYTES if wanted.is_search else _BYTES


def _find_start(path: Path) -> float:
    """When a log was begun, near enough, for its first lines if these do not say."""
    try:
        return min(each.stat().st_mtime for each in list_pieces(path))
    except (OSError, ValueError):  # moved just now
        return time.time()


def _date(lines: list[LogLine], start: float) -> Iterator[LogLine]:
    at = next((line.at for line in lines if line.at is not None), start)
    for line in lines:
        at = at if line.at is None else line.at
        yield line if line.at is not None else dataclasses.replace(line, at=at)
