"""The log of a home: one form, written by several processes and read; what is logged after it is rotated."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import pathlib

import pytest

from farm.cli import logs
from farm.processes.home_log import Follower, LineFormatter, LogFilter, LogLine, read_end, read_line, read_log
from farm.store import Store
from farm.values import Virtual


def write(path: pathlib.Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def make_line(at: float, process: str, text: str) -> str:
    return json.dumps({"at": at, "process": process, "text": text, "level": "info"})


def test_what_is_logged_is_read_as_it_was() -> None:
    """Time, level, process, ids and a traceback survive; the line is one, with any text."""
    record = logging.makeLogRecord({"msg": "two\nlines %s", "args": ("\x1b[2J",), "levelname": "WARNING"})
    record.board, record.created = "nano-01", 1764000000.25
    raw = LineFormatter("services").format(record)
    assert "\n" not in raw
    line = read_line(raw.encode())
    assert (line.at, line.level, line.process, line.board, line.text) == (
        *(1764000000.25, "warning", "services", "nano-01"),
        "two\nlines \x1b[2J",
    )
    assert line.pid == os.getpid()
    assert "[nano-01] WARNING two\n    lines" in line.to_text()
    assert json.loads(json.dumps(line.to_document())).keys() == {"at", "process", "text", "level", "pid", "board"}


@pytest.mark.parametrize(
    "raw",
    [b"plain\n", b'{"at": "1e999", "text": "x"}', b'{"at": 1e300, "text": "x"}', b'{"at": 5}', b"[" * 5000, b"\xff"],
)
def test_what_is_no_line_of_ours_is_skipped(raw: bytes) -> None:
    """Reading cannot fail for any content of a file."""
    assert read_line(raw) is None


def test_a_line_is_about_what_it_names() -> None:
    """By its id or in its text, whole: nano-1 is not nano-10, nor nano-1.b."""
    line = LogLine(1.0, "engine", "working on nano-1: b2 waits.", campaign="vision")
    assert LogFilter("vision", "nano-1").takes(line)
    assert LogFilter("b2").takes(line)
    assert not LogFilter(board="nano").takes(line)
    assert not LogFilter(board="nano-1").takes(LogLine(1.0, "engine", "nano-10 nano-1.b"))
    assert [LogFilter(since=at).takes(line) for at in (0.5, 1.5)] == [True, False]


def test_older_pieces_are_read_first(tmp_path: pathlib.Path) -> None:
    """Those that rotation left; the last lines of one process come from the newest."""
    write(tmp_path / "farm.log.1", make_line(1, "engine", "old"))
    write(tmp_path / "farm.log", make_line(2, "services", "up"), make_line(3, "engine", "new"))
    assert [line.text for line in read_log(tmp_path, LogFilter())] == ["old", "up", "new"]
    assert (read_end(tmp_path, "services"), read_end(tmp_path / "none", "services")) == ("up", "")


def test_a_follower_loses_nothing_when_a_log_is_moved_aside(tmp_path: pathlib.Path) -> None:
    """Every line comes once and in order; what was there before does not."""
    path = tmp_path / "farm.log"
    write(path, "before")
    follower = Follower(path)
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=60, backupCount=3)
    got: list[bytes] = []
    for number in range(60):
        handler.emit(logging.makeLogRecord({"msg": f"line {number:02}"}))
        got += follower.read()
    assert got == [f"line {number:02}\n".encode() for number in range(60)]
    handler.close()
    follower.close()


def test_a_follower_goes_on_with_a_log_that_was_emptied(tmp_path: pathlib.Path) -> None:
    """Half a line waits for its end; a log that appears is read from its start."""
    path, late = tmp_path / "a.log", tmp_path / "late.log"
    write(path, "old")
    follower, waiting = Follower(path), Follower(late)
    write(path, "one", "two")
    assert follower.read() == [b"one\n", b"two\n"]
    os.truncate(path, 0)
    write(path, "4")
    with path.open("a") as file:
        file.write("fi")
    assert follower.read() == [b"4\n"]
    write(path, "ve")
    assert follower.read() == [b"five\n"]
    assert waiting.read() == []
    write(late, "here")
    assert waiting.read() == [b"here\n"]


def test_events_of_the_store_are_among_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Boards' and others', in order of time with what was logged; the last lines are shown."""
    monkeypatch.setenv("FARM_HOME", str(tmp_path))
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs" / "farm.log", make_line(100, "services", "sim-1 is up"), make_line(101, "engine", "other"))
    with Store(tmp_path / "farm.db") as store:
        store.boards.register("sim-1", "jetson-nano", Virtual(0))
        store.events.add("board_taken", "jetson-nano/sim-1", "lease 1")
        store.events.add("campaign_running", "vision", "nothing of sim-10")
    logs.logs(board="sim-1", campaign="", lines=100, since="", follow=False, json=True)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["process"], each.get("kind"), each.get("board")) for each in found] == [
        ("services", None, None),
        ("store", "registered", "sim-1"),
        ("store", "board_taken", "sim-1"),
    ]
    logs.logs(board="", campaign="", lines=1, since="1h", follow=False, json=True)
    assert json.loads(capsys.readouterr().out)["kind"] == "campaign_running"
