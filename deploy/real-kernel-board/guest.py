"""Run a board with a real kernel: QEMU's command line, its monitor, snapshots, and a shell on the board over SSH.

Standard library only. What is run is made by `build`. Everything listens on loopback alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cache
import machine
from cache import BuildError

# With two cores of the host busy with other things.
BOOT_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
# Before other programs, as its deadlines are kept on its own clock, which is the host's; only root may.
_NICENESS = -10
# A flush ends in the host's memory, where it outlives QEMU, and does not wait for the host's disk.
_CACHE = "unsafe"
# Below the board's folder, in which the command runs: a socket's path may have 107 characters.
_SHARED = ("-o", "ControlPath=login-%r")
# `fresh`: booted for the first time, nothing of the farm on it.
FRESH = "fresh"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Guest:
    """One board, its disk in `folder`. Not thread-safe. Its starter stops it: leave the `with` block, or `stop`.

    `port` is the host's loopback port that leads to the board's SSH server.
    """

    def __init__(self, board: str, image: Path, folder: Path) -> None:
        """`image`: the folder that `build` prints. What the board has synced survives `cut_power`."""
        self.board, self.image, self.folder = board, image.absolute(), folder.absolute()
        self.key = self.image / "key"
        self.port = _find_free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor: socket.socket | None = None
        self._unread = b""
        self._logins: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        if not self.disk.exists():
            shutil.copy(image / "disk.qcow2", self.disk)

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def disk(self) -> Path:
        return self.folder / "disk.qcow2"

    @property
    def console(self) -> Path:
        """What the kernel and systemd have said since it was started."""
        return self.folder / "console.log"

    def start(self, snapshot: str = "") -> None:
        """Start it, at a snapshot or by booting; return once SSH answers. Raises TimeoutError, RuntimeError."""
        if self._process is not None:
            raise RuntimeError("it runs already")
        path = self.folder / "monitor"
        path.unlink(missing_ok=True)
        command = machine.make_command(self.board, self.image, self.disk, _CACHE, self.port)
        command += ["-serial", f"file:{self.console}", "-qmp", f"unix:{path.name},server=on,wait=off"]
        command += ["-loadvm", snapshot] if snapshot else []
        with (self.folder / "qemu.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        _prefer(self._process.pid)
        try:
            self._connect(path)
            self._wait_for_ssh(ANSWER_TIMEOUT_S if snapshot else BOOT_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def is_running(self) -> bool:
        """Whether the emulator is there; a board that has switched itself off has ended it."""
        return self._process is not None and self._process.poll() is None

    def load(self, snapshot: str) -> None:
        """Put the board back to a snapshot, its disk and memory; return once SSH answers. Starts it if need be."""
        if not self.is_running():
            self._forget()
            self.start(snapshot)
            return
        self._log_out()
        self._say_to_monitor(f"loadvm {snapshot}")
        self.resume()
        self._wait_for_ssh(ANSWER_TIMEOUT_S)

    def save(self, snapshot: str) -> None:
        """Keep the board as it is under a name, which may exist."""
        self._log_out()
        self._say_to_monitor(f"savevm {snapshot}")

    def pause(self) -> None:
        """Stop its processors: it takes no time of the host's."""
        self._ask("stop")

    def resume(self) -> None:
        """Let them go on."""
        self._ask("cont")

    def cut_power(self) -> None:
        """End it at once, as a pulled plug does; `start` boots it from what is on its disk."""
        if self._process is not None:
            self._process.kill()
        self.stop()

    def wait_for_reset(self, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Wait until the board resets itself, as for a reboot, and answers again. Raises TimeoutError."""
        self._log_out()
        deadline = time.monotonic() + timeout_s
        while self._read_line(deadline, "the board to reset").get("event") != "RESET":
            pass
        self._wait_for_ssh(deadline - time.monotonic())

    def stop(self) -> None:
        """End the emulator, however the board is."""
        process = self._process
        self._forget()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _forget(self) -> None:
        self._log_out()
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = self._process = None
        self._unread = b""

    def ssh(self, login: str = "root") -> list[str]:
        """The command that logs in; what to run there follows."""
        options = ["BatchMode=yes", "StrictHostKeyChecking=yes", "LogLevel=ERROR", "ConnectTimeout=30"]
        known = self.folder / "known_hosts"
        public = (self.image / "host_key.pub").read_text().rsplit(" ", 1)[0]
        known.write_text(f"[127.0.0.1]:{self.port} {public}\n")
        options.append(f"UserKnownHostsFile={known}")
        flags = [flag for option in options for flag in ("-o", option)]
        return ["ssh", "-F", "none", *flags, "-i", str(self.key), "-p", str(self.port), f"{login}@127.0.0.1"]

    def run(
        self, command: str, login: str = "root", timeout_s: float = ANSWER_TIMEOUT_S, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command on the board. Raises RuntimeError where it fails, TimeoutExpired.

        The connection stays for the next: logging in costs an emulated processor seconds.
        """
        self._logins.add(login)
        done = subprocess.run(
            [*self.ssh(login), "-o", "ControlMaster=auto", "-o", "ControlPersist=yes", *_SHARED, command],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{command!r} as {login} exits with {done.returncode}: {done.stderr.strip()}")
        return done

    def read(self, path: str) -> str:
        """A file on the board, as root, without the newline at its end."""
        return self.run(f"cat {shlex.quote(path)}").stdout.rstrip("\n")

    def set_fault(self, **parameters: object) -> None:
        """Set parameters of the board's kernel module, `cap_khz=921600` or `rail_mw="4000,500,900"`."""
        folder = "/sys/module/farm_board/parameters"
        self.run("; ".join(f"echo {value} >{folder}/{name}" for name, value in parameters.items()))

    def set_clock(self, seconds: float | None = None) -> None:
        """Set its wall clock, to the host's by default: after a snapshot it is in the past."""
        self.run(f"date -s @{time.time() if seconds is None else seconds:.3f}")

    def _log_out(self) -> None:
        """End the connections that `run` keeps; they do not outlive what the board was when they were made."""
        for login in self._logins:
            command = [*self.ssh(login), *_SHARED, "-O", "exit"]
            subprocess.run(command, cwd=self.folder, capture_output=True, timeout=ANSWER_TIMEOUT_S, check=False)
        self._logins.clear()

    def _wait_for_ssh(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=2.0) as connection,
            ):
                connection.settimeout(max(0.1, min(10.0, deadline - time.monotonic())))
                if connection.recv(4) == b"SSH-":
                    return
            if self._process is not None and self._process.poll() is not None:
                log = (self.folder / "qemu.log").read_text(errors="replace").strip()[-500:]
                raise RuntimeError(f"QEMU ended with {self._process.returncode}: {log}")
            time.sleep(0.1)
        tail = self.console.read_text(errors="replace")[-1000:] if self.console.exists() else ""
        raise TimeoutError(f"SSH does not answer within {timeout_s:g} s; the console's end:\n{tail}")

    def _connect(self, path: Path) -> None:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        self._monitor = socket.socket(socket.AF_UNIX)
        while True:
            try:
                # A socket's path may have 107 characters, and folders of caches and tests have more.
                folder = os.open(path.parent, os.O_PATH)
                try:
                    self._monitor.connect(f"/proc/self/fd/{folder}/{path.name}")
                finally:
                    os.close(folder)
                break
            except OSError:
                if time.monotonic() > deadline or (self._process and self._process.poll() is not None):
                    log = (self.folder / "qemu.log").read_text(errors="replace").strip()[-500:]
                    raise RuntimeError(f"QEMU does not start: {log}") from None
                time.sleep(0.02)
        self._read_line(deadline, "the monitor's greeting")
        self._ask("qmp_capabilities")

    def _ask(self, command: str, **arguments: object) -> Any:
        if self._monitor is None:
            raise RuntimeError("the board does not run")
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        self._monitor.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            answer = self._read_line(deadline, f"the answer to {command}")
            if "error" in answer:
                raise RuntimeError(f"{command}: {answer['error'].get('desc')}")
            if "return" in answer:
                return answer["return"]

    def _say_to_monitor(self, line: str) -> None:
        """Snapshots are the human monitor's: it says what went wrong, and nothing otherwise."""
        if said := self._ask("human-monitor-command", **{"command-line": line}).strip():
            raise RuntimeError(f"{line}: {said}")

    def _read_line(self, deadline: float, what: str) -> dict[str, Any]:
        if self._monitor is None:
            raise RuntimeError("the board does not run")
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._monitor], [], [], left_s)[0]:
                raise TimeoutError(f"waited in vain for {what}")
            got = self._monitor.recv(65536)
            if not got:
                raise RuntimeError("QEMU has ended")
            self._unread += got
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))


def _end_with_parent() -> None:
    """In the emulator, before it is one: it is in a session of its own and would outlive who started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prefer(pid: int) -> None:
    """Let a process that leads a session of its own run before others, as far as we may."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
    # Where sessions share the processors, niceness counts within each alone (sched(7), autogroup).
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(f"{_NICENESS}\n")


def _find_free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Start a board for a person, until Ctrl-C; return an exit code: 0 ended, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="start", description="Start a board with a real kernel; Ctrl-C ends it.")
    parser.add_argument("--board", choices=cache.BOARDS, default=cache.BOARDS[0], help="which (default: %(default)s)")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="keep its disk here (default: it starts anew)")
    options = parser.parse_args(argv)
    try:
        image = cache.require_image(options.board)
        with tempfile.TemporaryDirectory(prefix="real-kernel-") as scratch:
            known = options.disk is not None and (options.disk / "disk.qcow2").exists()
            with Guest(options.board, image, options.disk or Path(scratch)) as guest:
                guest.start("" if known else FRESH)
                guest.set_clock()
                print(shlex.join(guest.ssh()), flush=True)
                print(f"farm board add NAME --ssh farm@127.0.0.1:{guest.port} --key-file {guest.key}", flush=True)
                if guest._process is not None:
                    guest._process.wait()
    except (BuildError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
