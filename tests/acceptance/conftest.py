"""The installed commands as child processes, in a home of their own; a mark they carry shows who is left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
import unittest.mock
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import typer.testing

from farm.cli.main import make_app
from tests.acceptance.forks import FARM as FARM
from tests.acceptance.forks import Forked, start
from tests.ports import find_free_port
from tests.together import share_what_is_built

# A machine that runs other things as well takes ten times the usual.
PATIENCE_S = 240.0
# A helper of Python's own (multiprocessing's resource tracker) sees that its parent has ended, and ends a moment later.
LINGER_S = 90.0
# A look at all processes takes 10 ms of a core: what runs beside it needs them.
_LOOK_S = 0.05
_MARK = "FARM_TEST_MARK"
# Modules that lie in the folder of every command, as beside a downloaded model, and note who imports them.
_HOSTILE = ("json", "random", "platform", "farm", "device_agent", "numpy", "tvm", "ray")
_IMPORTED = "imported"
# Commands that make the home, and build in it.
_BUILDERS = ("campaign", "quickstart", "sweep", "tune", "up")


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:g} s for {what}")
        select.select([], [], [], _LOOK_S)
    return value


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    seconds: float

    def json(self) -> Any:
        return json.loads(self.out)


@dataclasses.dataclass
class Running:
    process: Forked | subprocess.Popen[bytes]
    out_path: pathlib.Path
    err_path: pathlib.Path
    started: float

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.err or self.process.poll() is not None, f"{text!r} on stderr")
        assert text in self.err, self.err

    def send(self, number: signal.Signals, group: bool = False) -> None:
        """Send a signal to the process or, as a terminal does for Ctrl-C, to its whole group."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def wait(self, timeout_s: float = PATIENCE_S) -> Done:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s:g} s; its stderr: {self.err}")
        return Done(code, self.out_path.read_text(), self.err, time.monotonic() - self.started)


class Home:
    """A FARM_HOME, a temporary folder and a mark for every process that belongs to it."""

    def __init__(self) -> None:
        # Short: Ray's sockets lie below it, and a socket's path may have 107 characters.
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
        self.temporary = self.path / "t"
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        for name in _HOSTILE:
            (self.path / f"{name}.py").write_text(f"open({str(self.path / _IMPORTED)!r}, 'a').write(__name__ + ' ')")
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("FARM_")} | {
            "FARM_HOME": str(self.path / "home"),
            "TMPDIR": str(self.temporary),
            "FARM_ZIG_CACHE": os.environ["FARM_ZIG_CACHE"],
            "FARM_TRACKER_PORT": str(find_free_port()),
            _MARK: self.mark,
        }
        self._count = 0
        self._started: list[psutil.Process] = []

    def start(self, *arguments: str, **environment: str) -> Running:
        """Start `farm` in a process group of its own, as a shell does; see `forks`."""
        self._count += 1
        self._share_what_is_built(arguments[0] if arguments else "")
        out, err = (self.path / f"{self._count}.{name}" for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = start(arguments, self.environment | environment, self.path, stdout, stderr)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._started.append(psutil.Process(process.pid))
        return Running(process, out, err, time.monotonic())

    def run(self, *arguments: str, timeout_s: float = PATIENCE_S, **environment: str) -> Done:
        return self.start(*arguments, **environment).wait(timeout_s)

    def call(self, *arguments: str, **environment: str) -> Done:
        """Run `farm` within this process, for what ends before it starts anything: a child takes a second to begin."""
        began, folder = time.monotonic(), pathlib.Path.cwd()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)}
        os.chdir(self.path)
        try:
            with unittest.mock.patch.dict(os.environ, self.environment | environment, clear=True):
                done = typer.testing.CliRunner().invoke(make_app(*arguments[:1]), arguments)
        finally:
            os.chdir(folder)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Done(done.exit_code, done.stdout, done.stderr, time.monotonic() - began)

    def _share_what_is_built(self, noun: str) -> None:
        home = pathlib.Path(self.environment["FARM_HOME"])
        with contextlib.suppress(OSError):  # it has a folder of its own, or none can be made
            if noun in _BUILDERS:
                home.mkdir(mode=0o700, exist_ok=True)
            if home.is_dir():
                share_what_is_built(home)

    def processes(self) -> list[psutil.Process]:
        """Every living process that this home's commands have started, however far down."""
        self._started = [process for process in self._started if _lives(process)]
        found = list(self._started)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self.mark and _lives(process) and process not in found:
                    found.append(process)
        return found

    def expect_no_processes(self) -> None:
        wait_until(lambda: not self.processes(), "every process to be gone", LINGER_S)

    def rows(self, query: str) -> list[Any]:
        """Read from the store while others write it; nothing where there is no store yet."""
        database = pathlib.Path(self.environment["FARM_HOME"]) / "farm.db"
        with contextlib.suppress(sqlite3.OperationalError):
            connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
            with contextlib.closing(connection):
                return connection.execute(query).fetchall()
        return []

    def count_trials(self) -> int:
        rows = self.rows("SELECT count(*) FROM trials")
        return int(rows[0][0]) if rows else 0

    def lock_is_free(self) -> bool:
        import fcntl

        with (self.temporary / f"tvm-farm-{os.getuid()}.lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def remove_hostile_modules(self) -> None:
        """Make the folder fit for a script in it, which looks for modules beside itself."""
        for name in _HOSTILE:
            (self.path / f"{name}.py").unlink()

    def expect_no_imports(self) -> None:
        """Fail if any process of the commands has imported a module from the folder that they were started in."""
        imported = self.path / _IMPORTED
        assert not imported.exists(), f"imported from the current folder: {imported.read_text()}"

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.path, ignore_errors=True)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def new_home() -> Iterator[Home]:
    home = Home()
    try:
        yield home
        home.expect_no_imports()
    finally:
        home.close()


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as home:
        yield home
