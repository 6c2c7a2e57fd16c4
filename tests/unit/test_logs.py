"""Logs of children: read from their end, and never longer than they may be."""

from __future__ import annotations

import pathlib
import time

import pytest

from farm.processes import children


def test_of_a_long_log_the_end_is_read(tmp_path: pathlib.Path) -> None:
    """A gigabyte of lines costs no more than the last of them."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.seek(1 << 30)  # a hole, which no disk has to hold
        file.write(b"\nlast but one\nlast \xff\n")
    began = time.process_time()
    assert children.tail(log, 2) == "last but one | last \ufffd"
    assert time.process_time() - began < 0.5
    assert children.tail(tmp_path / "none") == ""


def test_a_log_that_grew_too_long_is_begun_anew(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One older piece is kept, its writer goes on, and short ones are left alone."""
    monkeypatch.setattr(children, "LOG_BYTES", 100)
    log, short = tmp_path / "boards" / "a.log", tmp_path / "short.log"
    short.write_text("x" * 100)
    log.parent.mkdir()
    log.write_text("x" * 101)
    with log.open("a") as writer:
        children.trim_logs(tmp_path)
        writer.write("goes on\n")
    assert log.read_text() == "goes on\n"
    assert (tmp_path / "boards" / "a.log.1").read_text() == "x" * 101
    assert sorted(each.name for each in tmp_path.rglob("*.*")) == ["a.log", "a.log.1", "short.log"]
    assert short.read_text() == "x" * 100
