"""One form of line for the logs of the farm's own processes, written and read: a JSON object each, with the ids of what
it is about. What others write into logs (TVM's tracker, boards' agents) is read as well as it can be.

Files are followed in `log_files`, and put together in `log_merge`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import logging.handlers
import math
import os
import re
import time
from pathlib import Path
from typing import Any

from farm import folders

# What a line may be about: given as `extra={"board": name}` where something is logged.
IDS = ("campaign", "board")
_BYTES, _KEPT = 4 << 20, 3
# A line of an agent, and of the farm before its logs had this form.
_DATED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)", re.DOTALL)
_LEVELLED = re.compile(r"(?:[\w.-]+(?:\[\d+\])? )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[ :]")


@dataclasses.dataclass(frozen=True)
class LogLine:
    """A line of whatever source. `at` is seconds since the epoch, None where the line does not say; `process` is who
    wrote it, `level` in lower case, `kind` what an event of the store is called. Ids that it does not give are "".
    """

    at: float | None
    process: str
    text: str
    level: str = "info"
    pid: int | None = None
    campaign: str = ""
    board: str = ""
    kind: str = ""

    def to_document(self) -> dict[str, Any]:
        """As `--json` has it: ids and the like only where there are some."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value not in ("", None)}

    def is_about(self, campaign: str, board: str) -> bool:
        """Whether it is about all of these that are not empty: by its ids, or because its text names them."""
        pairs = ((campaign, self.campaign), (board, self.board))
        return all(not wanted or wanted == own or names(self.text, wanted) for wanted, own in pairs)


def names(text: str, name: str) -> bool:
    """Whether a text holds a name as a whole: nano-1 is not in nano-10."""
    return name in text and re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", text) is not None


class LineFormatter(logging.Formatter):
    """Makes a record a line. A traceback is a part of its text."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line without its end."""
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
        return json.dumps(document, ensure_ascii=False)


def start_log(process: str, path: Path | None, *, rotated: bool = False, foreground: bool = False) -> None:
    """Have everything that this process logs go to a file in this form; None: to stderr.

    `rotated`: the file is this process's alone, which moves it aside at 4 MiB and keeps three. Else whoever else
    appends to it may, and `children.trim_logs` keeps it short. With `foreground` people read stderr, too.
    """
    handler: logging.Handler = logging.StreamHandler()
    if path is not None:
        folders.make_private(path.parent)
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        if rotated:
            handler.close()
            handler = logging.handlers.RotatingFileHandler(
                path, maxBytes=_BYTES, backupCount=_KEPT, encoding="utf-8", errors="backslashreplace"
            )
    handler.setFormatter(LineFormatter(process))
    handlers = [handler]
    if foreground:
        handlers.append(logging.StreamHandler())
        handlers[-1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.getLogger("paramiko").setLevel(logging.WARNING)


def read_line(raw: bytes, process: str, board: str = "") -> LogLine:
    """A line of a log: in the farm's form, or as an agent dates it, or any other. Nothing that is in it can fail.

    `process` and `board` are whose log it is.
    """
    text = raw.decode(errors="replace").rstrip("\r\n")
    if text.startswith("{") and (line := _read_document(text, process, board)) is not None:
        return line
    if found := _DATED.match(text):
        second, millisecond, level, rest = found.groups()
        try:
            at = time.mktime(time.strptime(second, "%Y-%m-%d %H:%M:%S")) + int(millisecond) / 1000
            return LogLine(at, process, rest, level.lower(), board=board)
        except (ValueError, OverflowError):
            pass
    found = _LEVELLED.match(text)
    return LogLine(None, process, text, found.group(1).lower() if found else "info", board=board)


def _read_document(text: str, process: str, board: str) -> LogLine | None:
    try:
        document = json.loads(text)
        at, pid = float(document["at"]), document.get("pid")
        if not math.isfinite(at):
            return None
        ids = {name: str(document.get(name) or "") for name in IDS}
        ids["board"] = ids["board"] or board
        return LogLine(
            at,
            str(document.get("process") or process),
            str(document["text"]),
            str(document.get("level") or "info"),
            pid if isinstance(pid, int) else None,
            **ids,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def make_readable(line: LogLine) -> str:
    """A line for people: when, who, about what, what. It may be several lines; what is in it is not made harmless."""
    when = "" if line.at is None else time.strftime("%Y-%m-%d %H:%M:%S", _local(line.at))
    when += "" if line.at is None else f".{int(line.at * 1000) % 1000:03d}"
    about = " ".join(filter(None, (line.campaign, line.board)))
    level = "" if line.level == "info" else f"{line.level.upper()} "
    kind = f"{line.kind}: " if line.kind else ""
    text = line.text.replace("\n", "\n    ")
    return f"{when:23} {line.process:8} {f'[{about}] ' if about else ''}{level}{kind}{text}"


def _local(at: float) -> time.struct_time:
    try:
        return time.localtime(at)
    except (OverflowError, OSError, ValueError):
        return time.localtime(0)


def name_process(path: Path) -> str:
    """Who writes a log, by the name of its file: services for services.log.1."""
    return os.fspath(path.name).split(".", 1)[0]
