"""`farm` as a child that is forked from a process which has loaded it: starting Python and the farm takes a second.

What runs is the console script's `main`, with the arguments, environment, folder and files that a shell would give it,
in a session of its own. Only `/proc/PID/cmdline` and `environ` are those of the process that it was forked from.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import pathlib
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

FARM = pathlib.Path(sys.executable).with_name("farm")
_MOST_BYTES = 128 << 10
_START_S = 60.0


def start(
    arguments: Sequence[str], env: Mapping[str, str], cwd: pathlib.Path, stdout: IO[bytes], stderr: IO[bytes]
) -> Forked | subprocess.Popen[bytes]:
    if all(os.environ.get(name) == env.get(name) for name in {*env, *os.environ} if name.startswith("PYTHON")):
        return Forked(arguments, env, cwd, stdout, stderr)
    return subprocess.Popen(
        [str(FARM), *arguments],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


class Forked:
    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], cwd: pathlib.Path, stdout: IO[bytes], stderr: IO[bytes]
    ) -> None:
        self.args, self.returncode = [str(FARM), *arguments], None
        self._words, word = os.pipe()
        try:
            order = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": str(cwd)}).encode()
            assert len(order) < _MOST_BYTES
            socket.send_fds(_server(), [order], [stdout.fileno(), stderr.fileno(), word])
        finally:
            os.close(word)
        self.pid = self._read(_START_S)
        assert self.pid is not None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; that of a signal is negative. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(self._read(timeout))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._words)

    def _read(self, timeout_s: float | None) -> int:
        if not select.select([self._words], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout_s or 0.0)
        return int(os.read(self._words, 12))


@functools.cache
def _server() -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Alone in its session, so that no Ctrl-C reaches it. Readline, which pytest loads, sets COLUMNS for children that
    # get no environment.
    words = [sys.executable, __file__, str(its.fileno())]
    process = subprocess.Popen(words, env=dict(os.environ), pass_fds=[its.fileno()], start_new_session=True)
    its.close()
    from tests import children  # not for the server, whose path lacks it

    children.own(process.pid)
    _to_end.append((ours, process))
    return ours


_to_end: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


def end_server() -> None:
    for orders, process in _to_end:
        orders.close()
        process.wait(10)
    _to_end.clear()
    _server.cache_clear()


def _serve(orders: socket.socket) -> None:
    """Fork for each order; returns in each child, which is then to run the command. Ends with its parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps watchers
    while True:
        order, files, _, _ = socket.recv_fds(orders, _MOST_BYTES, 3)
        if not order:
            os._exit(0)
        if os.fork() == 0 and _watch(files[2]):
            orders.close()
            _become(json.loads(order), *files)
            return
        for file in files:
            os.close(file)


def _watch(word: int) -> bool:
    """Fork the child, in which this is True; the watcher says its number and, once it has ended, how."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        return True
    os.write(word, b"%-12d" % pid)
    _, status = os.waitpid(pid, 0)
    os.write(word, b"%-12d" % status)
    os._exit(0)


def _become(order: dict[str, object], out: int, err: int, word: int) -> None:
    os.setsid()
    os.chdir(str(order["cwd"]))
    os.environ.clear()
    os.environ.update(order["env"])  # type: ignore[call-overload]
    time.tzset()
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        for file, number in ((nothing.fileno(), 0), (out, 1), (err, 2)):
            os.dup2(file, number)
    for file in (out, err, word):
        os.close(file)
    random.seed()  # else two children would draw the same numbers
    sys.argv = [str(FARM), *order["arguments"]]  # type: ignore[misc]
    sys.path[0] = str(FARM.parent)


def _leave(end: SystemExit) -> None:
    """What Python does at its end, but for freeing what is loaded, page by page of what is shared until then."""
    assert end.code is None or isinstance(end.code, int)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        os._exit(120)
    os._exit(end.code or 0)


if __name__ == "__main__":
    # As `farm` sets them before it loads anything.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from farm.cli.main import main, make_app

    make_app()
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        main()
    except SystemExit as end:
        _leave(end)
