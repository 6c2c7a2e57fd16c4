"""Run shell scripts on a board over SSH, as root if possible; changes of one installation are serialised."""

from __future__ import annotations

import shlex

from farm.connectivity.ssh import SshConnection
from farm.errors import PermanentError, TransientError
from farm.provision.layout import Layout

# An interrupted run may still be active on the board for its step's time.
LOCK_TIMEOUT_S = 60.0
# The exit code for `flock -E` if the lock is held; EX_TEMPFAIL of sysexits.h.
_LOCKED = 75
# SSH commands get a short PATH on some systems. As root only these are used, as under sudo: the agent's user may not
# even see a Python in root's home.
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BoardShell:
    """Runs scripts on one board. `as_root`: as root; `sudo`: through sudo."""

    def __init__(self, connection: SshConnection, as_root: bool = False, sudo: bool = False) -> None:
        self.connection = connection
        self._as_root = as_root
        self._sudo = sudo

    def run(self, script: str, timeout_s: float, what: str) -> str:
        """Run a POSIX script and return its output; the first failing command ends it.

        Raises PermanentError with the board's message, DeadlineError, BoardLostError.
        """
        return self._run(f"sh -c {shlex.quote(self._prepare(script))}", timeout_s, what)

    def change(self, layout: Layout, script: str, timeout_s: float, what: str) -> str:
        """As `run`, for a script that changes the installation: waits for another change.

        The prefix must exist. Raises TransientError if the other change does not end in time.
        """
        lock = shlex.quote(layout.below(".lock"))
        # -o: background processes of the script must not keep the lock. Mode 600: another user who can open the lock
        # could hold it.
        own = f"(umask 077; : >>{lock}) && chmod 600 {lock}"
        script = shlex.quote(self._prepare(script))
        held = f"{own} && exec flock -o -w {int(LOCK_TIMEOUT_S)} -E {_LOCKED} {lock} sh -c {script}"
        return self._run(f"sh -c {shlex.quote(held)}", timeout_s + LOCK_TIMEOUT_S, what)

    def _prepare(self, script: str) -> str:
        return f"set -eu\numask 022\nLC_ALL=C; export LC_ALL\n{script}"

    def _run(self, command: str, timeout_s: float, what: str) -> str:
        command = f"{'sudo -n ' if self._sudo else ''}env {_PATH}{'' if self._as_root else ':$PATH'} {command}"
        code, out, err = self.connection.exec(command, timeout_s)
        if code == 0:
            return out.decode("utf-8", "replace")
        said = " | ".join(err.decode("utf-8", "replace").strip().splitlines()[-5:]) or f"exit code {code}"
        where = f"{what} on {self.connection.address}"
        if code == _LOCKED:
            raise TransientError(
                f"{where} had to wait for another change of it for more than {LOCK_TIMEOUT_S:g} s", "Try again later."
            )
        if "No space left on device" in said or "os error 28" in said or "Disk quota exceeded" in said:
            raise PermanentError(f"the disk is full: {where} failed: {said}", "Free some space on the board.")
        if "Read-only file system" in said:
            raise PermanentError(f"the disk is read-only: {where} failed: {said}", "Look at it; it may be worn out.")
        raise PermanentError(f"{where} failed: {said}")


def join_lines(*lines: str) -> str:
    """A script of several lines."""
    return "\n".join(lines) + "\n"
