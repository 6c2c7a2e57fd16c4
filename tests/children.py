"""Fail each core test that leaves a child process, a zombie included: the next test of its process would meet it.

A plug-in of pytest, by `tests/conftest.py`. Fixtures of a wider scope own what they start.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from device_agent import processes

# A child that ends by itself, as its pipe is closed, has so long.
END_TIMEOUT_S = 10.0
# Python's own, one for each process until it ends.
_PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_BEFORE = pytest.StashKey[set[int]]()
_owned: set[int] = set()


def own(pid: int) -> None:
    """Let a child live on past the test that started it: a fixture of a wider scope ends it."""
    _owned.add(pid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    before = set(processes.find_children())
    try:
        return (yield)
    finally:
        _owned.update(set(processes.find_children()) - before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = set(processes.find_children())
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if item.get_closest_marker("core") is None:
        return
    if left := _wait_for_end(item.stash[_BEFORE] | _owned):
        pytest.fail(f"children left behind: {'; '.join(map(_end, sorted(left)))}", pytrace=False)


def _wait_for_end(known: set[int]) -> set[int]:
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := {pid for pid in set(processes.find_children()) - known if not _is_pythons_own(pid)}:
        if time.monotonic() > deadline or all(_is_zombie(pid) for pid in left):
            return left
        time.sleep(0.02)
    return left


def _is_pythons_own(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(name in part for part in psutil.Process(pid).cmdline() for name in _PYTHONS_OWN)
    return False


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return False


def _end(pid: int) -> str:
    """Describe a child, kill it and reap it."""
    try:
        child = psutil.Process(pid)
        said = f"{pid} {child.name()} ({child.status()})"
        with contextlib.suppress(psutil.Error):
            said += f" {' '.join(child.cmdline())[:200]}"
        child.kill()
    except psutil.NoSuchProcess:
        return f"{pid}, which has ended"
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return said
