"""Shell scripts run on a board over SSH, as root where that is had, one installation's changes one at a time."""

from __future__ import annotations

import shlex

from farm.connectivity.ssh import SshConnection
from farm.errors import PermanentError, TransientError
from farm.provision.layout import Layout

# A run that was cut off may still be at work on the board for as long as its step was given.
LOCK_TIMEOUT_S = 60.0


# What `flock -E` is told to answer where another one holds the lock; EX_TEMPFAIL of sysexits.h.
_LOCKED = 75


# A login over SSH that runs a command gets a short PATH on some systems. As root nothing else is looked at, as sudo
# does it: what root has in its home, a Python for one, the agent's user may not even see.
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BoardShell:
    """Runs scripts on one board. `as_root`: they are to be root's; `sudo`: which takes sudo."""

    def __init__(self, connection: SshConnection, as_root: bool = False, sudo: bool = False) -> None:
        self.connection = connection
        self._as_root = as_root
        self._sudo = sudo

    def run(self, script: str, timeout_s: float, what: str) -> str:
        """What a POSIX script prints; it is ended by its first command that fails.

        Raises PermanentError with what the board said, DeadlineError, BoardLostError.
        """
        return self._run(f"sh -c {shlex.quote(self._prepare(script))}", timeout_s, what)

    def change(self, layout: Layout, script: str, timeout_s: float, what: str) -> str:
        """The same for a script that changes the installation: it waits for another that does, if there is one.

        The prefix must be there. Raises TransientError where the other one does not end in time.
        """
        lock = shlex.quote(layout.below(".lock"))
        # -o: what a script leaves running in the background must not go on holding the lock.
        # Another user of the board who could open the lock could hold it.
        own = f"(umask 077; : >>{lock}) && chmod 600 {lock}"
        script = shlex.quote(self._prepare(script))
        held = f"{own} && exec flock -o -w {int(LOCK_TIMEOUT_S)} -E {_LOCKED} {lock} sh -c {script}"
        command = f"sh -c {shlex.quote(held)}"
        return self._run(command, timeout_s + LOCK_TIMEOUT_S, what)

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
