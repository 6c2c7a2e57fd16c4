"""Jobs on their way to a worker that was forked before: what both share is not copied."""

from __future__ import annotations

import functools
import os
import pathlib

import pytest

from device_agent.kept import Orders
from device_agent.marks import Marks


def take(marks: Marks, value: bytes) -> bytes:
    """A job: leaves a note."""
    marks.set("cpu_s", len(value))
    return value


def test_a_job_arrives_as_it_was_sent(tmp_path: pathlib.Path) -> None:
    """Marks, which cannot be copied, are the same memory; everything else is the job's own; no file stays."""
    marks = Marks()
    orders = Orders(tmp_path, (marks,))
    orders.send(functools.partial(take, marks, b"x" * 100_000), "more")
    found = orders.receive()
    assert found is not None
    assert found[0]() == b"x" * 100_000
    assert marks.read().cpu_s == 100_000
    assert found[1:] == ("more",)
    assert list(tmp_path.iterdir()) == []
    orders.close(orders.writing)
    assert orders.receive() is None
    orders.close()


def test_a_job_for_a_worker_that_is_gone_is_an_error(tmp_path: pathlib.Path) -> None:
    """Nobody waits for an answer."""
    orders = Orders(tmp_path, ())
    orders.close(orders.reading)
    with pytest.raises(OSError, match="Broken pipe"):
        orders.send(os.getpid)
    orders.close(orders.writing)
