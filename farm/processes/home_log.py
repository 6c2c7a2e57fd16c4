"""The log of a home, `FARM_HOME/logs/farm.log`: JSON lines of its services, engine, searches and take-overs.

Output of other programs (the tracker, agents) is in separate files beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import time
from pathlib import Path
from typing import IO, Any

from concurrent_log_handler import ConcurrentRotatingFileHandler

from device_agent.protocol import is_name
from farm import folders
from farm.store.events import StoreEvent

LOG_FILE = "farm.log"
# The ids of a line: given as `extra={"board": name}` when logging.
IDS = ("campaign", "board")
_BYTES, _OLDER = 4 << 20, 3
_TAIL_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class LogLine:
    """A line of the log, or an event of the store. `at` is seconds since the epoch, `kind` an event's; a missing id is
    "".
    """

    at: float
    process: str
    text: str
    level: str = "info"
    pid: int | None = None
    campaign: str = ""
    board: str = ""
    kind: str = ""

    def to_document(self) -> dict[str, Any]:
        """For `--json`: empty ids are left out."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value not in ("", None)}

    def to_text(self) -> str:
        """Format for people: time, process, ids, text. A multi-line text stays so; not sanitised."""
        when = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.at))}.{int(self.at * 1000) % 1000:03d}"
        about = " ".join(filter(None, (self.campaign, self.board)))
        level = "" if self.level == "info" else f"{self.level.upper()} "
        kind = f"{self.kind}: " if self.kind else ""
        text = self.text.replace("\n", "\n    ")
        return f"{when} {self.process:8} {f'[{about}] ' if about else ''}{level}{kind}{text}"


@dataclasses.dataclass(frozen=True)
class LogFilter:
    """A filter by campaign, board and start time (seconds since the epoch); "" and None match any."""

    campaign: str = ""
    board: str = ""
    since: float | None = None

    def takes(self, line: LogLine) -> bool:
        """Whether a line matches all of these, by its ids or by names in its text."""
        pairs = ((self.campaign, line.campaign), (self.board, line.board))
        is_about = all(not wanted or wanted == own or names(line.text, wanted) for wanted, own in pairs)
        return is_about and (self.since is None or line.at >= self.since)


def names(text: str, name: str) -> bool:
    """Whether a text contains a whole name: nano-1 is not in nano-10."""
    return name in text and re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", text) is not None


class LineFormatter(logging.Formatter):
    """Formats a record as a JSON line, with its traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        document: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "text": text,
        }
        document |= {name: str(value) for name in IDS if (value := getattr(record, name, ""))}
        return json.dumps(document)


def start_log(process: str, logs: Path, *, foreground: bool = False) -> None:
    """Send this process's log records to the log in the folder `logs`; with `foreground`, to stderr too.

    The log rotates at 4 MiB, and three older pieces are kept.
    """
    folders.make_private(logs)
    handlers: list[logging.Handler] = [
        ConcurrentRotatingFileHandler(logs / LOG_FILE, maxBytes=_BYTES, backupCount=_OLDER, encoding="utf-8")
    ]
    handlers[0].setFormatter(LineFormatter(process))
    if foreground:
        handlers.append(logging.StreamHandler())
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.getLogger("paramiko").setLevel(logging.WARNING)


def read_line(raw: bytes) -> LogLine | None:
    """Parse a line; None for an invalid one."""
    try:
        document = json.loads(raw)
        at, pid = float(document["at"]), document.get("pid")
        time.localtime(at)
        ids = {name: str(document.get(name) or "") for name in IDS}
        process, level = str(document.get("process") or "?"), str(document.get("level") or "info")
        return LogLine(at, process, str(document["text"]), level, pid if isinstance(pid, int) else None, **ids)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, OSError):
        return None


def read_event(event: StoreEvent) -> LogLine:
    """Convert an event of the store to a line."""
    text = event.text
    if event.before != event.after and event.after:
        text = f"{event.before or 'new'} -> {event.after}: {text}"
    if event.by:
        text += f" ({event.by})"
    line = LogLine(event.at, "store", text, kind=event.kind)
    if event.of_board:
        return dataclasses.replace(line, board=event.subject)
    # Boards by their tracker key; any other subject is named in the text.
    board_type, slash, board = event.subject.partition("/")
    if slash and is_name(board_type) and is_name(board):
        return dataclasses.replace(line, board=board)
    if is_name(event.subject):
        return dataclasses.replace(line, campaign=event.subject)
    return dataclasses.replace(line, text=f"{event.subject}: {text}")


def read_log(logs: Path, wanted: LogFilter) -> list[LogLine]:
    """Read the log and its older pieces, oldest line first."""
    found = []
    for number in range(_OLDER, -1, -1):
        # A piece that is being rotated is missing: the next call has it.
        piece = logs / f"{LOG_FILE}{f'.{number}' * bool(number)}"
        with contextlib.suppress(FileNotFoundError), piece.open("rb") as file:
            found += [line for line in map(read_line, file) if line is not None and wanted.takes(line)]
    return found


def read_end(logs: Path, process: str, lines: int = 5) -> str:
    """The last lines of one process, for an error message; reads only the end of the log."""
    with contextlib.suppress(OSError), (logs / LOG_FILE).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        own = [line.text for line in map(read_line, file) if line is not None and line.process == process]
        return " | ".join(own[-lines:])
    return ""


class Follower:
    """Follows a file's new lines, across rotation and truncation. Not thread-safe; never waits."""

    def __init__(self, path: Path) -> None:
        """The file need not exist yet; a later one is read from its start."""
        self._path, self._cut = path, b""
        self._file = self._open()
        if self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def read(self) -> list[bytes]:
        """The whole lines since the last call."""
        data = self._cut + self._read()
        self._file = self._file or self._open()
        with contextlib.suppress(OSError):
            if self._file is not None and not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                data += self._read()  # written between the last read and the rotation
                self._file.close()
                self._file = self._open()
        data += self._read()
        *lines, self._cut = data.split(b"\n")
        return [line + b"\n" for line in lines]

    def _open(self) -> IO[bytes] | None:
        with contextlib.suppress(OSError):
            return self._path.open("rb")
        return None

    def _read(self) -> bytes:
        if self._file is None:
            return b""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
        return self._file.read()
