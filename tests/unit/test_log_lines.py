"""Lines of logs: one form, written and read; files that are followed while they are kept short; all of them merged."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import pathlib
import time

import pytest

from farm.processes import children
from farm.processes.log_files import Follower, read_ends
from farm.processes.log_lines import LineFormatter, LogLine, make_readable, name_process, read_line
from farm.processes.log_merge import Following, Wanted, read_last
from farm.store import Store
from farm.values import Virtual


def write(path: pathlib.Path, *lines: str) -> None:
    """Append lines."""
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def test_what_is_logged_is_read_as_it_was() -> None:
    """Time, level, process, ids and a traceback survive; the line is one, whatever is in it."""
    record = logging.makeLogRecord({"msg": "two\nlines %s", "args": ("\x1b[2J",), "levelname": "WARNING"})
    record.board, record.created = "nano-01", 1764000000.25
    raw = LineFormatter("services").format(record)
    assert "\n" not in raw
    line = read_line(raw.encode(), "file")
    assert (line.at, line.level, line.process, line.board, line.text) == (
        *(1764000000.25, "warning", "services", "nano-01"),
        "two\nlines \x1b[2J",
    )
    assert line.pid == os.getpid()
    assert "[nano-01] WARNING two\n    lines" in make_readable(line)
    assert json.loads(json.dumps(line.to_document())).keys() == {"at", "process", "text", "level", "pid", "board"}


@pytest.mark.parametrize(
    ("raw", "level", "text", "dated"),
    [
        (b"2026-11-24 20:26:59,411 ERROR cannot listen\n", "error", "cannot listen", True),
        (b"clock-helper[12] WARNING slow\n", "warning", "clock-helper[12] WARNING slow", False),
        (b"Traceback (most recent call last):\r\n", "info", "Traceback (most recent call last):", False),
        (b'{"at": "1e999", "text": "x"}', "info", '{"at": "1e999", "text": "x"}', False),
        (b'{"at": 5}', "info", '{"at": 5}', False),
        (b"[" * 5000, "info", "[" * 5000, False),
        (b"\xff\xfe", "info", "\ufffd\ufffd", False),
        (b"9999-99-99 99:99:99,999 INFO x", "info", "9999-99-99 99:99:99,999 INFO x", False),
    ],
)
def test_any_line_is_read(raw: bytes, level: str, text: str, dated: bool) -> None:
    """Agents' own form, what dates nothing, and what only pretends to be ours."""
    line = read_line(raw, "agent", "nano-01")
    assert (line.level, line.text, line.at is not None, line.board) == (level, text, dated, "nano-01")


def test_a_line_is_about_what_it_names() -> None:
    """By its id or in its text, whole: nano-1 is not nano-10, nor nano-1.b."""
    line = LogLine(1.0, "engine", "working on nano-1: b2 waits.", campaign="vision")
    assert line.is_about("vision", "nano-1")
    assert line.is_about("b2", "")
    assert not line.is_about("", "nano")
    assert not LogLine(1.0, "engine", "nano-10 nano-1.b").is_about("", "nano-1")
    assert name_process(pathlib.Path("services.log.1")) == "services"


def test_a_follower_loses_nothing_when_logs_are_moved_aside(tmp_path: pathlib.Path) -> None:
    """Every line comes once and in order, also where a log was moved aside more than once between two looks."""
    path = tmp_path / "services.log"
    write(path, "before")
    follower = Follower(path)
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=60, backupCount=3)
    got: list[bytes] = []
    for number in range(60):
        handler.emit(logging.makeLogRecord({"msg": f"line {number:02}"}))
        if number % 10 == 9:
            got += follower.read()
    assert got == [f"line {number:02}\n".encode() for number in range(60)]
    assert len(list(tmp_path.iterdir())) == 4
    assert read_ends(path, 20) == [b"line 58\n", b"line 59\n"]
    assert len(read_ends(path, 1 << 20)) > 20
    handler.close()
    follower.close()


def test_a_follower_goes_on_with_a_log_that_was_emptied(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had not read is in the copy; half a line waits for its end; a log that appears is read from its start."""
    monkeypatch.setattr(children, "LOG_BYTES", 10)
    path, late = tmp_path / "a.log", tmp_path / "late.log"
    write(path, "old")
    follower, waiting = Follower(path), Follower(late, from_start=True)
    write(path, "one", "two")
    assert follower.read() == [b"one\n", b"two\n"]
    write(path, "three")
    children.trim_logs(tmp_path)
    assert path.read_bytes() == b""
    write(path, "4")
    with path.open("a") as file:
        file.write("fi")
    assert follower.read() == [b"three\n", b"4\n"]
    write(path, "ve")
    assert follower.read() == [b"five\n"]
    assert waiting.read() == []
    write(late, "here")
    assert waiting.read() == [b"here\n"]


@pytest.fixture
def logs(tmp_path: pathlib.Path) -> pathlib.Path:
    """Logs of three processes, out of order among each other."""
    (tmp_path / "boards").mkdir()
    for name, at, text in (("services", 100, "up"), ("engine", 103, "vision begins"), ("services", 105, "ending")):
        write(tmp_path / f"{name}.log", json.dumps({"at": at, "process": name, "text": text, "level": "info"}))
    write(tmp_path / "tracker.log", "no time at all")
    os.utime(tmp_path / "tracker.log", (101, 101))
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(104))
    write(tmp_path / "boards" / "sim-1.log", f"{stamp},500 INFO ready", "and more")
    return tmp_path


def test_logs_are_merged_in_order_of_time(logs: pathlib.Path) -> None:
    """Lines without a time go with the one before them; a board's log is about the board."""
    lines = read_last(logs, None, Wanted(), 100)
    assert [line.text for line in lines] == [
        *("up", "no time at all", "vision begins", "ready", "and more", "ending"),
    ]
    assert [line.text for line in read_last(logs, None, Wanted(board="sim-1"), 100)] == ["ready", "and more"]
    assert [line.text for line in read_last(logs, None, Wanted(campaign="vision"), 100)] == ["vision begins"]
    assert [line.text for line in read_last(logs, None, Wanted(since=104.9), 100)] == ["ending"]
    assert [line.text for line in read_last(logs, None, Wanted(), 2)] == ["and more", "ending"]


def test_events_of_the_store_are_among_them(logs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Boards' and others', before and while they are followed; logs that appear are followed, too."""
    with Store(tmp_path / "farm.db") as store:
        store.register_board("sim-1", "jetson-nano", Virtual(0))
        last = read_last(logs, store, Wanted(board="sim-1"), 1)
        assert [(line.process, line.kind, line.board) for line in last] == [("store", "registered", "sim-1")]
        following = Following(logs, store, Wanted(board="sim-1"))
        store.add_event("board_taken", "jetson-nano/sim-1", "lease 1")
        store.add_event("campaign_running", "vision", "nothing of sim-10")
        write(logs / "boards" / "sim-1.log", "hello")
        write(logs / "new.log", "sim-1 is new", "others are not")
        following._new_at = 0.0
        assert {line.text for line in following.take()} == {"lease 1", "hello", "sim-1 is new"}
        assert following.take() == []
        following.close()
