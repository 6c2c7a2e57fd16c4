"""A PostgreSQL server of the tests' own: its cluster in memory or a temporary folder, on a loopback port.

It runs as a user without privileges, which `initdb` asks for, and dies with the process that started it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

import psutil
import psycopg
import pytest

from device_agent.processes import die_with_parent
from tests.ports import find_free_port

REQUIRED = "FARM_REQUIRE_POSTGRESQL"
_START_TIMEOUT_S = 60.0
_PASSWORD = secrets.token_hex(8)
# Nothing in it is worth a sync; a test's own transactions are few.
_OPTIONS = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "100",
    "autovacuum": "off",
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
}
_TEMPLATE = "farm_template"


def find_programs() -> pathlib.Path | None:
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found and (there := shutil.which("initdb")):
        found = [pathlib.Path(there)]
    return found[-1].parent if found else None


class Cluster:
    def __init__(self, port: int, start: Callable[[], subprocess.Popen[bytes]], log: pathlib.Path) -> None:
        self.port, self._start, self._log = port, start, log
        self._numbers = itertools.count()
        self._has_template = False

    def start(self) -> None:
        from tests import children  # pytest's to load: a plug-in

        self.process = self._start()
        children.own(self.process.pid)
        _wait_ready(self, self._log)

    def stop(self) -> None:
        """Crash it; what it holds is on disk, since without fsync its recovery may lose rows."""
        assert self.process.poll() is None, f"a test ended the server of all tests:\n{self._log.read_text()}"
        with psycopg.connect(self.owner, autocommit=True) as connection:
            connection.execute("CHECKPOINT")
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(20)

    def freeze(self, signal_: signal.Signals) -> None:
        """Stop or continue the server with all its backends, as a host does that is suspended."""
        for each in [*psutil.Process(self.process.pid).children(), psutil.Process(self.process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a backend that has just ended
                each.send_signal(signal_)

    @property
    def owner(self) -> str:
        return self.locate("postgres")

    def locate(self, name: str) -> str:
        return f"postgresql://farm@127.0.0.1:{self.port}/{name}"

    def make(self, *, empty: bool = True, like: str = "template0") -> str:
        """A new database and its URL; unless `empty` a store's, with nothing in it."""
        if not empty:
            like = self._require_template()
        name = f"test_{next(self._numbers)}"
        self.run(f"CREATE DATABASE {name} TEMPLATE {like}")
        if not empty:  # no two stores are the same
            self.run("UPDATE identity SET id = md5(random()::text)", self.locate(name))
        return self.locate(name)

    def copy(self, url: str) -> str:
        name = url.rpartition("/")[2]
        self.run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")  # noqa: S608
        return self.make(like=name)

    def drop(self, url: str) -> None:
        self.run(f"DROP DATABASE IF EXISTS {url.rpartition('/')[2]} WITH (FORCE)")

    def run(self, statement: str, url: str = "") -> None:
        """One statement, as the server's owner."""
        with psycopg.connect(url or self.owner, autocommit=True) as connection:
            connection.execute(statement.encode())

    def _require_template(self) -> str:
        if not self._has_template:
            from farm.store import Store

            self.run(f"CREATE DATABASE {_TEMPLATE}")
            Store(self.locate(_TEMPLATE)).close()
            self._has_template = True
        return _TEMPLATE


@contextlib.contextmanager
def running(**changed: str) -> Iterator[Cluster]:
    """Start a server and stop it; `changed` are settings of its own.

    Skips, or fails where `FARM_REQUIRE_POSTGRESQL` is set, where there is none.
    """
    programs = find_programs()
    if programs is None:
        text = "no PostgreSQL server is installed (Debian: the package postgresql)"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{text}, but {REQUIRED} is set")
        pytest.skip(text)
    user = _find_user()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="farm-postgresql-", dir=_find_memory()))
    os.environ["PGPASSWORD"] = _PASSWORD
    try:
        secret = folder / "password"
        secret.write_text(_PASSWORD)
        if user is not None:
            for path in (folder, secret):
                shutil.chown(path, user.pw_name)
        data = folder / "data"
        locale = ["--locale=C.UTF-8", "--encoding=UTF8"]
        if int(programs.parts[-2]) >= 15:  # an order of texts that is a language's, as most servers have
            locale += ["--locale-provider=icu", "--icu-locale=en"]
        initdb = [programs / "initdb", "--no-sync", "--auth=scram-sha-256", f"--pwfile={secret}", "--username=farm"]
        _run([*initdb, *locale, f"--pgdata={data}"], user)
        port = find_free_port()
        settings = [part for name, value in (_OPTIONS | changed).items() for part in ("-c", f"{name}={value}")]
        parent = os.getpid()

        def start() -> subprocess.Popen[bytes]:
            with (folder / "log").open("ab") as log:
                return subprocess.Popen(
                    [programs / "postgres", "-D", data, "-p", str(port), *settings],
                    cwd=folder,
                    stdout=log,
                    stderr=log,
                    preexec_fn=lambda: die_with_parent(parent),
                    **_as_user(user),
                )

        cluster = Cluster(port, start, folder / "log")
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_memory() -> pathlib.Path | None:
    """A folder in memory with room for a cluster: there a database is made in a tenth of a disk's processor time."""
    memory = pathlib.Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 << 30 else None


def _find_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "daemon"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    pytest.fail("PostgreSQL does not run as root, and there is no user postgres or daemon")


def _as_user(user: pwd.struct_passwd | None) -> dict[str, object]:
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _run(command: list[object], user: pwd.struct_passwd | None) -> None:
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=120, cwd="/", **_as_user(user)
    )
    assert done.returncode == 0, done.stderr


def _wait_ready(cluster: Cluster, log: pathlib.Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            cluster.run("SELECT 1")
            return
        except psycopg.OperationalError as error:
            if cluster.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"PostgreSQL did not start:\n{log.read_text()}") from error
            time.sleep(0.05)
