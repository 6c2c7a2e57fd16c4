"""Where the time of a run goes: seconds, processor seconds, processes, Ray starts and links, per test and fixture.

A plug-in of pytest, by `tests/conftest.py`; a run by several workers writes `build/durations.json`. The controller
looks at the workers' processes twice a second and counts them for the test that their worker runs: what lives shorter
is missed, and what a fixture of the whole run started counts where it works.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests import together

PATH = pathlib.Path(__file__).parents[1] / "build" / "durations.json"
_LOOK_S = 0.5
# Names of what is dear: Ray's first process, and a linker.
_RAY, _LINKERS = "gcs_server", ("zig", "ld.lld")
_WORKER = "PYTEST_XDIST_WORKER"
_BEGAN = pytest.StashKey[float]()
# Of this worker's current test: fixture, scope, seconds.
_fixtures: list[tuple[str, str, float]] = []


@dataclasses.dataclass
class TestCost:
    """What a test costs. `processor_s` is of its worker and of all processes that were seen, in s."""

    __test__ = False

    setup_s: float = 0.0
    call_s: float = 0.0
    teardown_s: float = 0.0
    processor_s: float = 0.0
    processes: int = 0
    ray_starts: int = 0
    links: int = 0
    runs: int = 0

    @property
    def wall_s(self) -> float:
        """All phases together."""
        return self.setup_s + self.call_s + self.teardown_s


class Watch:
    """The costs of all tests, kept by the controller."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.tests: dict[str, TestCost] = collections.defaultdict(TestCost)
        self.fixtures: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        # By what a process runs: how many there were, and their processor time.
        self.programs: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        # By process and its start: its worker, what it runs, and its processor time at the last look.
        self._seen: dict[tuple[int, float], tuple[str | None, str, float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="durations", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the looks."""
        self._end.set()
        self._thread.join()

    def add(self, report: Any) -> None:
        """Count a phase of a test, as its worker reports it."""
        cost = self.tests[report.nodeid]
        name = f"{report.when}_s"
        setattr(cost, name, getattr(cost, name) + report.duration)
        cost.runs += report.when == "teardown"
        properties = dict(report.user_properties) if report.when == "teardown" else {}
        cost.processor_s += properties.get("processor_s", 0.0)
        for fixture, scope, seconds in properties.get("fixtures", ()):
            self.fixtures[fixture, scope].append(seconds)

    def to_document(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "wall_s": round(time.monotonic() - self.began, 1),
            "programs": [
                {"program": name, "processes": int(count), "processor_s": round(used_s, 1)}
                for name, (count, used_s) in self.programs.items()
            ],
            "fixtures": [
                {"fixture": name, "scope": scope, "setups": len(each), "wall_s": round(sum(each), 3)}
                for (name, scope), each in self.fixtures.items()
            ],
            "tests": [
                {"test": name, "wall_s": round(cost.wall_s, 3)}
                | {key: round(value, 3) for key, value in dataclasses.asdict(cost).items()}
                for name, cost in self.tests.items()
            ],
        }

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_S):
            own = {process.pid for process in psutil.Process().children()}
            now = {path.name: path.read_text() for path in _folder().iterdir()} if _folder().is_dir() else {}
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    self._look(process, own, now)

    def _look(self, process: psutil.Process, own: set[int], now: dict[str, str]) -> None:
        key = (process.pid, process.create_time())
        is_new = key not in self._seen
        if is_new:
            # Workers report their own times.
            worker = None if process.pid in own else process.environ().get(_WORKER)
            self._seen[key] = (worker, "", 0.0)
        worker, program, before = self._seen[key]
        if worker is None or not (test := now.get(worker)):
            return
        times, cost = process.cpu_times(), self.tests[test]
        used_s = times.user + times.system
        cost.processor_s += used_s - before
        # A process becomes another program a moment after it began.
        program = program if before else name_program(process)
        self.programs[program][1] += used_s - before
        self._seen[key] = (worker, program, used_s)
        if is_new:
            self.programs[program][0] += 1
            name = process.name()
            cost.processes += 1
            cost.ray_starts += name == _RAY
            cost.links += name in _LINKERS


def name_program(process: psutil.Process) -> str:
    """Name what a process runs: a module, a script, a role that it has named itself by, or a file."""
    words = process.cmdline() or [process.name()]
    name = pathlib.Path(words[0].split(" ")[0]).name
    if not name.startswith("python"):
        return name.split(" ")[0]
    if "-m" in words[1:-1]:
        return " ".join(words[words.index("-m") + 1 :][:2])
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return pathlib.Path(script).name if script.endswith(".py") or "/" in script else "python -c"


_watch: Watch | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    global _watch
    if not hasattr(session.config, "workerinput") and session.config.getoption("numprocesses", None):
        _folder().mkdir(exist_ok=True)
        _watch = Watch()


def pytest_runtest_logreport(report: Any) -> None:
    if _watch is not None:
        _watch.add(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _watch is not None:
        _watch.close()
        save(str(session.config.getoption("markexpr", "")), _watch.to_document())


def save(chosen: str, document: dict[str, Any]) -> None:
    """Keep a run of the tests that `chosen` (`-m`) names beside those of others; a run of all replaces them."""
    runs: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() and chosen else {}
    runs.pop("", None)
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(runs | {chosen: document}, indent=1) + "\n", encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        name = f"{fixturedef.baseid}::{fixturedef.argname}"
        _fixtures.append((name, str(fixturedef.scope), time.perf_counter() - began))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    item.stash[_BEGAN] = time.process_time()
    if worker := os.environ.get(_WORKER):
        (_folder() / worker).write_text(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[Any]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("processor_s", time.process_time() - item.stash[_BEGAN]))
        report.user_properties.append(("fixtures", list(_fixtures)))
        _fixtures.clear()
    return report


def _folder() -> pathlib.Path:
    """Where each worker notes the test that it runs."""
    return together.run_folder() / "now"
