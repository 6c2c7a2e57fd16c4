"""One farm command at a time on this machine; what becomes of the campaigns and sweeps of those that were killed."""

from __future__ import annotations

import contextlib
import fcntl
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

from farm import settings as farm_settings
from farm.errors import MachineBusyError, UnavailableError
from farm.store import Store
from farm.store.clock import read_boot, read_namespace
from farm.store.engines import name_engine

_LOOK_S = 0.2
# How often a command that waits for another one says so.
_TELL_S = 10.0
# That of a host itself: PROC_PID_INIT_INO of Linux.
_HOST_NAMESPACE = str(0xEFFFFFFC)


class _Lock:
    held = False


_LOCK = _Lock()
_LOCK_HINT = "Remove it, or set XDG_RUNTIME_DIR to a folder that is yours alone."


def name_user(otherwise: str = "unknown") -> str:
    """Who gives an order, so that a person can find them: `user@host`; `otherwise` for a user without a name here."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no such user in this container
        user = otherwise
    return f"{user}@{socket.gethostname()}"


def name_coordinator(home: Path | None = None) -> str:
    """Which of the coordinators that share a store this is: `host:FARM_HOME`, and in a container which one.

    Containers may share both.
    """
    namespace = read_namespace()
    container = "" if namespace == _HOST_NAMESPACE else f":{namespace}"
    return f"{socket.gethostname()}:{home or farm_settings.load().home_path}{container}"


def process_identity() -> dict[str, Any]:
    """Which process this is, in a form that no other has: later ones, and those of other hosts and containers."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
        "boot": read_boot(),
        "namespace": read_namespace(),
    }


def close_abandoned_campaigns(store: Store) -> None:
    """Note as `interrupted` what killed processes of this machine left as `running`."""
    for campaign in store.fetch_campaigns():
        if campaign["state"] == "running" and is_gone((campaign["settings"] or {}).get("process")):
            store.finish_campaign(campaign["id"], "interrupted")


def close_abandoned_sweeps(store: Store) -> list[int]:
    """The same for sweeps; returns those that it noted. To be called before sweeps are shown or resumed."""
    return store.interrupt_sweeps(lambda settings: is_gone(settings.get("process")))


def is_here(identity: Mapping[str, Any]) -> bool:
    """Whether a process (`process_identity`) is, or was, one that can be seen from here.

    Its number says nothing on another host, after another start of the kernel, or in another container, whatever these
    are called. Identities of earlier versions have the host's name alone.
    """
    ours = {"host": socket.gethostname(), "boot": read_boot(), "namespace": read_namespace()}
    return all(identity.get(key, value) == value for key, value in ours.items())


def is_gone(identity: Mapping[str, Any] | None) -> bool:
    """Whether a process (`process_identity`) was one of this machine and is no more; False for None."""
    if not identity:
        return False
    if not is_here(identity):
        return _was_before_restart(identity)
    try:
        process = psutil.Process(identity["pid"])
        # Nobody waits for the children of some containers: what is left of a killed one works on nothing.
        return process.create_time() != identity["created"] or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def find_engines_gone(store: Store) -> Callable[[Mapping[str, Any]], bool]:
    """Tells of an engine (`process_identity`) in a store that hosts share whether it is no more: its process was here
    and is gone, or it is another host's and has given no sign of life for long.
    """
    living = store.fetch_living_engines()
    return lambda engine: is_gone(engine) or (not is_here(engine) and name_engine(engine) not in living)


def _was_before_restart(identity: Mapping[str, Any]) -> bool:
    """Whether a process ran here before the machine was started anew. Unknown for containers."""
    host, namespaces = socket.gethostname(), {identity.get("namespace"), read_namespace()}
    return identity["host"] == host and identity.get("boot") != read_boot() and namespaces == {_HOST_NAMESPACE}


@contextlib.contextmanager
def machine_lock(wait_s: float = 0.0, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Keep a second farm from measuring on this machine at the same time: each would be the other's noise.

    One that does is waited for, and `say` is told which. Raises MachineBusyError naming it where it goes on, and
    UnavailableError naming the file where the lock cannot be trusted. The kernel frees the lock of a process that is
    killed. Within a block of the same process another one changes nothing.
    """
    if _LOCK.held:
        yield
        return
    path = _find_lock_folder() / f"tvm-farm-{os.getuid()}.lock"
    with _open_own(path) as file:
        _acquire(file, wait_s, say)
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk: it holds, without a name
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
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _name_holder(file)
            if time.monotonic() >= deadline:
                raise MachineBusyError(
                    f"another farm command is measuring on this machine: {holder}",
                    "Two at once would spoil each other's results; wait for it to end.",
                ) from None
            if time.monotonic() >= tell_at:
                tell_at = time.monotonic() + _TELL_S
                left_s = deadline - time.monotonic()
                say(
                    "waiting for another farm command, which is measuring on this machine, for "
                    f"{max(0.0, left_s):.0f} s more at most: {holder}"
                )
            time.sleep(_LOOK_S)
        else:
            return


def _name_holder(file: IO[str]) -> str:
    """The command that holds the lock, with its process, as far as can be told."""
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
    """Wait until no other farm measures on this machine, for so long at most; whoever measures next finds out."""
    with contextlib.suppress(MachineBusyError), machine_lock(timeout_s, say):
        return


def _find_lock_folder() -> Path:
    """The folder that is this user's alone where the system has one, else the one for everybody's temporary files."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    with contextlib.suppress(OSError):
        if named and Path(named).stat().st_uid == os.getuid():
            return Path(named)
    return Path(tempfile.gettempdir())


def _open_own(path: Path) -> IO[str]:
    """Open a file that anybody could have put there first. Raises UnavailableError where it is not a file of ours."""
    try:
        # Not a link to a file of ours that would then be truncated, and not a pipe on which to wait for ever.
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnavailableError(f"the lock {path} cannot be opened: {error.strerror}", _LOCK_HINT) from error
    status = os.fstat(number)
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(number)
        raise UnavailableError(f"the lock {path} is not a file of ours alone", _LOCK_HINT)
    return os.fdopen(number, "r+")
