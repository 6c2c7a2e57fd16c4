"""Only one farm command measures on this machine at a time; and campaigns and sweeps of killed commands are closed."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from farm import folders
from farm import settings as farm_settings
from farm.errors import MachineBusyError, UnavailableError
from farm.store import Store
from farm.store.clock import read_boot, read_namespace
from farm.store.routes import name_engine

_LOOK_S = 0.2
# How often a waiting command reports.
_TELL_S = 10.0
# The host's own pid namespace: PROC_PID_INIT_INO of Linux.
_HOST_NAMESPACE = str(0xEFFFFFFC)

_LOCK_HINT = "Remove it, or set XDG_RUNTIME_DIR to a folder that is yours alone."


class _Lock:
    held = False


_LOCK = _Lock()


def name_user(otherwise: str = "unknown") -> str:
    """Who gives an order, for people: `user@host`; `otherwise` for a user without a name."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no such user in this container
        user = otherwise
    return f"{user}@{socket.gethostname()}"


def name_coordinator(home: Path | None = None) -> str:
    """Identify this coordinator among those that share a store: `host:FARM_HOME`, and in a container its id.

    Containers may share both.
    """
    namespace = read_namespace()
    container = "" if namespace == _HOST_NAMESPACE else f":{namespace}"
    return f"{socket.gethostname()}:{home or farm_settings.load().home_path}{container}"


def process_identity() -> dict[str, Any]:
    """A unique identity of this process, across restarts, hosts and containers."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
        "boot": read_boot(),
        "namespace": read_namespace(),
    }


def close_abandoned_campaigns(store: Store) -> None:
    """Mark as `interrupted` the `running` campaigns of killed processes on this machine."""
    for campaign in store.campaigns.fetch_searches():
        if campaign.state == "running" and is_gone((campaign.settings or {}).get("process")):
            store.campaigns.finish(campaign.id, "interrupted")


def close_abandoned_sweeps(store: Store) -> list[int]:
    """As for campaigns; return the sweeps marked. Call it before sweeps are shown or resumed."""
    return store.sweeps.interrupt(lambda settings: is_gone(settings.get("process")))


def is_here(identity: Mapping[str, Any]) -> bool:
    """Whether a process (`process_identity`) is, or was, visible from here.

    A pid means nothing on another host, after a reboot, or in another container, even under equal names.
    """
    ours = {"host": socket.gethostname(), "boot": read_boot(), "namespace": read_namespace()}
    return all(identity.get(key, value) == value for key, value in ours.items())


def is_gone(identity: Mapping[str, Any] | None) -> bool:
    """Whether a process (`process_identity`) of this machine has ended; False for None."""
    if not identity:
        return False
    if not is_here(identity):
        # Gone if it ran here before the last boot, which is not known of containers.
        host, namespaces = socket.gethostname(), {identity.get("namespace"), read_namespace()}
        return identity["host"] == host and identity.get("boot") != read_boot() and namespaces == {_HOST_NAMESPACE}
    try:
        process = psutil.Process(identity["pid"])
        # Some containers reap no orphans: a killed process's zombie works on nothing.
        return process.create_time() != identity["created"] or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def find_engines_gone(store: Store) -> Callable[[Mapping[str, Any]], bool]:
    """Make a test whether an engine (`process_identity`) in a shared store is gone: its process was here and ended, or
    it is another host's and has been silent for long.
    """
    living = store.engines.fetch_living()
    return lambda engine: is_gone(engine) or (not is_here(engine) and name_engine(engine) not in living)


@contextlib.contextmanager
def machine_lock(wait_s: float = 0.0, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Keep a second farm from measuring on this machine, which would disturb both.

    Waits for a running one, which `say` reports. Raises MachineBusyError naming it if it goes on, and UnavailableError
    naming a lock file that cannot be trusted. The kernel frees a killed process's lock. Reentrant within a process.
    """
    if _LOCK.held:
        yield
        return
    path = _find_lock_folder() / f"tvm-farm-{os.getuid()}.lock"
    with _open_own(path) as file:
        _acquire(file, wait_s, say)
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk: the lock holds, without a name
            os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
        try:
            _LOCK.held = True
            yield
        finally:
            _LOCK.held = False
            file.truncate(0)


def _acquire(file: IO[str], wait_s: float, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait_s
    tell_at = 0.0
    while not folders.try_lock(file):
        holder = _name_holder(file)
        if time.monotonic() >= deadline:
            raise MachineBusyError(
                f"another farm command is measuring on this machine: {holder}",
                "Two at once would spoil each other's results; wait for it to end.",
            )
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + _TELL_S
            left_s = deadline - time.monotonic()
            say(
                "waiting for another farm command, which is measuring on this machine, for "
                f"{max(0.0, left_s):.0f} s more at most: {holder}"
            )
        time.sleep(_LOOK_S)


def _name_holder(file: IO[str]) -> str:
    """The command that holds the lock, with its process, as far as known."""
    file.seek(0)
    pid = file.read().strip()
    if not pid.isdigit():
        return "a process that could not write its number"
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(int(pid)).cmdline()
        starts = [number for number, word in enumerate(words) if Path(word).name == "farm"]
        if starts:
            return f"`{' '.join(['farm', *words[starts[0] + 1 :]])}` (pid {pid})"
    return f"pid {pid}"


def wait_for_machine(timeout_s: float, say: Callable[[str], None] = lambda text: None) -> None:
    """Wait until no other farm measures on this machine, up to a time; the next measurement detects the rest."""
    with contextlib.suppress(MachineBusyError), machine_lock(timeout_s, say):
        return


def _find_lock_folder() -> Path:
    """The user's private runtime folder if the system has one, else the shared temporary folder."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    with contextlib.suppress(OSError):
        if named and Path(named).stat().st_uid == os.getuid():
            return Path(named)
    return Path(tempfile.gettempdir())


def _open_own(path: Path) -> IO[str]:
    """Open a file that another user could have created first. Raises UnavailableError unless it is ours."""
    try:
        # Not a link to a file of ours, which would be truncated, and not a pipe, which would block.
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnavailableError(f"the lock {path} cannot be opened: {error.strerror}", _LOCK_HINT) from error
    status = os.fstat(number)
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(number)
        raise UnavailableError(f"the lock {path} is not a file of ours alone", _LOCK_HINT)
    return os.fdopen(number, "r+")
