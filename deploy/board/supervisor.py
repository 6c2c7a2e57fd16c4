"""Keep the agent and the clock helper running on a board without systemd. Standard library only.

`tvm-farm-board start|stop|status|run`, a script in the installation's `bin`, calls this. `etc/board.json` says what to
run. Nothing here starts at boot.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import grp
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

# As the units for systemd have it.
AGENT_PAUSE_S, HELPER_PAUSE_S = 2.0, 0.2
# The helper restores clocks before it ends, which may take this long.
STOP_TIMEOUT_S = 15.0
START_TIMEOUT_S = 10.0
LOG_BYTES = 4 << 20
_TICK_S = 1.0
# The most log text kept while the disk is full.
_UNSAID_BYTES = 1 << 16
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_NOT_RUNNING = 3


class Service:
    """One program that is started again whenever it ends."""

    def __init__(self, name: str, command: list[str], user: str, pause_s: float, log: Path, tmp: Path) -> None:
        self.name = name
        self.restarts = 0
        self._command = command
        self._user = user
        self._pause_s = pause_s
        self._log = log
        self._tmp = tmp
        self._due = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the running process, None where there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def step(self) -> None:
        """Start it if it does not run and its pause is over."""
        if self._process is not None and self._process.poll() is not None:
            say(f"{self.name} ended with {self._process.returncode}; it is started again")
            self._process = None
            self.restarts += 1
            self._due = time.monotonic() + self._pause_s
        if self._process is None and time.monotonic() >= self._due:
            try:
                self._start()
            except (OSError, subprocess.SubprocessError) as error:
                say(f"{self.name} cannot be started: {error}")
                self.restarts += 1
                self._due = time.monotonic() + self._pause_s

    def _start(self) -> None:
        account: dict[str, Any] = {}
        if self._user:
            entry = pwd.getpwnam(self._user)
            groups = os.getgrouplist(self._user, entry.pw_gid)
            account = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self._tmp), "TMPDIR": str(self._tmp)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | {"LANG": "C.UTF-8"},
                cwd="/",
                umask=0o077,
                start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS),
                **account,
            )
        say(f"{self.name} started, pid {self._process.pid}")

    def stop(self) -> None:
        """End it; kill it if it does not end."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            say(f"{self.name} did not end within {STOP_TIMEOUT_S:g} s and is killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None


class Supervisor:
    """The services of one installation, `prefix`, and their state files.

    Processes come before files: on a full disk all services go on, and those that end are started again.
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._run = prefix / "run"
        self._logs = prefix / "log"
        self._config: dict[str, Any] = json.loads((prefix / "etc" / "board.json").read_text())
        self._services: list[Service] = []
        self._is_noted = False
        self._written = ""
        self._troubles: dict[str, str] = {}

    def run(self, lock: IO[str]) -> int:
        """Keep everything running until a signal ends it. The caller holds `lock`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        say(f"supervisor started, pid {os.getpid()}")
        while True:
            if not self._services:
                self._try("the services cannot be prepared", self._prepare)
            for service in self._services:
                service.step()
            self._try("the process number cannot be written", lambda: self._note_pid(lock))
            self._try("the state cannot be written", self._write_state)
            self._try("the logs cannot be trimmed", self._trim_logs)
            say_unsaid()
            got = signal.sigtimedwait(_SIGNALS, _TICK_S)
            if got is not None and got.si_signo != signal.SIGCHLD:
                break
        # The agent first: the helper then restores what the agent's session held.
        for service in reversed(self._services):
            service.stop()
        self._try("the state cannot be removed", lambda: (self._run / "state.json").unlink(missing_ok=True))
        say("supervisor ended")
        return 0

    def _try(self, what: str, act: Callable[[], None]) -> None:
        """Run it. Report an error, as on a full disk, once, and its end; the next turn tries again."""
        try:
            act()
        except OSError as error:
            if self._troubles.get(what) != str(error):
                self._troubles[what] = str(error)
                say(f"{what}: {error}")
        else:
            if self._troubles.pop(what, ""):
                say(f"no longer: {what}")

    def _prepare(self) -> None:
        self._services = self._make_services()

    def _note_pid(self, lock: IO[str]) -> None:
        if self._is_noted:
            return
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{os.getpid()}\n".encode())
        self._is_noted = True

    def _make_services(self) -> list[Service]:
        user = self._config["user"]
        python = str(self._prefix / "current" / "bin" / "python")
        tmp = self._prefix / "tmp"
        make_folder(tmp, user, user, 0o700)
        # Left by a session that was killed with the board's power.
        for path in tmp.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        services = []
        options = ["--exit-with-parent", *self._config["agent"]]
        if self._config["helper"]:
            socket, state = self._run / "helper" / "clock-helper.sock", self._prefix / "state"
            make_folder(self._run / "helper", "", user, 0o750)
            make_folder(state, "", "", 0o700)
            command = [python, "-I", "-m", "device_agent.clocks.helper", "--exit-with-parent", "--socket", str(socket)]
            command += ["--state-dir", str(state), "--group", user]
            services.append(Service("helper", command, "", HELPER_PAUSE_S, self._logs / "clock-helper.log", tmp))
            options += ["--clock-helper", str(socket)]
        fences = self._prefix / "agent-state"
        make_folder(fences, user, user, 0o700)
        command = [python, "-m", "device_agent", "serve", *options, "--state-dir", str(fences)]
        services.append(Service("agent", command, user, AGENT_PAUSE_S, self._logs / "agent.log", tmp))
        return services

    def _write_state(self) -> None:
        """Write the state where it changed: a full disk is then met rarely."""
        state = {service.name: {"pid": service.pid, "restarts": service.restarts} for service in self._services}
        text = json.dumps({"pid": os.getpid(), "services": state}) + "\n"
        if text != self._written:
            write_whole(self._run / "state.json", text)
            self._written = text

    def _trim_logs(self) -> None:
        """Keep one older piece of each log; its writer has it open for appending and goes on."""
        for log in self._logs.glob("*.log"):
            if log.stat().st_size > LOG_BYTES:
                older = log.with_name(log.name + ".1")
                # Made anew, the older piece would need room for two of them for a moment.
                older.unlink(missing_ok=True)
                try:
                    shutil.copyfile(log, older)
                except OSError:
                    older.unlink(missing_ok=True)
                    raise
                os.truncate(log, 0)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 1 failed, 2 wrong usage, 3 not running."""
    parser = argparse.ArgumentParser(prog="tvm-farm-board", description="Keep the board's agent running.")
    parser.add_argument("--prefix", type=Path, required=True, metavar="DIR", help="the installation")
    parser.add_argument("verb", choices=("start", "stop", "status", "run"))
    chosen = parser.parse_args(argv)
    prefix: Path = chosen.prefix
    for folder in (prefix / "run", prefix / "log"):
        folder.mkdir(mode=0o755, exist_ok=True)
    with (prefix / "run" / "supervisor.pid").open("a+") as lock:
        # Only the owner may open the lock: another user could hold it.
        with contextlib.suppress(OSError):
            os.fchmod(lock.fileno(), 0o600)
        if chosen.verb == "status":
            return show_status(prefix, lock)
        if chosen.verb == "stop":
            return stop(lock)
        if not take(lock):
            print("it runs already")
            return 0 if chosen.verb == "start" else 1
        if chosen.verb == "run":
            return Supervisor(prefix).run(lock)
        return start(prefix, lock)


def start(prefix: Path, lock: IO[str]) -> int:
    """Go to the background and keep things running; the caller returns once that has begun."""
    supervisor = Supervisor(prefix)
    read, write = os.pipe()
    if (child := os.fork()) != 0:
        os.close(write)
        with os.fdopen(read) as answer:
            begun = answer.read()
        os.waitpid(child, 0)
        return 0 if begun else 1
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    code = 1
    try:
        os.close(read)
        os.chdir("/")
        nowhere = os.open(os.devnull, os.O_RDONLY)
        log = os.open(prefix / "log" / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(nowhere, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # Other descriptors belong to the caller: an SSH channel, a lock.
        keep = {0, 1, 2, lock.fileno(), write}
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - keep:
            with contextlib.suppress(OSError):
                os.close(number)
        os.write(write, b"begun")
        os.close(write)
        code = supervisor.run(lock)
    except BaseException:  # noqa: BLE001 - edge: the exit below would hide why
        say(traceback.format_exc())
    finally:
        # Never back into what the caller was doing.
        os._exit(code)


def stop(lock: IO[str]) -> int:
    """Tell the supervisor to end, and wait until it has."""
    if take(lock):
        print("it does not run")
        return 0
    pid = read_pid(lock)
    for number, timeout_s in ((signal.SIGTERM, 2 * STOP_TIMEOUT_S + 5), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if take(lock):
                return 0
            time.sleep(0.05)
    print(f"the supervisor, pid {pid}, does not end", file=sys.stderr)
    return 1


def show_status(prefix: Path, lock: IO[str]) -> int:
    """Print what runs, as JSON."""
    if take(lock):
        print(json.dumps({"pid": None, "services": {}}))
        return _NOT_RUNNING
    with contextlib.suppress(OSError):
        print((prefix / "run" / "state.json").read_text(), end="")
    return 0


def take(lock: IO[str]) -> bool:
    """Take the lock that a running supervisor holds; False where one does."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_pid(lock: IO[str]) -> int:
    """Return the process that holds the lock. It writes its number right after it takes it."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        lock.seek(0)
        if text := lock.read().strip():
            return int(text)
        time.sleep(0.05)
    raise SystemExit("a supervisor holds its lock and does not say who it is")


def make_folder(path: Path, user: str, group: str, mode: int) -> None:
    """Make a folder that a user owns; empty names leave it ours."""
    path.mkdir(exist_ok=True)
    path.chmod(mode)
    uid = pwd.getpwnam(user).pw_uid if user else -1
    gid = grp.getgrnam(group).gr_gid if group else -1
    os.chown(path, uid, gid)


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


_unsaid = bytearray()


def say(text: str) -> None:
    """Write a line to the supervisor's log; on a full disk it waits for room."""
    _unsaid.extend(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())
    del _unsaid[:-_UNSAID_BYTES]
    say_unsaid()


def say_unsaid() -> None:
    """Write the lines that waited for room."""
    with contextlib.suppress(OSError):
        while _unsaid:
            del _unsaid[: os.write(1, _unsaid)]


if __name__ == "__main__":
    sys.exit(main())
