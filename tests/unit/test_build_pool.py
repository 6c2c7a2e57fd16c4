"""Compilers that are late, or that nothing can replace just now: what a pool makes of them. Nothing is started."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest

from device_agent.protocol import Status
from farm.errors import TransientError
from farm.search.codegen import build_pool
from farm.search.codegen.build_pool import BuildPool, BuildResult
from farm.settings import Settings


class Numbered:
    """Compilers that are numbers, and answer when their calls are settled."""

    def __init__(self) -> None:
        self.launched, self.has_room = 0, True
        self.killed: list[int] = []
        self.calls: dict[tuple[str, int], Future[Any]] = {}

    def launch(self) -> Any:
        if not self.has_room:
            raise TransientError("no room")
        self.launched += 1
        number = self.launched
        self.settle("pid", number, number)
        return mock.Mock(call=lambda method, *_: self.call(method, number), kill=lambda: self.killed.append(number))

    def call(self, method: str, number: int) -> Future[Any]:
        return self.calls.setdefault((method, number), Future())

    def settle(self, method: str, number: int, answer: Any) -> None:
        self.call(method, number).set_result(answer)


def test_a_late_compiler_is_replaced_though_another_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """`look` says why; one that is building has its build's deadline."""
    numbered = Numbered()
    pool: BuildPool[str] = BuildPool(2, Settings(), numbered.launch)
    numbered.settle("load", 1, "v")
    assert pool.look() == ""
    pool.submit("first", "", {})
    later_s = time.monotonic() + build_pool.START_TIMEOUT_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert "not ready within 120 s" in pool.look()
    assert (numbered.killed, pool.pids(), pool.jobs) == ([2], [3], ["first"])


def test_a_result_comes_before_its_compiler_is_replaced() -> None:
    """Where no process can be started, what was built is there all the same, and `look` says why until one can be."""
    numbered = Numbered()
    pool: BuildPool[str] = BuildPool(1, Settings(build_recycle_count=1), numbered.launch)
    numbered.settle("load", 1, "v")
    pool.submit("job", "", {})
    numbered.settle("build", 1, (BuildResult(Status.OK), 1, 0))
    numbered.has_room = False
    assert pool.poll() == [("job", BuildResult(Status.OK))]
    assert (numbered.killed, pool.free, pool.look(), pool.look()) == ([1], 0, "no room", "no room")
    numbered.has_room = True
    assert (pool.look(), pool.pids()) == ("", [2])
