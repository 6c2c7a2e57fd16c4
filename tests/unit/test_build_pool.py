"""Compilers that are late, or that nothing can replace just now: what a pool makes of them. Nothing is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from device_agent.protocol import Status
from farm.errors import TransientError
from farm.search.build import build_pool
from farm.search.build.build_pool import BuildPool, BuildResult
from farm.settings import Settings


class NumberedPool(BuildPool[str]):
    """Its compilers are numbers, and a reference is the number of the compiler that is to answer."""

    def __init__(self, size: int, settings: Settings) -> None:
        self.launched, self.has_room = 0, True
        self.killed: list[int] = []
        self.answers: dict[Any, Any] = {}
        super().__init__(size, settings)

    def _launch(self) -> tuple[Any, Any]:
        if not self.has_room:
            raise TransientError("no room")
        self.launched += 1
        return self.launched, ("versions", self.launched)

    def _ask(self, compiler: Any, *order: Any) -> Any:
        return "build", compiler

    def _find_done(self, references: Sequence[Any]) -> list[Any]:
        return [each for each in references if each in self.answers]

    def _fetch(self, reference: Any) -> Any:
        return self.answers.pop(reference)

    def _kill(self, compiler: Any) -> None:
        self.killed.append(compiler)

    def _find_pid(self, compiler: Any) -> int:
        return int(compiler)


def test_a_late_compiler_is_replaced_though_another_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """`look` says why; one that is building has its build's deadline."""
    pool = NumberedPool(2, Settings())
    pool.answers["versions", 1] = "v"
    assert pool.look() == ""
    pool.submit("first", "", {})
    monkeypatch.setattr(build_pool, "START_TIMEOUT_S", 0.0)
    assert "not ready within 0 s" in pool.look()
    assert (pool.killed, pool.pids(), pool.jobs) == ([2], [3], ["first"])


def test_a_result_comes_before_its_compiler_is_replaced() -> None:
    """Where no process can be started, what was built is there all the same, and `look` says why until one can be."""
    pool = NumberedPool(1, Settings(build_recycle_count=1))
    pool.answers["versions", 1] = "v"
    pool.submit("job", "", {})
    pool.answers["build", 1] = BuildResult(Status.OK), 1, 0
    pool.has_room = False
    assert pool.poll() == [("job", BuildResult(Status.OK))]
    assert (pool.killed, pool.free, pool.look(), pool.look()) == ([1], 0, "no room", "no room")
    pool.has_room = True
    assert (pool.look(), pool.pids()) == ("", [2])
