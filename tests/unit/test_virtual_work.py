"""What calls cost this machine: established as the least of several batches, kept by content."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from device_agent.protocol import Engine, Limits, MeasureSpec, RunSpec, TensorSpec
from farm.virtual.pace import name_content
from farm.virtual.work import Work, WorkBook, establish, split_work


class Machine:
    """A machine on which a call costs `call_s`, and batches wait for other programs as `busy` says (factors)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_s: float, busy: Iterator[float], helpers: int = 0) -> None:
        self._call_s, self._busy, self._helpers = call_s, busy, helpers
        self._wall_s = self._cpu_s = self._helpers_s = 0.0
        self.calls = 0
        monkeypatch.setattr(time, "monotonic", lambda: self._wall_s)
        monkeypatch.setattr(time, "process_time", lambda: self._cpu_s + self._helpers_s)
        monkeypatch.setattr(time, "thread_time", lambda: self._cpu_s)

    def run(self, calls: int) -> float:
        factor = next(self._busy, 1.0)
        self.calls += calls
        self._cpu_s += calls * self._call_s * (1 + (factor - 1) / 10)
        self._helpers_s += calls * self._call_s * self._helpers
        self._wall_s += calls * self._call_s * factor
        return self._call_s * factor


def test_the_least_of_batches_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that was busy with something else half of the time makes no difference. Two threads that share a call are
    seen to do so on a machine that keeps them waiting all the time. A call that takes longer than all of the time
    there is counts as it is.
    """
    assert split_work(2.0, 1.0, 1) == split_work(1.0, 1.0, 1) == Work(1.0, 0.0)
    assert split_work(1.0, 2.0, 2) == Work(0.0, 2.0)
    assert split_work(1.0, 1.5, 2) == Work(0.5, 1.0)
    machine = Machine(monkeypatch, 1e-3, iter([9.0, 4.0, 3.0, 1.0, 5.0, 2.5, 1.005, 8.0, 7.0, 1.001, 9.0]))
    assert establish(machine.run, 0, 1).alone_s == pytest.approx(1e-3)
    machine = Machine(monkeypatch, 1e-3, itertools.repeat(1.9), helpers=1)
    assert establish(machine.run, 0, 2).shared_s == pytest.approx(2e-3, rel=0.1)
    machine = Machine(monkeypatch, 3.0, iter(()))
    assert establish(machine.run, 0, 1, 2.0).alone_s == pytest.approx(3.0)
    assert machine.calls == 1


def test_batches_of_short_calls_are_long_enough_for_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of two microseconds is timed by thousands of calls, one of a second by a few."""
    short = Machine(monkeypatch, 2e-6, iter(()))
    assert establish(short.run, 0, 1).alone_s == pytest.approx(2e-6)
    assert short.calls > 2000
    long = Machine(monkeypatch, 1.0, iter(()))
    assert establish(long.run, 0, 1).alone_s == pytest.approx(1.0)
    assert long.calls <= 4


def test_what_is_kept_never_changes(tmp_path: Path) -> None:
    """The first to keep a key decides, for every book over the folder; another key is not known."""
    first, second = WorkBook(tmp_path), WorkBook(tmp_path)
    assert first.find("ab") is None
    assert first.keep("ab", Work(0.1, 0.2)) == Work(0.1, 0.2)
    assert second.keep("ab", Work(0.05, 0.1)) == second.find("ab") == Work(0.1, 0.2)
    assert second.find("cd") is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ab.json"]


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"alone_s": -1, "shared_s": 0}', '{"alone_s": 0, "shared_s": 0}'])
def test_half_a_file_is_replaced(tmp_path: Path, text: str) -> None:
    """What cannot be read is not known, and does not stand in the way of what is."""
    path = tmp_path / "ab" / "ab.json"
    path.parent.mkdir()
    path.write_text(text)
    book = WorkBook(tmp_path)
    assert book.find("ab") is None
    assert book.keep("ab", Work(0.1, 0.0)) == book.find("ab") == Work(0.1, 0.0)


def test_a_book_without_a_folder_or_with_a_full_one_keeps_nothing(tmp_path: Path) -> None:
    """The work counts all the same."""
    (tmp_path / "file").write_text("")
    for book in (WorkBook(None), WorkBook(tmp_path / "file")):
        assert book.keep("ab", Work(0.1, 0.0)) == Work(0.1, 0.0)
        assert book.find("ab") is None


def arrays(seed: int, shape: tuple[int, ...] = (1, 3), dtype: str = "float32", name: str = "x") -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **{name: np.random.default_rng(seed).standard_normal(shape).astype(dtype)})  # type: ignore[arg-type]
    return buffer.getvalue()


def test_one_program_costs_the_same_whatever_it_is_given() -> None:
    """Values of inputs, what they are called, and the seed of arguments change nothing; shapes and types do."""
    spec = RunSpec(Engine.RELAX_VM)
    key = name_content(spec, (b"program", arrays(1)), "2")
    assert name_content(spec, (b"program", arrays(2)), "2") == key
    assert name_content(spec, (b"program", arrays(1, name="data")), "2") == key
    others = {
        name_content(spec, (b"program", arrays(1, (2, 3))), "2"),
        name_content(spec, (b"program", arrays(1, dtype="float64")), "2"),
        name_content(spec, (b"program", arrays(1)), "1"),
        name_content(spec, (b"other", arrays(1)), "2"),
        name_content(spec, (b"program", b"no archive"), "2"),
    }
    assert len(others | {key}) == 6
    tensor = (TensorSpec((8, 8), "float32"),)
    assert name_content(MeasureSpec(tensor, seed=1), (b"p",), "1") == name_content(MeasureSpec(tensor), (b"p",), "1")


def test_content_is_what_decides_what_a_call_costs() -> None:
    """Library, arguments, threads and engine make another content; how long is measured does not."""
    arguments = (TensorSpec((8, 8), "float32"),)
    spec = MeasureSpec(arguments)
    key = name_content(spec, (b"library",), "2")
    longer = MeasureSpec(arguments, repeat=9, min_repeat_s=1.0, limits=Limits(timeout_s=99))
    assert name_content(longer, (b"library",), "2") == key
    others = {
        name_content(spec, (b"other",), "2"),
        name_content(spec, (b"library",), "1"),
        name_content(MeasureSpec((TensorSpec((8, 9), "float32"),)), (b"library",), "2"),
        name_content(RunSpec(Engine.KERNEL), (b"library", b""), "2"),
        name_content(RunSpec(Engine.KERNEL), (b"", b"library"), "2"),
        name_content(RunSpec(Engine.RELAX_VM), (b"library", b""), "2"),
    }
    assert len(others | {key}) == 7
