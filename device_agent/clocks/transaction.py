"""One transaction at a time over a tree: begin with a snapshot on disk, write, end with everything put back.

Also the state folder: the snapshot and `unsafe.json`. `LocalAccess` uses this for tests; the clock helper adds
a socket and two watchdogs (`server.py`, `helper.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from device_agent.clocks import guard, rules
from device_agent.clocks.access import AccessStatus
from device_agent.clocks.guard import Snapshot
from device_agent.clocks.rules import Kind
from device_agent.errors import BusyError, ClockError, RefusedError, UnsafeError
from device_agent.sysfs import Tree

NO_TRANSACTION = "clocks are written within a transaction only, and there is none"
_SNAPSHOT, _UNSAFE = "snapshot.json", "unsafe.json"


class Transaction:
    """The state of one board's clocks. The caller ensures that each state folder has one."""

    def __init__(
        self, tree: Tree, state_dir: Path, aside: Callable[[Callable[[], None]], None] = lambda work: work()
    ) -> None:
        """`aside` runs blocking disk writes."""
        self.unsafe = read_unsafe(state_dir)
        self._aside = aside
        self._tree = tree
        self._state_dir = state_dir
        self._snapshot: Snapshot | None = None

    @property
    def holder(self) -> str:
        """Who holds the clocks; "" for no one."""
        return self._snapshot.holder if self._snapshot else ""

    def recover(self) -> tuple[str, ...]:
        """Restore what an unfinished transaction left; return notes. Failing makes the board unsafe."""
        if self.unsafe:
            return ()
        try:
            self._snapshot = Snapshot.load(self._state_dir / _SNAPSHOT)
            return self.restore() if self._snapshot else ()
        except ClockError as error:
            self._mark_unsafe(str(error))
        except UnsafeError:
            pass
        return ()

    def begin(self, holder: str) -> None:
        """Snapshot every clock file to disk. Raises BusyError, UnsafeError, ClockError; nothing has changed then."""
        if self.unsafe:
            raise UnsafeError(self.unsafe)
        if self._snapshot is not None:
            raise BusyError(f"{self._snapshot.holder} holds the clocks")
        snapshot = guard.take_snapshot(self._tree, holder or "unknown")
        self._save(snapshot)

    def read(self, path: str) -> str:
        """Read a clock file, in a transaction or not. Raises OSError, RefusedError."""
        return self._tree.read(rules.check_read(self._tree, path))

    def write(self, path: str, text: str) -> None:
        """Write one value. Raises OSError as the kernel, RefusedError, ClockError when the disk is full."""
        snapshot = self._require()
        real, rule = rules.check_write(self._tree, path, text)
        if real not in snapshot.files and rule.kind is not Kind.MEMORY_RATE:
            raise RefusedError(f"{path} could not be read when the snapshot was taken: it could not be put back")
        self._tree.write(real, text)
        if rule.kind is Kind.ONLINE and text == "1":
            self._extend(snapshot)

    def set_power_mode(self, mode_id: int) -> str:
        """Run `nvpmodel -m`; return its output. Raises OSError, RefusedError, ClockError."""
        snapshot = self._require()
        number = rules.check_power_mode(mode_id)
        if snapshot.power_mode is None:
            raise RefusedError("this board's power mode cannot be read: it could not be put back")
        if not snapshot.power_mode_set:
            self._save(dataclasses.replace(snapshot, power_mode_set=True))
        printed = self._tree.run(["nvpmodel", "-m", str(number)])
        self._extend(self._require())
        return printed

    def restore(self) -> tuple[str, ...]:
        """Restore everything and delete the snapshot; return notes. Raises UnsafeError."""
        if self._snapshot is None:
            return ()
        snapshot, self._snapshot = self._snapshot, None
        notes, problems = guard.restore(self._tree, snapshot)
        if problems:
            self._mark_unsafe("; ".join(problems))
            raise UnsafeError(self.unsafe)
        self._forget(_SNAPSHOT)
        return notes

    def clear_unsafe(self, force: bool = False) -> tuple[str, ...]:
        """Retry a failed restore; `force` then deletes the snapshot in any case.

        Returns notes. Raises UnsafeError when a file still does not go back.
        """
        if not self.unsafe:
            return self.restore() if force else ()
        reason, self.unsafe = self.unsafe, ""
        notes: tuple[str, ...] = ()
        try:
            self._snapshot = Snapshot.load(self._state_dir / _SNAPSHOT)
            notes = self.restore()
        except (ClockError, UnsafeError) as error:
            if not force:
                self._mark_unsafe(str(error))
                raise UnsafeError(self.unsafe) from error
            notes = (f"left as it is: {error}",)
        self.unsafe = ""
        for name in (_SNAPSHOT, _UNSAFE):
            self._forget(name)
        return (f"cleared: {reason}", *notes)

    def _require(self) -> Snapshot:
        if self._snapshot is None:
            raise RefusedError(NO_TRANSACTION)
        return self._snapshot

    def _extend(self, snapshot: Snapshot) -> None:
        """Add files that appeared with a core or a mode, before they are written to."""
        new = [path for path in guard.find_clock_files(self._tree) if path not in snapshot.files]
        if found := guard.read_files(self._tree, new):
            self._save(dataclasses.replace(snapshot, files=snapshot.files | found))

    def _save(self, snapshot: Snapshot) -> None:
        """Save the snapshot before any clock is written. Raises ClockError."""

        def save() -> None:
            self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            snapshot.save(self._state_dir / _SNAPSHOT)

        try:
            self._aside(save)
        except OSError as error:
            raise ClockError(f"the snapshot of the clocks cannot be written: {error}") from error
        self._snapshot = snapshot

    def _mark_unsafe(self, reason: str) -> None:
        self.unsafe = reason
        with contextlib.suppress(OSError):  # the snapshot is still there: the next start tries again
            self._aside(lambda: write_unsafe(self._state_dir, reason))

    def _forget(self, name: str) -> None:
        # A file that stays makes the next start restore once more, which does no harm.
        with contextlib.suppress(OSError):
            self._aside(lambda: _remove(self._state_dir / name))


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    guard.sync_folder(path.parent)


def has_snapshot(state_dir: Path) -> bool:
    """Whether a transaction left something to restore."""
    return (state_dir / _SNAPSHOT).exists()


def read_unsafe(state_dir: Path) -> str:
    """Why the board was marked unsafe; "" if it was not."""
    try:
        return str(json.loads((state_dir / _UNSAFE).read_bytes())["reason"])
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"marked unsafe, for a reason that cannot be read: {error}"


def write_unsafe(state_dir: Path, reason: str) -> None:
    """Mark the board unsafe until an operator clears it. Raises OSError."""
    guard.save_json(state_dir / _UNSAFE, {"reason": reason, "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def lock_state(state_dir: Path) -> int:
    """Lock this state folder for one process; the returned file descriptor holds the lock.

    Raises BusyError when another process has it, OSError when the folder cannot be made.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a folder open to other users would let them take the lock
        if not os.fstat(fd).st_mode & stat.S_ISVTX:  # /tmp is shared
            os.fchmod(fd, 0o700)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise BusyError(f"another process guards the clocks with {state_dir}") from error
    return fd


class LocalAccess:
    """`ClockAccess` without a daemon, for root. After a kill only the next `begin` restores."""

    def __init__(self, tree: Tree, state_dir: Path) -> None:
        self._tree = tree
        self._state_dir = state_dir
        self._transaction: Transaction | None = None
        self._lock = -1

    def status(self) -> AccessStatus:
        if self._transaction is not None:
            return AccessStatus(self._transaction.holder, self._transaction.unsafe)
        return AccessStatus(unsafe=read_unsafe(self._state_dir))

    def begin(self, holder: str) -> None:
        if self._transaction is not None:
            return
        transaction = self._open()
        try:
            transaction.begin(holder)
        except BaseException:
            self._release()
            raise

    def read(self, path: str) -> str:
        return (self._transaction or Transaction(self._tree, self._state_dir)).read(path)

    def write(self, path: str, text: str) -> None:
        self._require().write(path, text)

    def set_power_mode(self, mode_id: int) -> str:
        return self._require().set_power_mode(mode_id)

    def restore(self) -> tuple[str, ...]:
        if self._transaction is None:
            return ()
        try:
            return self._transaction.restore()
        finally:
            self._release()

    def clear_unsafe(self, force: bool = False) -> tuple[str, ...]:
        try:
            return (self._transaction or self._open()).clear_unsafe(force)
        finally:
            self._release()

    def close(self) -> None:
        with contextlib.suppress(UnsafeError):
            self.restore()

    def _open(self) -> Transaction:
        """Lock the state folder and restore what an earlier process left there."""
        try:
            self._lock = lock_state(self._state_dir)
        except OSError as error:
            raise ClockError(f"the snapshot of the clocks cannot be written: {error}") from error
        self._transaction = Transaction(self._tree, self._state_dir)
        self._transaction.recover()
        return self._transaction

    def _require(self) -> Transaction:
        if self._transaction is None:
            raise RefusedError(NO_TRANSACTION)
        return self._transaction

    def _release(self) -> None:
        self._transaction = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
