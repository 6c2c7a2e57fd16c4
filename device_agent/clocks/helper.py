"""The clock helper: `python -m device_agent.clocks.helper --socket S --state-dir D`. Standard library only; for root.

Two processes guard each other. The guardian holds the listening socket and touches no clock; its child serves
(`server.py`). The guardian kills a child that is dead or silent for GUARD_TIMEOUT_S; the next child first restores the
snapshot on disk, as at boot. A child without its guardian restores and exits with 1, and systemd restarts both.
"""

from __future__ import annotations

import argparse
import contextlib
import grp
import logging
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from device_agent.clocks.server import BEAT_S, READY, BeatingTree, Heart, Server
from device_agent.clocks.transaction import Transaction, has_snapshot, lock_state, write_unsafe
from device_agent.errors import BusyError
from device_agent.sysfs import open_tree

DEFAULT_GROUP = "tvm-farm"
# A child silent for this long is killed and replaced.
GUARD_TIMEOUT_S = 1.0
# A killed process is gone within milliseconds; one stuck in a driver may stay, and the next one need not wait.
_KILL_TIMEOUT_S = 0.3
# A predecessor without its guardian is still restoring.
_LOCK_TIMEOUT_S = 3.0
_MAX_FAILED_STARTS = 5
_FAILED_START_PAUSE_S = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_log = logging.getLogger("clock-helper")


class Guardian:
    """Keep one serving child, and have the clocks restored after each child's death."""

    def __init__(self, listener: socket.socket, state_dir: Path, root: str, parent: int | None) -> None:
        self._listener = listener
        self._state_dir = state_dir
        self._root = root
        self._parent = parent
        self._wakeup = catch_signals()
        self._stopping = ""
        self._hung_restores = 0
        self._failed_starts = 0
        self._seen_ready = False
        self._pid = 0

    def run(self) -> int:
        """Guard until stopped; return the exit code."""
        while True:
            heart = self._start_child()
            ready, how = self._watch(heart)
            heart.close()
            self._end_child()
            if self._stopping and not (has_snapshot(self._state_dir) and how and self._failed_starts == 0):
                return 0
            self._failed_starts = 0 if ready else self._failed_starts + 1
            _log.error("the serving process %s%s", how or "ended", "" if ready else " before it was ready")
            if not ready and how == "fell silent":
                self._hung_restores += 1
                if self._hung_restores == 2:  # the first may have been a SIGSTOP
                    self._mark_unsafe("restoring the clocks hangs; a driver does not answer, reboot the board")
            elif ready:
                self._hung_restores = 0
            if self._failed_starts >= _MAX_FAILED_STARTS and has_snapshot(self._state_dir):
                self._mark_unsafe("the clock helper fails again and again before the clocks are restored; see its log")
            if self._failed_starts >= _MAX_FAILED_STARTS or (not ready and not self._seen_ready and not how):
                return 1
            if not ready:
                time.sleep(_FAILED_START_PAUSE_S)

    def _start_child(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        # A signal between fork and the child's handlers would count as one to the guardian.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                ours.close()
                self._wakeup.close()
                _run_child(theirs, self._listener, self._state_dir, self._root)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        with contextlib.suppress(OSError):  # both sides set the group; the later call may fail
            os.setpgid(pid, pid)
        theirs.close()
        ours.setblocking(False)
        self._pid = pid
        if self._stopping:
            os.kill(pid, signal.SIGTERM)
        return ours

    def _watch(self, heart: socket.socket) -> tuple[bool, str]:
        """Watch the child until it is gone or silent; return whether it was ready, and how it ended."""
        poll = select.poll()
        poll.register(heart, select.POLLIN)
        if not self._stopping:
            poll.register(self._wakeup, select.POLLIN)
        ready, heard_s = False, time.monotonic()
        while True:
            events = dict(poll.poll(BEAT_S * 1000))
            if heart.fileno() in events:
                # Read everything before judging: this process may have been stopped itself.
                try:
                    message = heart.recv(1 << 16)
                except ConnectionResetError:
                    message = b""
                if not message:
                    return ready, self._describe_end()
                heard_s = time.monotonic()
                if READY in message and not ready:
                    ready = self._seen_ready = True
                    notify("READY=1")
                notify("WATCHDOG=1")
            elif time.monotonic() - heard_s > GUARD_TIMEOUT_S:
                return ready, "fell silent"
            if not self._stopping and (why := self._find_reason_to_stop(self._wakeup.fileno() in events)):
                _log.info("ending: %s", why)
                self._stopping = why
                poll.unregister(self._wakeup)
                notify("STOPPING=1")
                os.kill(self._pid, signal.SIGTERM)  # not reaped yet, so the pid cannot be reused

    def _find_reason_to_stop(self, signalled: bool) -> str:
        if signalled:
            return "told to"
        if self._parent is not None and os.getppid() != self._parent:
            return "the parent is gone"
        return ""

    def _describe_end(self) -> str:
        """How a child that hung up ended; "" if it exited by itself."""
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while time.monotonic() < deadline_s:
            end = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                if end.si_code == os.CLD_EXITED:
                    return ""
                return f"was killed by signal {end.si_status}"
            time.sleep(0.002)
        return "hung up"

    def _end_child(self) -> None:
        """Kill the child and its processes (nvpmodel); its pid stays reserved until it is reaped here."""
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self._pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while time.monotonic() < deadline_s:
            # An earlier child that was stuck in a driver may have ended as well.
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(-1, os.WNOHANG)[0] == self._pid:
                    return
            time.sleep(0.002)
        _log.error("process %d does not end: it is stuck in a driver", self._pid)

    def _mark_unsafe(self, reason: str) -> None:
        _log.error("UNSAFE: %s", reason)
        with contextlib.suppress(OSError):
            write_unsafe(self._state_dir, reason)


def _run_child(guardian: socket.socket, listener: socket.socket, state_dir: Path, root: str) -> NoReturn:
    """Restore what was left, then serve. Exit codes: 0 stopped, 1 orphaned or unable to start."""
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        wakeup = catch_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        heart = Heart(guardian)
        heart.beat()
        transaction = Transaction(BeatingTree(open_tree(root), heart), state_dir, heart.aside)
        for note in transaction.recover():
            _log.warning("restored what was left behind: %s", note)
        if transaction.unsafe:
            _log.error("UNSAFE: %s", transaction.unsafe)
        heart.send(READY)
        why = Server(listener, transaction, heart).serve(guardian, wakeup)
        _log.info("served until %s", why)
        code = 0 if why == "told to end" else 1
    except Exception:  # noqa: BLE001  the edge of a process
        _log.exception("the serving process fails")
    finally:
        os._exit(code)


def catch_signals() -> socket.socket:
    """Make the stop signals wake a socket; return it."""
    wakeup, ring = socket.socketpair()
    ring.setblocking(False)
    signal.set_wakeup_fd(ring.detach(), warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    return wakeup


def notify(state: str) -> None:
    """Notify systemd, if it started this process. Protocol: sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] in ("/", "@"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), socket.MSG_DONTWAIT, address.replace("@", "\0", 1))


def open_listener(path: str, group: str | None) -> socket.socket:
    """Open the listening socket for its owner and `group` only. `group` None: DEFAULT_GROUP if it exists.

    Raises BusyError if another helper serves it, OSError, KeyError for an unknown group.
    """
    gid = None
    with contextlib.ExitStack() as stack:
        if group is None:
            stack.enter_context(contextlib.suppress(KeyError))
        gid = grp.getgrnam(group or DEFAULT_GROUP).gr_gid
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            probe.connect(path)
            raise BusyError(f"another clock helper serves {path} already")
    # Replace a killed helper's socket atomically: a client that finds no socket gives up.
    coming = f"{path}.new"
    Path(coming).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    old_mask = os.umask(0o177)  # no client may connect before the group is set
    try:
        listener.bind(coming)
    finally:
        os.umask(old_mask)
    if gid is not None:
        try:
            os.chown(coming, -1, gid)
            os.chmod(coming, 0o660)  # noqa: PTH101
        except PermissionError:
            _log.warning("not allowed to give %s to its group; only this user may connect", path)
    listener.listen(128)
    listener.setblocking(False)
    Path(coming).rename(path)
    return listener


def wait_for_lock(state_dir: Path) -> int | None:
    """Lock the state folder; None if it cannot be made, then no transaction can begin. Raises BusyError."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            return lock_state(state_dir)
        except OSError as error:
            _log.error("no clocks can be held: %s", error)
            return None
        except BusyError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def main(arguments: list[str] | None = None) -> int:
    """Run the helper; return its exit code: 0 stopped, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="device_agent.clocks.helper", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--socket", required=True, help="where to listen")
    parser.add_argument("--state-dir", required=True, type=Path, help="where snapshots are kept; survives a reboot")
    parser.add_argument("--root", default="/", help="the folder with /sys in it (default: /)")
    parser.add_argument("--group", help=f"who may connect (default: {DEFAULT_GROUP} if there is such a group)")
    parser.add_argument("--exit-with-parent", action="store_true", help="restore and end when the parent process ends")
    chosen = parser.parse_args(arguments)
    parent = os.getppid() if chosen.exit_with_parent else None
    logging.basicConfig(level=logging.INFO, format="%(name)s[%(process)d] %(levelname)s %(message)s", stream=sys.stderr)
    try:
        lock = wait_for_lock(chosen.state_dir)
        listener = open_listener(chosen.socket, chosen.group)
    except (BusyError, OSError, KeyError) as error:
        print(f"clock-helper: {error}", file=sys.stderr)
        return 1
    try:
        return Guardian(listener, chosen.state_dir, chosen.root, parent).run()
    finally:
        Path(chosen.socket).unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
